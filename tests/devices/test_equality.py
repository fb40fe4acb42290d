"""Several processes leave the weights of a loop in one process: bit for bit, or as far as sums are reordered."""

from pathlib import Path

import pytest
import torch

from counterpoint.core.plan import Plan
from tests.devices.launch import launch
from tests.devices.problems import (
    Problem,
    Setting,
    delayed_loop,
    differences,
    folder_of,
    plain_loop,
    replicated,
    staged,
    train,
    wrapped,
)

PLAIN = Problem()
CLIPPED = Problem(max_grad_norm=0.05, optimizer="momentum", decayed=True)
DELAYED = Problem(dtype="float64")


@pytest.mark.parametrize(
    ("problem", "plan"),
    [
        (PLAIN, staged("flush", PLAIN)),
        (PLAIN, staged("gpipe", PLAIN, policy="keep", pack=3)),
        (PLAIN, staged("model_parallel", PLAIN, policy="evict", pack=2)),
        (PLAIN, wrapped(PLAIN, 2)),
        (CLIPPED, staged("flush", CLIPPED, policy="keep")),
        (CLIPPED, wrapped(CLIPPED, 2)),
    ],
    ids=["flush", "gpipe", "model parallel", "harmony-pp", "flush clipped", "harmony-pp clipped"],
)
def test_synchronous_schedules_equal_the_plain_loop(problem: Problem, plan: Plan, tmp_path: Path) -> None:
    found = launch(2, train, problem, Setting(plan), folder_of(tmp_path))
    weights, losses = plain_loop(problem)
    assert [differences(device["weights"], weights) for device in found] == [{}, {}]
    assert [device["losses"][:-1] for device in found] == [losses] * 2


@pytest.mark.parametrize("sharded", [False, True], ids=["each updates", "sharded updates"])
def test_replicas_agree_with_one_another_and_nearly_with_the_plain_loop(sharded: bool, tmp_path: Path) -> None:
    plan = replicated(CLIPPED, 2, shard_updates=sharded)
    found = launch(2, train, CLIPPED, Setting(plan), folder_of(tmp_path))
    weights, losses = plain_loop(CLIPPED)
    assert differences(found[0]["weights"], found[1]["weights"]) == {}
    assert found[0]["losses"] == found[1]["losses"]
    torch.testing.assert_close(found[0]["weights"], weights, rtol=1e-5, atol=1e-6)
    assert found[0]["losses"][:-1] == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.05], ids=["free", "clipped"])
def test_2bw_equals_the_delayed_loop(optimizer: str, max_grad_norm: float | None, tmp_path: Path) -> None:
    problem = Problem(dtype="float64", optimizer=optimizer, max_grad_norm=max_grad_norm, decayed=True)
    found = launch(2, train, problem, Setting(staged("2bw", problem)), folder_of(tmp_path))
    weights, losses = delayed_loop(problem)
    assert [differences(device["weights"], weights) for device in found] == [{}, {}]
    assert [device["losses"][1:] for device in found] == [losses] * 2
    assert [device["updates"] for device in found] == [problem.steps] * 2
