"""Evaluation, checkpoints and exports of several devices, and runs that go on under another number of them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from counterpoint.core.plan import Plan
from tests.devices.launch import launch
from tests.devices.problems import (
    Problem,
    Setting,
    act,
    delayed_loop,
    differences,
    plain_loop,
    replicated,
    staged,
    wrapped,
)

PROBLEM = Problem(dropout=0.2, model="normed", optimizer="momentum")
CLIPPED = Problem(dtype="float64", max_grad_norm=0.05)
ALONE = Setting(options={"microbatch": 2})


def act_alone(problem: Problem, folder: Path, *actions: tuple[object, ...]) -> dict[str, object]:
    return act(problem, ALONE, str(folder / "alone"), actions)


@pytest.mark.parametrize(
    "plan",
    [staged("flush", PROBLEM, policy="keep"), staged("gpipe", PROBLEM), wrapped(PROBLEM, 2)],
    ids=["flush", "gpipe", "harmony-pp"],
)
def test_dropout_evaluation_and_export_are_those_of_one_device(plan: Plan, tmp_path: Path) -> None:
    actions = [("steps", 2), ("evaluate",), ("evaluate odd",), ("steps", 2), ("export", str(tmp_path / "exported"))]
    found = launch(2, act, PROBLEM, Setting(plan), str(tmp_path / "home"), actions)
    alone = act_alone(PROBLEM, tmp_path, *actions[:-1])
    for device in found:
        assert differences(device["weights"], alone["weights"]) == {}
        assert device["evaluations"] == alone["evaluations"]
        assert device["losses"] == alone["losses"]
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert differences(exported, alone["weights"]) == {}


def test_replicas_evaluate_together(tmp_path: Path) -> None:
    plan = replicated(CLIPPED, 2, shard_updates=True)
    actions = [("steps", 2), ("evaluate",), ("evaluate odd",), ("steps", 2), ("export", str(tmp_path / "exported"))]
    found = launch(2, act, CLIPPED, Setting(plan), str(tmp_path / "home"), actions)
    alone = act_alone(CLIPPED, tmp_path, *actions[:-1])
    assert found[0]["evaluations"] == found[1]["evaluations"] == pytest.approx(alone["evaluations"], rel=1e-12)
    torch.testing.assert_close(found[0]["weights"], alone["weights"], rtol=1e-12, atol=1e-14)
    assert differences(load_file(tmp_path / "exported" / "model.safetensors"), found[0]["weights"]) == {}


def test_a_checkpoint_goes_from_two_devices_to_one_and_to_four(tmp_path: Path) -> None:
    """Flush on two, then Harmony-PP on four, then alone: the weights are those of the plain loop."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    problem = Problem(max_grad_norm=0.05, steps=6)
    launch(2, act, problem, Setting(staged("flush", problem)), str(tmp_path / "a"), [("steps", 2), ("save", first)])
    on = Setting(wrapped(problem, 4), options={"resume": first})
    launch(4, act, problem, on, str(tmp_path / "b"), [("steps", 2), ("save", second)])
    found = act(problem, Setting(options={"microbatch": 2, "resume": second}), str(tmp_path / "c"), [("steps", 2)])
    assert found["steps"] == 6
    assert differences(found["weights"], plain_loop(problem)[0]) == {}


@pytest.mark.parametrize("clipped", [False, True], ids=["free", "clipped"])
def test_2bw_goes_on_after_draining_saving_and_loading(clipped: bool, tmp_path: Path) -> None:
    """The step after a pause runs on the weights before the last update, as if there had been no pause."""
    problem = Problem(dtype="float64", max_grad_norm=0.05 if clipped else None, steps=7)
    saved = str(tmp_path / "saved")
    setting, home = Setting(staged("2bw", problem)), str(tmp_path / "home")
    actions = [("steps", 1), ("evaluate",), ("steps", 3), ("save", saved), ("steps", 3)]
    weights, losses = delayed_loop(problem)
    found = launch(2, act, problem, setting, home, actions)
    assert [differences(device["weights"], weights) for device in found] == [{}, {}]
    assert found[0]["losses"][-1] == losses[-1]
    again = launch(2, act, problem, setting, home, [("steps", 2), ("load", saved), ("steps", 3)])
    assert [differences(device["weights"], weights) for device in again] == [{}, {}]
    on = Setting(staged("2bw", problem, stages=4), options={"resume": saved})
    four = launch(4, act, problem, on, home, [("steps", 3)])
    assert [differences(device["weights"], weights) for device in four] == [{}] * 4
