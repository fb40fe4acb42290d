"""Small models, their batches and the plain loop that a trainer is held against."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from counterpoint import Trainer
from tests.home import read_parameters

MEMORY = "4GiB"
MICROBATCH = 2


class Net(nn.Module):
    """Normalised by running statistics, with dropout if asked for, a frozen layer and a parameter nobody uses."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(dropout)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.second = nn.Linear(16, 16)
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.relu(self.norm(self.first(x))))
        hidden = hidden + torch.relu(self.second(self.frozen(hidden)))
        return self.last(self.drop(hidden))


class Entry(nn.Linear):
    """A layer that calls its input what the batch calls it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


def loss_of(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output, batch["y"])


def batches(count: int, seed: int = 1, size: int = 4) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.randn(size, 8, generator=generator),
            "y": torch.randint(0, 4, (size,), generator=generator),
        }
        for _ in range(count)
    ]


def net(dropout: float = 0.0) -> Net:
    torch.manual_seed(7)
    return Net(dropout)


def adam(model: nn.Module) -> torch.optim.AdamW:
    """Two groups; what does not train is in neither."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0, "betas": (0.8, 0.9)},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def trainer(folder: Path, model: nn.Module | None = None, **options: Any) -> Trainer:
    model = net() if model is None else model
    optimizer = options.pop("optimizer", None) or adam(model)
    settings: dict[str, Any] = {"memory": MEMORY, "microbatch": MICROBATCH, "loss": loss_of, **options}
    return Trainer(model, optimizer, example=batches(1)[0], disk=folder, **settings)


def plain_loop(model: nn.Module, optimizer: torch.optim.Optimizer, data: Iterable[dict[str, Tensor]]) -> None:
    """What anybody would write: gradients of microbatches accumulated, then a step."""
    model.train()
    for batch in data:
        count = len(batch["x"]) // MICROBATCH
        for k in range(count):
            part = {name: tensor[k * MICROBATCH : (k + 1) * MICROBATCH] for name, tensor in batch.items()}
            (loss_of(model(part["x"]), part) / count).backward()
        optimizer.step()
        optimizer.zero_grad()


def tensors(trained: Trainer) -> dict[str, Tensor]:
    """Every parameter and buffer at the end."""
    trained.settle()
    return read_parameters(trained.store) | dict(trained.compute.buffers)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() <= expected.keys()
    different = [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]
    assert different == []
