"""Small models written by hand, with their batches and losses, that several tests train or take apart."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 32

Batch = dict[str, Tensor]


def regression(output: Any, batch: Any) -> Tensor:
    return functional.mse_loss(output, batch["target"])


def vectors(batch_size: int) -> Batch:
    return {"x": torch.randn(batch_size, WIDTH), "target": torch.randn(batch_size, WIDTH)}


def double_vectors(batch_size: int) -> Batch:
    return {name: tensor.double() for name, tensor in vectors(batch_size).items()}


def grids(batch_size: int) -> Batch:
    return {"x": torch.randn(batch_size, 3, 16, 16), "target": torch.randn(batch_size, 3, 16, 16)}


def streams(batch_size: int) -> Batch:
    return {name: torch.randn(batch_size, WIDTH) for name in ("a", "b", "weight")}


def stream_loss(output: Any, batch: Any) -> Tensor:
    a, others = output
    return a.mean() + others["b"].square().mean() + (others["product"] * batch["weight"]).mean()


class LongSkip(nn.Module):
    """The first activation is used again by the last layer and by one between."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        first = x = torch.tanh(self.layers[0](x))
        for index, layer in enumerate(self.layers[1:]):
            x = torch.tanh(layer(x) * (first if index == 2 else 1))
        return x + first * 2


class Widening(nn.Module):
    """Residual blocks that are four times as wide inside, for vectors or sequences of them."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(num_blocks))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(num_blocks))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up, down in zip(self.norms, self.up, self.down, strict=True):
            x = x + down(functional.gelu(up(norm(x))))
        return x


class TwoStreams(nn.Module):
    """Two inputs, two streams that meet, several outputs, a module that is not used. Takes `streams`."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.right = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        for left, right in zip(self.left, self.right, strict=True):
            a, b = torch.tanh(left(a) + b), torch.tanh(right(b) * a)
        return a, {"b": b, "product": a * b}


class UNet(nn.Module):
    """Skips of all lengths around a heavy bottom. Takes `grids`."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        widths = [4 * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(
            nn.Conv2d(3 if i == 0 else widths[i - 1], widths[i], 3, padding=1) for i in range(depth)
        )
        self.bottom = nn.Conv2d(widths[-2], widths[-1], 3, padding=1)
        self.up = nn.ModuleList(nn.ConvTranspose2d(widths[i + 1], widths[i], 2, 2) for i in range(depth))
        self.merge = nn.ModuleList(nn.Conv2d(2 * widths[i], widths[i], 3, padding=1) for i in range(depth))
        self.head = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = torch.relu(down(x))
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = torch.relu(self.bottom(x))
        for up, merge, skip in reversed(list(zip(self.up, self.merge, skips, strict=True))):
            x = torch.relu(merge(torch.cat([skip, up(x)], 1)))
        return self.head(x)
