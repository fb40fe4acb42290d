"""2BW with its delay mitigated, by steps of Flush at the beginning and by error feedback: a loop that does the same."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from counterpoint.core.plan import Plan
from tests.devices.delay import mitigated_loop, told
from tests.devices.launch import Crew, launch
from tests.devices.problems import (
    STRENGTH,
    Problem,
    Setting,
    act,
    differences,
    folder_of,
    staged,
    train,
    train_swapping,
)
from tests.devices.workers import differ, plan_of, train_through_bad_losses

FREE = Problem(dtype="float64", steps=6)
CLIPPED = Problem(dtype="float64", optimizer="momentum", max_grad_norm=0.05, decayed=True, steps=6, minibatch=16)
TIED = Problem(model="tied", dtype="float64", max_grad_norm=0.05, steps=5)
TIED_LAYERS = 5


def fed_back(problem: Problem) -> Problem:
    return replace(problem, optimizer=f"{problem.optimizer} fed back")


@pytest.mark.parametrize("flush_steps", [1, 3, 9])
@pytest.mark.parametrize("problem", [FREE, CLIPPED], ids=["free", "clipped"])
def test_first_steps_by_flush(problem: Problem, flush_steps: int, tmp_path: Path) -> None:
    plan = staged("2bw", problem, flush_steps=flush_steps)
    found = launch(2, train, problem, Setting(plan), folder_of(tmp_path))
    weights, losses = mitigated_loop(problem, flush_steps)
    assert [differences(device["weights"], weights) for device in found] == [{}, {}]
    assert [device["losses"] for device in found] == [told(losses, flush_steps)] * 2
    assert [device["updates"] for device in found] == [problem.steps] * 2


@pytest.mark.parametrize("flush_steps", [0, 2])
@pytest.mark.parametrize("problem", [FREE, CLIPPED], ids=["free", "clipped"])
def test_error_feedback(problem: Problem, flush_steps: int, tmp_path: Path) -> None:
    plan = staged("2bw", problem, flush_steps=flush_steps)
    found = launch(2, train, fed_back(problem), Setting(plan), folder_of(tmp_path), (2,))
    weights, _ = mitigated_loop(problem, flush_steps, STRENGTH)
    assert [differences(device["weights"], weights) for device in found] == [{}, {}]
    assert differences(found[0]["weights"], mitigated_loop(problem, flush_steps)[0])


@pytest.mark.parametrize(
    ("problem", "plan"),
    [
        (FREE, staged("2bw", FREE, flush_steps=3)),
        (CLIPPED, staged("2bw", CLIPPED, stages=4, policy="evict", flush_steps=3)),
    ],
    ids=["two", "four"],
)
def test_both_while_swapping(problem: Problem, plan: Plan, tmp_path: Path) -> None:
    found = launch(plan.num_devices, train_swapping, fed_back(problem), Setting(plan), folder_of(tmp_path))
    weights, _ = mitigated_loop(problem, 3, STRENGTH)
    assert [differences(device["weights"], weights) for device in found] == [{}] * plan.num_devices
    assert all(device["loaded"] > 0 for device in found)


@pytest.mark.parametrize(
    ("problem", "plan"),
    [
        (CLIPPED, staged("2bw", CLIPPED, replicas=2, flush_steps=3)),
        (CLIPPED, staged("2bw", CLIPPED, replicas=2, shard_updates=True, flush_steps=3)),
        (TIED, staged("2bw", TIED, TIED_LAYERS, flush_steps=3)),
    ],
    ids=["2x2", "2x2 sharded", "tied"],
)
def test_both_with_reordered_sums(problem: Problem, plan: Plan, tmp_path: Path) -> None:
    found: list[dict[str, Any]] = launch(
        plan.num_devices, train_swapping, fed_back(problem), Setting(plan), folder_of(tmp_path)
    )
    weights, _ = mitigated_loop(problem, 3, STRENGTH)
    assert [differences(device["weights"], found[0]["weights"]) for device in found] == [{}] * plan.num_devices
    torch.testing.assert_close(found[0]["weights"], weights, rtol=1e-12, atol=1e-14)


def test_it_goes_on_within_its_first_steps_at_their_end_and_after_them(tmp_path: Path) -> None:
    """Pauses, checkpoints and other numbers of devices change nothing; from step 3 on no plan flushes any more."""
    problem, home = fed_back(replace(FREE, steps=7)), str(tmp_path / "home")
    early, at_end, late = (str(tmp_path / name) for name in ("early", "at end", "late"))
    plan = staged("2bw", problem, flush_steps=3)
    actions = [("steps", 2), ("save", early), ("evaluate",), ("steps", 1), ("save", at_end), ("steps", 2)]
    actions += [("save", late), ("steps", 1), ("load", early), ("steps", 5)]
    weights, losses = mitigated_loop(replace(FREE, steps=7), 3, STRENGTH)
    found = launch(2, act, problem, Setting(plan), home, actions)
    assert [differences(device["weights"], weights) for device in found] == [{}, {}]
    assert found[0]["losses"][-1] == losses[-1]
    for saved, steps, on in (
        (early, 5, staged("2bw", problem, stages=4, flush_steps=3)),
        (at_end, 4, plan),
        (at_end, 4, staged("2bw", problem)),
        (late, 2, plan),
    ):
        again = launch(on.num_devices, act, problem, Setting(on, options={"resume": saved}), home, [("steps", steps)])
        assert [differences(device["weights"], weights) for device in again] == [{}] * on.num_devices, (saved, on)


def test_old_versions_in_half_precision(tmp_path: Path) -> None:
    problem = Problem(precision="bf16", steps=6)
    found = launch(2, train, problem, Setting(staged("2bw", problem, flush_steps=3)), folder_of(tmp_path), (1,))
    assert [differences(device["weights"], mitigated_loop(problem, 3)[0]) for device in found] == [{}, {}]


def test_updates_at_home(tmp_path: Path) -> None:
    plan = staged("2bw", CLIPPED, host_layers=(0, 1, 4), flush_steps=3)
    found = launch(2, train, fed_back(CLIPPED), Setting(plan), folder_of(tmp_path))
    assert [differences(device["weights"], mitigated_loop(CLIPPED, 3, STRENGTH)[0]) for device in found] == [{}, {}]


def test_a_bad_loss_among_the_first_steps_leaves_no_trace(tmp_path: Path) -> None:
    """The step is not counted: as many as asked for are by flush."""
    setting = Setting(staged("2bw", FREE, flush_steps=2))
    found = launch(2, train_through_bad_losses, fed_back(FREE), setting, folder_of(tmp_path), (1,))
    weights, _ = mitigated_loop(FREE, 2, STRENGTH, left_out=(1,))
    assert [differences(device["weights"], weights) for device in found] == [{}, {}]
    assert [(len(device["errors"]), device["steps"]) for device in found] == [(1, FREE.steps - 1)] * 2


def test_the_planner_knows_and_says_it(tmp_path: Path) -> None:
    setting = Setting(options={"schedule": "2bw", "flush_steps": 3})
    found = launch(2, plan_of, FREE, setting, folder_of(tmp_path))
    for plan, text, steps_ns in found:
        assert (plan.schedule, plan.flush_steps) == ("2bw", 3)
        assert "2bw after 3 steps by flush, minibatch 8" in text
        assert ", after 3 steps by flush of " in text
        assert steps_ns > 0


def test_processes_that_differ_in_it_are_told(tmp_path: Path) -> None:
    settings = [Setting(options={"schedule": "2bw", "flush_steps": count}) for count in (2, 3)]
    with Crew(2, differ, [FREE, FREE], settings, folder_of(tmp_path)) as crew:
        assert all("flush_steps on device 1 is 3, on device 0 2" in outcome.error for outcome in crew.outcomes())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "flush", "flush_steps": 2}, "flush_steps are the first steps of 2bw, and the schedule is flush"),
        ({"schedule": "2bw", "flush_steps": -1}, "flush_steps must be at least 0, not -1"),
        ({"plan": 3, "flush_steps": 2}, "the plan has 3 steps by flush, not 2"),
    ],
)
def test_bad_numbers_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    plan = staged("2bw", FREE, flush_steps=options.pop("plan")) if "plan" in options else None
    with Crew(2, train, FREE, Setting(plan, options=options), folder_of(tmp_path)) as crew:
        assert all(message in outcome.error for outcome in crew.outcomes())
