"""Schedules within the least memory that they can do with, tied weights, four processes, bf16: the same weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    train_swapping,
    wrapped,
)

EXACT = Problem(dtype="float64", minibatch=16)
CLIPPED = Problem(dtype="float64", minibatch=16, max_grad_norm=0.05)
TIED = Problem(model="tied", dtype="float64", max_grad_norm=0.05)
HALF = Problem(precision="bf16")
TIED_LAYERS = 5
TOLERANCE = {"rtol": 1e-12, "atol": 1e-14}

Loop = Callable[[Problem], tuple[dict[str, torch.Tensor], list[float]]]


@pytest.mark.parametrize(
    ("problem", "plan", "loop"),
    [
        (EXACT, staged("flush", EXACT), plain_loop),
        (EXACT, staged("gpipe", EXACT, policy="evict", pack=2), plain_loop),
        (EXACT, wrapped(EXACT, 2), plain_loop),
        (EXACT, wrapped(EXACT, 2, residency="lru"), plain_loop),
        (EXACT, staged("2bw", EXACT), delayed_loop),
        (CLIPPED, staged("2bw", CLIPPED, stages=4), delayed_loop),
    ],
    ids=["flush", "gpipe", "harmony-pp", "harmony-pp lru", "2bw", "2bw on four"],
)
def test_swapping_changes_no_bit(problem: Problem, plan: Plan, loop: Loop, tmp_path: Path) -> None:
    found = launch(plan.num_devices, train_swapping, problem, Setting(plan), folder_of(tmp_path))
    weights, _ = loop(problem)
    assert [differences(device["weights"], weights) for device in found] == [{}] * plan.num_devices
    assert all(device["loaded"] > 0 for device in found)


@pytest.mark.parametrize(
    ("problem", "plan", "loop"),
    [
        (CLIPPED, replicated(CLIPPED, 2, shard_updates=True), plain_loop),
        (CLIPPED, replicated(CLIPPED, 4), plain_loop),
        (CLIPPED, staged("flush", CLIPPED, replicas=2, shard_updates=True), plain_loop),
        (CLIPPED, staged("2bw", CLIPPED, replicas=2), delayed_loop),
        (CLIPPED, staged("2bw", CLIPPED, replicas=2, shard_updates=True), delayed_loop),
        (TIED, staged("2bw", TIED, TIED_LAYERS), delayed_loop),
        (TIED, staged("2bw", TIED, TIED_LAYERS, replicas=2), delayed_loop),
        (TIED, wrapped(TIED, 2, TIED_LAYERS), plain_loop),
    ],
    ids=[
        "dp sharded", "dp on four", "flush 2x2 sharded", "2bw 2x2", "2bw 2x2 sharded", "tied 2bw", "tied 2bw 2x2",
        "tied harmony-pp",
    ],
)  # fmt: skip
def test_reordered_sums_change_the_last_bits_only(problem: Problem, plan: Plan, loop: Loop, tmp_path: Path) -> None:
    found: list[dict[str, Any]] = launch(plan.num_devices, train_swapping, problem, Setting(plan), folder_of(tmp_path))
    weights, _ = loop(problem)
    assert [differences(device["weights"], found[0]["weights"]) for device in found] == [{}] * plan.num_devices
    torch.testing.assert_close(found[0]["weights"], weights, **TOLERANCE)


@pytest.mark.parametrize(("schedule", "loop"), [("flush", plain_loop), ("2bw", delayed_loop)], ids=["flush", "2bw"])
def test_bf16(schedule: str, loop: Loop, tmp_path: Path) -> None:
    found = launch(2, train, HALF, Setting(staged(schedule, HALF)), folder_of(tmp_path))
    weights, _ = loop(HALF)
    assert [differences(device["weights"], weights) for device in found] == [{}, {}]
