"""Layers that are updated at home on several devices: the bits are those of updates on the devices."""

from dataclasses import replace
from pathlib import Path

import pytest

from counterpoint.core.plan import Plan
from tests.devices.launch import Crew, launch
from tests.devices.problems import (
    NUM_LAYERS,
    Problem,
    Setting,
    delayed_loop,
    differences,
    folder_of,
    plain_loop,
    replicated,
    staged,
    train,
    train_swapping,
    wrapped,
)
from tests.devices.workers import train_through_bad_losses

PROBLEM = Problem(max_grad_norm=0.05)
FREE = Problem(optimizer="momentum")
ALL = tuple(range(NUM_LAYERS))
TIED = Problem(model="tied")


@pytest.mark.parametrize(
    ("problem", "plan"),
    [
        (PROBLEM, staged("flush", PROBLEM, host_layers=(1, 3, 4))),
        (FREE, staged("flush", FREE, host_layers=ALL)),
        (PROBLEM, staged("gpipe", PROBLEM, host_layers=(0, 5), policy="keep")),
        (PROBLEM, wrapped(PROBLEM, 2, host_layers=(0, 2, 3))),
        (FREE, wrapped(FREE, 2, host_layers=ALL)),
    ],
    ids=["flush", "flush, all", "gpipe", "harmony-pp", "harmony-pp, all"],
)
def test_updates_at_home_equal_the_plain_loop(problem: Problem, plan: Plan, tmp_path: Path) -> None:
    found = launch(2, train, problem, Setting(plan), folder_of(tmp_path))
    weights, losses = plain_loop(problem)
    assert [differences(device["weights"], weights) for device in found] == [{}, {}]
    assert [device["losses"][:-1] for device in found] == [losses] * 2


@pytest.mark.parametrize("max_grad_norm", [None, 0.05], ids=["free", "clipped"])
def test_updates_at_home_have_two_versions_under_2bw(max_grad_norm: float | None, tmp_path: Path) -> None:
    problem = Problem(dtype="float64", max_grad_norm=max_grad_norm, steps=5)
    plan = staged("2bw", problem, host_layers=(0, 1, 4))
    found = launch(2, train, problem, Setting(plan), folder_of(tmp_path), (2,))
    assert [differences(device["weights"], delayed_loop(problem)[0]) for device in found] == [{}, {}]


@pytest.mark.parametrize("bad", [(), (1, 2)], ids=["good", "bad losses"])
def test_updates_at_home_leave_narrow_copies(bad: tuple[int, ...], tmp_path: Path) -> None:
    """Old versions in bf16 are made at home too."""
    problem = Problem(precision="bf16", steps=5)
    plan = staged("2bw", problem)
    expected = launch(2, train_through_bad_losses, problem, Setting(plan), folder_of(tmp_path), bad)
    plan = staged("2bw", problem, host_layers=(0, 1, 4))
    found = launch(2, train_through_bad_losses, problem, Setting(plan), folder_of(tmp_path), bad)
    assert len(found[0]["errors"]) == len(bad)
    assert [differences(device["weights"], expected[0]["weights"]) for device in found] == [{}, {}]


def test_updates_at_home_in_the_least_memory(tmp_path: Path) -> None:
    plan = staged("2bw", PROBLEM, host_layers=(1, 3))
    found = launch(2, train_swapping, PROBLEM, Setting(plan), folder_of(tmp_path))
    assert [differences(device["weights"], delayed_loop(PROBLEM)[0]) for device in found] == [{}, {}]


@pytest.mark.parametrize(
    ("problem", "plan", "devices"),
    [
        (PROBLEM, replicated(PROBLEM, 2, host_layers=(1, 2, 5)), 2),
        (PROBLEM, staged("flush", PROBLEM, replicas=2, host_layers=(0, 3)), 4),
        (TIED, staged("flush", TIED, 5, host_layers=(0, 2)), 2),
    ],
    ids=["harmony-dp", "2 x 2", "tied"],
)
def test_one_home_update_serves_all_who_use_a_layer(problem: Problem, plan: Plan, devices: int, tmp_path: Path) -> None:
    """Sums over devices are the same with updates on the devices."""
    expected = launch(devices, train, problem, Setting(replace(plan, host_layers=())), folder_of(tmp_path))
    found = launch(devices, train, problem, Setting(plan), folder_of(tmp_path))
    assert [differences(device["weights"], expected[0]["weights"]) for device in found] == [{}] * devices


@pytest.mark.parametrize("schedule", ["flush", "2bw"])
def test_a_bad_loss_changes_nothing_at_home(schedule: str, tmp_path: Path) -> None:
    problem = Problem(dtype="float64", steps=5)
    bad = None if schedule == "flush" else (1, 2)
    plan = staged(schedule, problem)
    expected = launch(2, train_through_bad_losses, problem, Setting(plan), folder_of(tmp_path), bad)
    plan = staged(schedule, problem, host_layers=(1, 4))
    found = launch(2, train_through_bad_losses, problem, Setting(plan), folder_of(tmp_path), bad)
    assert found[0]["errors"] == expected[0]["errors"] != []
    assert [differences(device["weights"], expected[0]["weights"]) for device in found] == [{}, {}]


def test_groups_of_microbatches_are_refused(tmp_path: Path) -> None:
    plan = staged("flush", PROBLEM, forward_group=2, backward_group=2)
    with Crew(2, train, PROBLEM, Setting(plan), folder_of(tmp_path)) as crew:
        found = crew.outcomes()
    assert all("groups of microbatches can only be simulated" in outcome.error for outcome in found), found
