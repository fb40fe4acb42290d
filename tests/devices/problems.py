"""Tiny models for several devices, the loops that they are held against, and training one of them on a device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from counterpoint import ErrorFeedback, Trainer
from counterpoint.core.homes import UPDATE_STAGING_BYTES
from counterpoint.core.plan import Pack, Plan, equal_packs
from counterpoint.passes.residency import smallest_budgets
from counterpoint.schedules import write_program
from counterpoint.trainer import engine
from tests import where
from tests.home import read_parameters

MEMORY = "4GiB"
NUM_LAYERS = 6
STRENGTH = 0.5
PAGES_BYTES = 1 << 20  # a buffer of a few bytes takes a page


class Mlp(nn.Module):
    """Six linear layers of uneven sizes; a value skips over the middle."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(8, 24)
        self.second = nn.Linear(24, 16)
        self.third = nn.Linear(16, 16)
        self.fourth = nn.Linear(16, 24)
        self.fifth = nn.Linear(24, 24)
        self.last = nn.Linear(24, 4)
        self.drop = nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        skipped = torch.relu(self.first(x))
        hidden = self.norm(torch.tanh(self.second(skipped)))
        hidden = self.drop(torch.relu(self.third(hidden)))
        hidden = torch.relu(self.fourth(hidden)) + skipped
        return self.last(self.drop(torch.tanh(self.fifth(hidden))))


class Tied(nn.Module):
    """The head uses the embedding's matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 12)
        self.first = nn.Linear(12, 20)
        self.second = nn.Linear(20, 12)
        self.third = nn.Linear(12, 12)
        self.head = nn.Linear(12, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        hidden = hidden + self.second(torch.relu(self.first(hidden)))
        return self.head(torch.tanh(self.third(hidden)))


class Wide(nn.Module):
    """Blocks whose matrices are large enough to be narrow, with norms that are not; a layer each, like its ends."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 64)
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(4))
        self.first = nn.ModuleList(nn.Linear(64, 96) for _ in range(4))
        self.second = nn.ModuleList(nn.Linear(96, 64) for _ in range(4))
        self.head = nn.Linear(64, 11)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for norm, first, second in zip(self.norms, self.first, self.second, strict=True):
            hidden = hidden + second(torch.relu(first(norm(hidden))))
        return self.head(hidden)


def mlp_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output, batch["y"])


def tokens_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), batch["y"].flatten())


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1),
    "momentum fed back": lambda model: ErrorFeedback(OPTIMIZERS["momentum"](model), STRENGTH),
    "adamw fed back": lambda model: ErrorFeedback(OPTIMIZERS["adamw"](model), STRENGTH),
}


@dataclass(frozen=True)
class Problem:
    """What is trained and how; everything in it can be sent to another process."""

    model: str = "mlp"
    optimizer: str = "adamw"
    dtype: str = "float32"
    dropout: float = 0.0
    minibatch: int = 8
    microbatch: int = 2
    max_grad_norm: float | None = None
    precision: str = "fp32"
    decayed: bool = False
    steps: int = 4
    seed: int = 3

    def build(self) -> nn.Module:
        torch.manual_seed(7)
        model: nn.Module = Mlp(self.dropout, norm=self.model == "normed")
        if self.is_of_tokens:
            model = Tied() if self.model == "tied" else Wide()
        return model.to(getattr(torch, self.dtype)).train()

    def build_here(self) -> nn.Module:
        """On the device that this process may compute on."""
        return self.build().to(where.device())

    @property
    def is_of_tokens(self) -> bool:
        return self.model in ("tied", "wide")

    @property
    def loss(self) -> Callable[[Tensor, dict[str, Tensor]], Tensor]:
        return tokens_loss if self.is_of_tokens else mlp_loss

    def batches(self, steps: int | None = None) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        return [self._batch(generator) for _ in range(self.steps if steps is None else steps)]

    def _batch(self, generator: torch.Generator) -> dict[str, Tensor]:
        size = self.minibatch
        if self.is_of_tokens:
            length = 16 if self.model == "wide" else 5  # too long for a cut in the middle of its blocks
            x, y = (torch.randint(0, 11, (size, length), generator=generator) for _ in range(2))
            return {"x": x, "y": y}
        x = torch.randn(size, 8, generator=generator).to(getattr(torch, self.dtype))
        return {"x": x, "y": torch.randint(0, 4, (size,), generator=generator)}

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7) if self.decayed else None


@dataclass(frozen=True)
class Setting:
    """How it is spread: `plan` goes to the trainer as it is, and so do `options`."""

    plan: Plan | None = None
    memory: str | int = MEMORY
    options: dict[str, Any] = field(default_factory=dict)


def staged(
    schedule: str, problem: Problem, num_layers: int = NUM_LAYERS, stages: int = 2, replicas: int = 1,
    policy: str = "recompute", pack: int = 1, **changes: Any,
) -> Plan:  # fmt: skip
    """Stages of equal numbers of layers, the later ones larger."""
    bounds = [num_layers * i // stages for i in range(stages + 1)]
    positions = tuple(Pack(a, b - 1) for a, b in pairwise(bounds))
    packs = tuple(
        Pack(stage.first + p.first, stage.first + p.last)
        for stage in positions
        for p in equal_packs(stage.last - stage.first + 1, pack)
    )
    return Plan(
        schedule, problem.minibatch // problem.microbatch // replicas, problem.microbatch, packs, packs,
        (policy,) * len(packs), num_devices=stages * replicas, num_replicas=replicas, stages=positions,
        clipping=problem.max_grad_norm is not None, **changes,
    )  # fmt: skip


def replicated(problem: Problem, replicas: int, num_layers: int = NUM_LAYERS, **changes: Any) -> Plan:
    packs = equal_packs(num_layers, 1)
    return Plan(
        "harmony", problem.minibatch // problem.microbatch // replicas, problem.microbatch, packs, packs[:-1],
        ("recompute",) * len(packs), num_devices=replicas, num_replicas=replicas,
        clipping=problem.max_grad_norm is not None, **changes,
    )  # fmt: skip


def wrapped(problem: Problem, devices: int, num_layers: int = NUM_LAYERS, **changes: Any) -> Plan:
    packs = equal_packs(num_layers, 1)
    return Plan(
        "harmony_pp", problem.minibatch // problem.microbatch, problem.microbatch, packs, packs[:-1],
        ("recompute",) * len(packs), num_devices=devices, clipping=problem.max_grad_norm is not None, **changes,
    )  # fmt: skip


def make_trainer(problem: Problem, setting: Setting, folder: str) -> Trainer:
    model = problem.build()
    optimizer = OPTIMIZERS[problem.optimizer](model)
    options = {"microbatch": problem.microbatch, **setting.options} if setting.plan is None else setting.options
    return Trainer(
        model, optimizer, example=problem.batches(1)[0], memory=setting.memory, disk=folder, loss=problem.loss,
        max_grad_norm=problem.max_grad_norm, precision=problem.precision, seed=problem.seed, plan=setting.plan,
        **options,
    )  # fmt: skip


def train_swapping(problem: Problem, setting: Setting, folder: str, factor: float = 1.0) -> dict[str, Any]:
    """As `train`, with `factor` times the least memory that the plan can do with."""
    with least_memory(problem, setting, folder, factor) as least:
        return train(problem, setting, folder) | {"least": least}


@contextmanager
def least_memory(problem: Problem, setting: Setting, folder: str, factor: float = 1.0) -> Iterator[tuple[int, ...]]:
    """Within it trainers have only so many times the least memory that the plan can do with: these models are small
    beside the process itself, so what programs may use is given by hand."""
    assert setting.plan is not None
    with make_trainer(problem, setting, folder) as trainer:
        program = write_program(setting.plan, trainer.program.outline)
        least = smallest_budgets(program, trainer.executor.costs)
        device = trainer.device
    before = engine.usable_bytes, engine.pool_bytes
    staging = UPDATE_STAGING_BYTES if setting.plan.host_layers else 0
    engine.usable_bytes = lambda memory, base: int(least[device] * factor) + staging  # type: ignore[assignment]
    engine.pool_bytes = lambda budget: before[1](budget) + PAGES_BYTES  # whole pages do not count
    try:
        yield least
    finally:
        engine.usable_bytes, engine.pool_bytes = before


def weights_of(trainer: Trainer) -> dict[str, Tensor]:
    """Every weight and buffer at home; all devices must ask."""
    trainer.settle()
    if trainer.peers is not None:
        trainer.peers.barrier("read")
    found = read_parameters(trainer.store)
    if trainer.peers is not None:
        trainer.peers.barrier("have read")
    return found | {name: buffer.cpu() for name, buffer in trainer.compute.buffers.items()}


def train(problem: Problem, setting: Setting, folder: str, settles: tuple[int, ...] = ()) -> dict[str, Any]:
    """Runs in every process: the losses that were told, the weights at the end, what was moved."""
    with make_trainer(problem, setting, folder) as trainer:
        scheduler = problem.scheduler(trainer.optimizer)
        losses = []
        for number, batch in enumerate(problem.batches()):
            losses.append(trainer.step(batch))
            if scheduler is not None:
                scheduler.step()
            if number in settles:
                losses.append(trainer.settle())
        losses.append(trainer.settle())
        found = weights_of(trainer)
        moved = trainer.store.counters
        return {
            "losses": losses, "weights": found, "updates": trainer._engine.updates,
            "loaded": moved.loaded_bytes, "evicted": moved.evicted_bytes, "peak": trainer.store.pool.statistics(),
        }  # fmt: skip


def act(problem: Problem, setting: Setting, folder: str, actions: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """Runs in every process, or in one: a number of steps, an evaluation, or a folder to save, load or export."""
    found: dict[str, Any] = {"evaluations": [], "losses": []}
    with make_trainer(problem, setting, folder) as trainer:
        for name, *arguments in actions:
            match name:
                case "steps":
                    for batch in problem.batches()[trainer.step_count : trainer.step_count + arguments[0]]:
                        found["losses"].append(trainer.step(batch))
                case "evaluate":
                    found["evaluations"].append(trainer.evaluate(problem.batches()[0]))
                case "evaluate odd":
                    batch = {name: tensor[:5] for name, tensor in problem.batches()[1].items()}
                    found["evaluations"].append(trainer.evaluate(batch))
                case "save" | "load" | "export":
                    getattr(trainer, name)(*arguments)
                case _:
                    raise ValueError(name)
        found["losses"].append(trainer.settle())
        found |= {"weights": weights_of(trainer), "steps": trainer.step_count}
        return found


def plain_loop(problem: Problem) -> tuple[dict[str, Tensor], list[float]]:
    """Gradients of microbatches accumulated, clipped, then a step."""
    model = problem.build_here()
    optimizer = OPTIMIZERS[problem.optimizer](model)
    scheduler = problem.scheduler(optimizer)
    losses = []
    for batch in problem.batches():
        losses.append(accumulate(problem, model, batch))
        if problem.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), problem.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return {n: p.detach().cpu() for n, p in (*model.named_parameters(), *model.named_buffers())}, losses


def delayed_loop(problem: Problem) -> tuple[dict[str, Tensor], list[float]]:
    """2BW in one process: gradients at the weights before the last update, applied to the newest."""
    model, old = problem.build_here(), problem.build_here()
    optimizer = OPTIMIZERS[problem.optimizer](model)
    scheduler = problem.scheduler(optimizer)
    losses = []
    for batch in problem.batches():
        losses.append(accumulate(problem, old, batch))
        for newest, before in zip(model.parameters(), old.parameters(), strict=True):
            newest.grad = before.grad
            before.grad = None
        if problem.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), problem.max_grad_norm)
        with torch.no_grad():
            for newest, before in zip(model.parameters(), old.parameters(), strict=True):
                before.copy_(newest)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return {n: p.detach().cpu() for n, p in (*model.named_parameters(), *model.named_buffers())}, losses


def accumulate(problem: Problem, model: nn.Module, batch: dict[str, Tensor]) -> float:
    count, device = problem.minibatch // problem.microbatch, where.device()
    found = []
    for k in range(count):
        part = {n: t[k * problem.microbatch : (k + 1) * problem.microbatch].to(device) for n, t in batch.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=problem.precision == "bf16"):
            loss = problem.loss(model(part["x"]), part)
        (loss / count).backward()
        found.append(loss.detach())
    return float(torch.stack(found).mean())


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """What is not the same bit for bit, and by how much."""
    return {
        name: float((found[name] - tensor).abs().max())
        for name, tensor in expected.items()
        if not torch.equal(found[name], tensor)
    }


def folder_of(path: Path) -> str:
    return str(path / "home")
