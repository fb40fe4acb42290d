"""Random models: whatever the graph looks like, its cuts change no bit.

A parameter that is used three times or more, twice in one layer, has its gradient summed in another order than autograd
would: not tested here.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from counterpoint.decomposer import decompose

WIDTH = 8
NUM_OPS = 24


class Random(nn.Module):
    """A row of random ops, each reading the latest value and an earlier one, or the input again."""

    steps: Tensor
    table: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        half = NUM_OPS // 2
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(half))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) if i % 2 else nn.BatchNorm1d(WIDTH) for i in range(half))
        self.scales = nn.ParameterList(torch.randn(1, WIDTH) for _ in range(half))
        self.register_buffer("table", torch.randn(WIDTH))
        self.register_buffer("steps", torch.zeros(()))
        choose = random.Random(seed)
        kinds = [name for name in dir(self) if name.startswith("op_")]
        which = choose.sample([*range(half), *range(half)], NUM_OPS)  # at most two uses of anything, see below
        self.ops = [(choose.choice(kinds), index, choose.choice([1, 1, 1, 2, 3, 6])) for index in which]

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for name, which, back in self.ops:
            values.append(getattr(self, name)(values[-1], values[-min(back, len(values))], x, which))
        return sum((value.mean() for value in values[-4:]), values[-1].square().mean())

    def op_linear(self, latest: Tensor, earlier: Tensor, x: Tensor, which: int) -> Tensor:
        return self.linears[which](earlier)

    def op_residual(self, latest: Tensor, earlier: Tensor, x: Tensor, which: int) -> Tensor:
        return earlier + torch.tanh(self.linears[which](latest))

    def op_in_place(self, latest: Tensor, earlier: Tensor, x: Tensor, which: int) -> Tensor:
        return self.linears[which](latest).mul_(0.5).relu_()

    def op_norm(self, latest: Tensor, earlier: Tensor, x: Tensor, which: int) -> Tensor:
        return self.norms[which](latest)

    def op_mask(self, latest: Tensor, earlier: Tensor, x: Tensor, which: int) -> Tensor:
        return latest * (x.cumsum(1) > 0).to(x.dtype) * self.table.cos()

    def op_product(self, latest: Tensor, earlier: Tensor, x: Tensor, which: int) -> Tensor:
        return earlier * torch.sigmoid(latest) * self.scales[which]

    def op_split(self, latest: Tensor, earlier: Tensor, x: Tensor, which: int) -> Tensor:
        first, second = latest.chunk(2, dim=1)
        return torch.cat([second.view(x.shape[0], 2, -1).transpose(1, 2).reshape(x.shape[0], -1), first], 1)

    def op_broadcast(self, latest: Tensor, earlier: Tensor, x: Tensor, which: int) -> Tensor:
        return latest - earlier.detach().mean(0, keepdim=True).expand(x.shape[0], -1)

    def op_count(self, latest: Tensor, earlier: Tensor, x: Tensor, which: int) -> Tensor:
        self.steps += 1
        return latest + self.steps


@pytest.mark.parametrize("seed", range(10))
def test_same_as_plain(seed: int, check_same: Callable[..., None]) -> None:
    model = Random(seed)

    def loss(output: Any, batch: Any) -> Tensor:
        return output + functional.mse_loss(batch["x"], batch["y"])

    def make(batch_size: int) -> dict[str, Tensor]:
        return {"x": torch.randn(batch_size, WIDTH), "y": torch.randn(batch_size, WIDTH)}

    chain = decompose(model, make(3), loss=loss)
    for batch_size in (3, 2):
        batch = make(batch_size)
        check_same(chain, model, batch, lambda plain, batch=batch: loss(plain(batch["x"]), batch))
