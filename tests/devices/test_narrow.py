"""2BW under autocast: old versions are kept in what they are computed in, and no bit of the result changes."""

from collections.abc import Callable
from dataclasses import replace
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
    folder_of,
    staged,
    train,
    train_swapping,
)
from tests.devices.workers import count, count_swapping, versions

WIDE = Problem(model="wide", precision="bf16")
CLIPPED = Problem(model="wide", precision="bf16", max_grad_norm=0.05, optimizer="momentum", decayed=True)
BLOCKS = replace(WIDE, minibatch=64, microbatch=16)  # values are whole blocks of the disk
BLOCK_BYTES = 4 * 4096 + 2 * 64 * 96 * 4  # norms and biases, a block of the disk each, and two matrices
NARROW_BYTES = 4 * 4096 + 2 * 64 * 96 * 2


@pytest.mark.parametrize(
    ("problem", "plan"),
    [
        (WIDE, staged("2bw", WIDE)),
        (WIDE, staged("2bw", WIDE, policy="keep", pack=3)),
        (CLIPPED, staged("2bw", CLIPPED, policy="evict")),
    ],
    ids=["recompute", "keep", "clipped"],
)
def test_narrow_old_versions_change_no_bit(problem: Problem, plan: Plan, tmp_path: Path) -> None:
    found = launch(2, train, problem, Setting(plan), folder_of(tmp_path))
    weights, losses = delayed_loop(problem)
    assert [differences(device["weights"], weights) for device in found] == [{}, {}]
    assert [device["losses"][1:] for device in found] == [losses] * 2


@pytest.mark.parametrize(
    ("problem", "plan"),
    [
        (WIDE, staged("2bw", WIDE)),
        (WIDE, staged("2bw", WIDE, residency="lru")),
        (CLIPPED, staged("2bw", CLIPPED, policy="evict", stages=3)),
    ],
    ids=["planned", "lru", "clipped on three"],
)
def test_nor_does_swapping(problem: Problem, plan: Plan, tmp_path: Path) -> None:
    found = launch(plan.num_devices, train_swapping, problem, Setting(plan), folder_of(tmp_path))
    assert [differences(device["weights"], delayed_loop(problem)[0]) for device in found] == [{}] * plan.num_devices
    assert all(device["loaded"] > 0 for device in found)


@pytest.mark.parametrize("sharded", [False, True], ids=["each updates", "one for all"])
def test_replicas_agree(sharded: bool, tmp_path: Path) -> None:
    """A device that does not update gets the narrow copy from the one that does."""
    plan = staged("2bw", CLIPPED, replicas=2, shard_updates=sharded)
    found = launch(4, train_swapping, CLIPPED, Setting(plan), folder_of(tmp_path))
    assert [differences(device["weights"], found[0]["weights"]) for device in found] == [{}] * 4
    torch.testing.assert_close(found[0]["weights"], delayed_loop(CLIPPED)[0], rtol=1e-2, atol=1e-3)


def test_old_versions_take_what_the_program_says(tmp_path: Path) -> None:
    found = launch(2, versions, WIDE, Setting(staged("2bw", WIDE)), folder_of(tmp_path))
    for device in found:
        assert device["found"] == device["expected"]
    both = found[0]["found"] | found[1]["found"]
    assert both[1] == both[4] == {"weight": BLOCK_BYTES, "old": NARROW_BYTES}
    assert "old" not in both[0]  # an embedding is used as it is


@pytest.mark.parametrize(
    ("work", "problem"),
    [(count, WIDE), (count_swapping, BLOCKS), (count_swapping, replace(BLOCKS, max_grad_norm=0.05))],
    ids=["room for all", "least memory", "least memory, clipped"],
)
def test_what_moves_is_what_the_program_says(work: Callable[..., object], problem: Problem, tmp_path: Path) -> None:
    found = launch(2, work, problem, Setting(staged("2bw", problem)), folder_of(tmp_path))
    for device in found:
        assert {name: measured for name, (measured, _) in device.items()} == {
            name: expected for name, (_, expected) in device.items()
        }
    assert max(device["versions"][0] for device in found) == 2


def test_pauses_and_checkpoints_keep_the_narrow_version(tmp_path: Path) -> None:
    problem, saved, home = (
        Problem(model="wide", precision="bf16", steps=6),
        str(tmp_path / "saved"),
        folder_of(tmp_path),
    )
    setting = Setting(staged("2bw", problem))
    weights, losses = delayed_loop(problem)
    found = launch(
        2, act, problem, setting, home, [("steps", 2), ("evaluate",), ("steps", 2), ("save", saved), ("steps", 2)]
    )
    assert [differences(device["weights"], weights) for device in found] == [{}, {}]
    assert found[0]["losses"][-1] == losses[-1]
    previous = load_file(Path(saved) / "previous.safetensors")
    assert previous["first.0.weight"].dtype == torch.bfloat16
    assert previous["norms.0.weight"].dtype == torch.float32
    on = Setting(staged("2bw", problem, stages=3), options={"resume": saved})
    again = launch(3, act, problem, on, home, [("steps", 2)])
    assert [differences(device["weights"], weights) for device in again] == [{}] * 3


def test_a_checkpoint_goes_on_in_another_precision(tmp_path: Path) -> None:
    """The version before the newest is rounded or widened; in fp32 the run goes on from what bf16 left."""
    saved, exact = str(tmp_path / "saved"), Problem(model="wide", steps=4)
    launch(2, act, WIDE, Setting(staged("2bw", WIDE)), folder_of(tmp_path), [("steps", 2), ("save", saved)])
    on = Setting(staged("2bw", exact), options={"resume": saved})
    found = launch(2, act, exact, on, folder_of(tmp_path), [("save", saved), ("steps", 2), ("load", saved)])
    assert load_file(Path(saved) / "previous.safetensors")["first.0.weight"].dtype == torch.float32
    back = launch(2, act, WIDE, Setting(on.plan, options=on.options), folder_of(tmp_path), [("steps", 2)])
    whole = launch(2, act, WIDE, Setting(on.plan), folder_of(tmp_path), [("steps", 4)])
    assert [differences(device["weights"], whole[0]["weights"]) for device in back] == [{}, {}]
    assert found[0]["steps"] == 2
