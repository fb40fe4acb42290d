"""Bytes that the store counts, against those the program says: what was simulated is what moves.

Weights, constants, gradients and states are laid out in whole blocks, so their numbers agree to the byte. A value is
rounded up to a block, and of saved tensors each storage is; here all of them are whole blocks.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

from counterpoint.core.task import PER_LAYER, Buffer, Evict, Load
from counterpoint.runtime.disk_extents import round_to_blocks
from tests.small_models import Batch, regression

from .bench import ALL_FITS, Problem, Setting, Trained, train, transfers

WIDTH = 64


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return x + first


def vectors(batch_size: int) -> Batch:
    return {"x": torch.randn(batch_size, 40, WIDTH), "target": torch.randn(batch_size, 40, WIDTH)}


PROBLEM = Problem(Row, vectors, regression)


def per_step(trained: Trained) -> list[tuple[int, int]]:
    """Bytes loaded and evicted by each step after the first, which finds no state to load."""
    pairs = zip(trained.moved, trained.moved[1:], strict=False)
    return [(after[0] - before[0], after[1] - before[1]) for before, after in pairs]


def size(trained: Trained, buffer: Buffer) -> int:
    return round_to_blocks(trained.costs.buffer_bytes(buffer))


def said(trained: Trained, kind: type[Load] | type[Evict]) -> list[Buffer]:
    return [task.buffer for task in transfers(trained.program.devices[0].body) if isinstance(task, kind)]


@pytest.mark.parametrize("policy", ["recompute", "evict", "keep"])
def test_nothing_moves_when_all_fits(policy: str, tmp_path: Path) -> None:
    trained = train(PROBLEM, Setting(policy, budget=ALL_FITS), tmp_path)
    assert transfers(trained.program.devices[0].body) == []
    assert per_step(trained) == [(0, 0)] * 4


@pytest.mark.parametrize("schedule", ["harmony", "plain"])
@pytest.mark.parametrize("budget", [1.0, 1.7])
def test_what_moves_is_what_the_program_says(schedule: str, budget: float, tmp_path: Path) -> None:
    trained = train(PROBLEM, Setting("recompute", pack=1, budget=budget, schedule=schedule), tmp_path)
    loads, evicts = said(trained, Load), said(trained, Evict)
    assert {buffer.kind for buffer in loads} >= {"weight", "state"}
    assert "activation" in {buffer.kind for buffer in loads} or (schedule, budget) == ("plain", 1.7)
    flat = [buffer for buffer in loads + evicts if buffer.kind in PER_LAYER]
    assert all(trained.costs.buffer_bytes(buffer) == size(trained, buffer) for buffer in flat)
    expected = sum(size(trained, buffer) for buffer in loads), sum(size(trained, buffer) for buffer in evicts)
    assert per_step(trained) == [expected] * 4


@pytest.mark.parametrize("stows", [False, True])
def test_saved_tensors_move_as_said(stows: bool, tmp_path: Path) -> None:
    trained = train(PROBLEM, Setting("evict", pack=1, budget=1.0, stows=stows), tmp_path)
    loads, evicts = said(trained, Load), said(trained, Evict)
    saved = [buffer for buffer in evicts if buffer.kind == "saved"]
    assert len(saved) == 5 * 3  # all layers but the last, which runs forward and backward in one; three microbatches
    expected = sum(size(trained, buffer) for buffer in loads), sum(size(trained, buffer) for buffer in evicts)
    assert per_step(trained) == [expected] * 4


def test_more_memory_moves_less(tmp_path: Path) -> None:
    moved = []
    for budget in (1.0, 1.5, 2.5, 4.0, ALL_FITS):
        trained = train(PROBLEM, Setting("recompute", pack=1, budget=budget), tmp_path / str(budget))
        moved.append(sum(per_step(trained)[-1]))
    assert moved == sorted(moved, reverse=True)
    assert moved[0] > moved[2] > moved[-1] == 0
