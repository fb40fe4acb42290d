"""Models written by hand: skips, ties, reuse, buffers, views, several inputs and outputs, gaps in the gradient."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.small_models import (
    WIDTH,
    Batch,
    LongSkip,
    TwoStreams,
    UNet,
    Widening,
    double_vectors,
    grids,
    regression,
    stream_loss,
    streams,
    vectors,
)

from .bench import ALL_FITS, Problem, Setting, differences, sgd, train, train_plainly


def sequences(batch_size: int) -> Batch:
    return {"x": torch.randn(batch_size, 12, WIDTH), "target": torch.randn(batch_size, 12, WIDTH)}


class Dense(nn.Module):
    """Every layer reads all before it: gradients of a value come from many consumers, of one some several times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH * (i + 1), WIDTH) for i in range(5))

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            y = torch.tanh(layer(torch.cat(found, 1)))
            found.append(y * y + found[-1] * 0.5)
        return found[-1] + found[1]


class Counting(nn.Module):
    """Buffers written in place, assigned, and read by others; batch norm."""

    seen: Tensor
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.norm(self.first(x))
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return self.second(torch.relu(x)) + self.average


class Views(nn.Module):
    """Values that are views of one another, of weights, and not contiguous; gradients that are views too."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(12, WIDTH))
        self.mix = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.dense = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.halves = nn.ModuleList(nn.Linear(WIDTH // 2, WIDTH // 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        query = self.query.expand(x.shape[0], -1, -1)
        for mix, dense, halves in zip(self.mix, self.dense, self.halves, strict=True):
            x = mix(torch.tanh(dense(x)).transpose(1, 2)).transpose(1, 2)
            left, right = x.chunk(2, -1)
            x = torch.cat([right, halves(left)], -1) + query
        flat = x.reshape(x.shape[0], -1)
        return flat.view_as(x) + query


class Borrowed(nn.Module):
    """A value that is a view of a weight, used long after the weight's memory has gone to others of its size."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        table = self.table.expand(x.shape[0], -1, -1)
        x = torch.tanh(self.first(x)) * table
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + x * table


def squares(batch_size: int) -> Batch:
    return {name: torch.randn(batch_size, WIDTH, WIDTH) for name in ("x", "target")}


class Gaps(nn.Module):
    """A value that only detached readers use, a parameter that gets no gradient, one that gets it by a side way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * (gate.detach() if index == 2 else 1)
        return x + self.scale * (gate > 0)


class Frozen(nn.Module):
    """Frozen layers below, between and within those that train."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        for index in (0, 1, 3):
            self.layers[index].requires_grad_(False)
        self.layers[4].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Double(LongSkip):
    """In double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.double()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch], Callable[[Any, Any], Tensor]]] = {
    "long skip": (LongSkip, vectors, regression),
    "widening": (Widening, vectors, regression),
    "dense": (Dense, vectors, regression),
    "counting": (Counting, vectors, regression),
    "two streams": (TwoStreams, streams, stream_loss),
    "views": (Views, sequences, regression),
    "borrowed": (Borrowed, squares, regression),
    "gaps": (Gaps, vectors, regression),
    "frozen": (Frozen, vectors, regression),
    "unet": (UNet, grids, regression),
    "double": (Double, double_vectors, regression),
}

SETTINGS = [
    Setting("recompute", pack=1, budget=1.0, microbatch=2),
    Setting("evict", pack=1, budget=1.0, microbatch=2),
    Setting("evict", pack=2, budget=1.0, microbatch=3, schedule="plain"),
    Setting("keep", pack=3, budget=1.3, microbatch=2),
    Setting("keep", pack=3, budget=1.3, microbatch=2, stows=True),
    Setting("evict", pack=1, budget=1.0, microbatch=2, stows=True),
    Setting("recompute", pack=2, budget=1.0, microbatch=3, schedule="plain"),
    Setting("recompute", pack=100, budget=ALL_FITS, microbatch=6),
    Setting("evict", pack=1, budget=1.0, microbatch=2, residency="lru"),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_same_as_plain(name: str, setting: Setting, tmp_path: Path) -> None:
    problem = Problem(*MODELS[name], optimizer=sgd)
    expected = train_plainly(problem, setting.microbatch)
    assert differences(train(problem, setting, tmp_path).outcome, expected) == []


def unnamed_sequences(batch_size: int) -> Batch:
    return {"input": torch.randn(batch_size, 96, WIDTH), "target": torch.randn(batch_size, 96, WIDTH)}


def row() -> nn.Module:
    """Modules that only look at their input differently stand between those that compute."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Flatten(0, 1), nn.Tanh(), nn.Unflatten(0, (-1, 96)), nn.Identity()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_list_of_modules(setting: Setting, tmp_path: Path) -> None:
    problem = Problem(row, unnamed_sequences, regression, optimizer=sgd, listed=True)
    expected = train_plainly(problem, setting.microbatch)
    assert differences(train(problem, setting, tmp_path).outcome, expected) == []
