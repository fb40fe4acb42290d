"""A loss that is not finite: every device hears of it before its first update, and no weight is changed anywhere."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from counterpoint.core.plan import Plan
from tests.devices.launch import launch
from tests.devices.problems import (
    OPTIMIZERS,
    Problem,
    Setting,
    accumulate,
    differences,
    replicated,
    staged,
    train,
    wrapped,
)
from tests.devices.workers import train_through_bad_losses

PROBLEM = Problem(model="normed", dropout=0.2, max_grad_norm=0.05, steps=3)
DELAYED = Problem(dtype="float64", max_grad_norm=0.05, steps=5)


@pytest.mark.parametrize(
    "plan",
    [
        staged("flush", PROBLEM),
        staged("flush", PROBLEM, policy="keep"),
        staged("gpipe", PROBLEM),
        wrapped(PROBLEM, 2),
    ],
    ids=["flush", "flush keep", "gpipe", "harmony-pp"],
)
def test_a_bad_loss_leaves_no_trace(plan: Plan, tmp_path: Path) -> None:
    """Each step is tried with a bad batch first, then goes on as if that had not been."""
    expected = launch(2, train, PROBLEM, Setting(plan), str(tmp_path / "home"))[0]
    found = launch(2, train_through_bad_losses, PROBLEM, Setting(plan), str(tmp_path / "home"))
    for device in found:
        assert device["errors"] == [f"the loss of microbatch 3 in step {step} is nan" for step in range(3)]
        assert device["losses"] == expected["losses"][:-1]
        assert differences(device["weights"], expected["weights"]) == {}


@pytest.mark.parametrize("sharded", [False, True], ids=["own updates", "sharded updates"])
def test_a_bad_loss_of_one_replica_is_one_of_all(sharded: bool, tmp_path: Path) -> None:
    problem = replace(PROBLEM, model="mlp", dropout=0.0)
    setting = Setting(replicated(problem, 2, shard_updates=sharded))
    expected = launch(2, train, problem, setting, str(tmp_path / "home"))
    found = launch(2, train_through_bad_losses, problem, setting, str(tmp_path / "home"))
    for device in found:
        assert len(device["errors"]) == 3
        assert device["losses"] == expected[0]["losses"][:-1]
        assert differences(device["weights"], expected[0]["weights"]) == {}


def test_replicas_of_stages_skip_a_bad_loss_together(tmp_path: Path) -> None:
    problem = replace(PROBLEM, model="mlp", dropout=0.0)
    setting = Setting(staged("flush", problem, replicas=2))
    expected = launch(4, train, problem, setting, str(tmp_path / "home"))
    found = launch(4, train_through_bad_losses, problem, setting, str(tmp_path / "home"))
    assert [differences(device["weights"], expected[0]["weights"]) for device in found] == [{}] * 4


def test_a_bad_loss_under_2bw_makes_an_update_that_changes_nothing(tmp_path: Path) -> None:
    """It is told with the next batch, or when the training is settled; batches that are under way go on."""
    setting = Setting(staged("2bw", DELAYED))
    found = launch(2, train_through_bad_losses, DELAYED, setting, str(tmp_path / "home"), (1, 4))
    weights = _delayed_loop_without(DELAYED, (1, 4))
    for device in found:
        assert device["errors"] == [f"the loss of microbatch 3 in step {step} is nan" for step in (1, 4)]
        assert device["steps"] == 5
        assert differences(device["weights"], weights) == {}


def test_a_bad_loss_under_2bw_ends_a_run_whose_statistics_it_has_changed(tmp_path: Path) -> None:
    problem = replace(DELAYED, model="normed")
    setting = Setting(staged("2bw", problem))
    found = launch(2, train_through_bad_losses, problem, setting, str(tmp_path / "home"), (1,))
    for device in found:
        assert device["errors"][0] == "the loss of microbatch 3 in step 1 is nan"
        assert "load a checkpoint, or make a new trainer with resume" in device["ended"]


def _delayed_loop_without(problem: Problem, bad: tuple[int, ...]) -> dict[str, Tensor]:
    model, old = problem.build(), problem.build()
    optimizer = OPTIMIZERS[problem.optimizer](model)
    for number, batch in enumerate(problem.batches()):
        if number not in bad:
            accumulate(problem, old, batch)
        with torch.no_grad():
            for newest, before in zip(model.parameters(), old.parameters(), strict=True):
                newest.grad, before.grad = before.grad, None
                before.copy_(newest)
        if number not in bad:
            assert problem.max_grad_norm is not None
            nn.utils.clip_grad_norm_(model.parameters(), problem.max_grad_norm)
            optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
