"""The public Trainer: a model, its optimizer and an example batch into training steps within a memory budget."""

import contextlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from counterpoint.core.costs import Costs
from counterpoint.core.errors import BudgetError, ExecutionError, ModelError
from counterpoint.core.machine import Device, Home, Link, Machine, Tier
from counterpoint.core.plan import Plan
from counterpoint.core.task import Task, shift
from counterpoint.core.timeline import Timeline
from counterpoint.core.units import format_bytes, parse_bytes
from counterpoint.decomposer import decompose
from counterpoint.decomposer.chain import Batch, Chain, name_tensors
from counterpoint.planner.forecast import Forecast, forecast
from counterpoint.planner.forecast_text import describe
from counterpoint.planner.search import Candidate, Freedom, search
from counterpoint.profiler.measure import profile_of
from counterpoint.runtime.compute import Compute, Step
from counterpoint.runtime.disk import Disk
from counterpoint.runtime.executor import Executor
from counterpoint.runtime.frame import Flat, Frame, frame_of
from counterpoint.runtime.memory import Pool
from counterpoint.runtime.memory_process import memory_limit_bytes, resident_bytes, set_allocator_thresholds, trim
from counterpoint.runtime.optimizer import UpdateRule
from counterpoint.runtime.probe import probe_disk
from counterpoint.runtime.store import STAGING_BYTES, Store, home_sizes

PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}
MARGIN_PERCENT = 4  # of the budget, for what an allocator keeps beyond what is asked of it


class Trainer:
    """Trains `model` with `optimizer` in at most `memory` bytes; weights end up as plain PyTorch would leave them.

    `example` is a minibatch: its first dimension is the number of samples of every step. The budget covers the whole
    process. What does not fit lives in the folder `disk`. Everything else may be left to the planner or given by hand.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer,
        *,
        example: Batch,
        memory: str | int | None = None,
        disk: str | Path | None = None,
        loss: object = None,
        max_grad_norm: float | None = None,
        microbatch: int | None = None,
        precision: str = "fp32",
        seed: int = 0,
        schedule: str = "harmony",
        activations: str | None = None,
        pack: int | None = None,
        residency: str = "planned",
        weights: str | Path | None = None,
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"unknown precision {precision!r}; known are {', '.join(PRECISIONS)}")
        set_allocator_thresholds()
        self.model, self.optimizer, self.seed = model, optimizer, seed
        self.autocast, self.max_grad_norm = PRECISIONS[precision], max_grad_norm
        self.chain: Chain = _chain(model, example, loss)
        self.frame: Frame = frame_of(self.chain)
        self.rule = UpdateRule(optimizer, _names(model, self.chain))
        self.states = _states(self.frame, self.rule)
        self.step_count = 0
        self.data_position = 0
        self._stack = contextlib.ExitStack()
        self.folder = (
            Path(disk)
            if disk is not None
            else Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="counterpoint-")))
        )
        self.memory_bytes = parse_bytes(memory) if memory is not None else memory_limit_bytes() * 8 // 10
        self.minibatch_size = _batch_size(self.chain, example)
        freedom = Freedom(
            self.minibatch_size,
            [microbatch] if microbatch else _divisors(self.minibatch_size),
            (schedule,),
            (pack,) if pack else (1, 2, 4),
            (activations,) if activations else ("evict", "recompute"),
            max_grad_norm is not None,
            residency,
        )
        try:
            self._prepare(freedom, example)
            self._fill(weights)
        except BaseException:
            self._stack.close()
            raise
        self._bodies = 0
        self._running = False

    def _prepare(self, freedom: Freedom, example: Batch) -> None:
        self.disk = self._stack.enter_context(Disk(self.folder, home_sizes(self.frame, self.states)))
        tokens = _tokens_per_sample(self.chain, example)
        self.profile = profile_of(
            self.frame, self.states, self.rule, freedom.microbatch_sizes, "model", tokens, self.autocast
        )
        trim()
        self.base_bytes = resident_bytes() + 2 * STAGING_BYTES
        budget = self.memory_bytes - self.base_bytes - self.memory_bytes * MARGIN_PERCENT // 100
        if budget <= 0:
            raise BudgetError(
                f"the process itself takes {format_bytes(self.base_bytes)} of a budget of "
                f"{format_bytes(self.memory_bytes)}; nothing is left to train in"
            )
        self.machine = _machine(budget, self.folder)
        chosen: Candidate = search(self.profile, self.machine, freedom)
        self.plan: Plan = chosen.plan
        self.program = chosen.program
        self.forecast: Forecast = forecast(self.profile, self.machine, self.plan, self.program, chosen.timeline)
        m = self.plan.num_microbatches
        pool = Pool(budget + budget // 50)
        self.store = Store(self.frame, self.states, self.disk, pool, m)
        self.compute = Compute(
            self.frame, self.store, self.rule, _buffers(self.model), m, self.seed, self.autocast, self.max_grad_norm
        )
        self.executor = Executor(self.store, self.compute, Costs(self.profile, self.plan), budget)
        self._stack.callback(self.executor.close)

    def _fill(self, weights: str | Path | None) -> None:
        assert isinstance(self.model, nn.Module)
        for name, parameter in self.model.named_parameters():
            if name in self.chain.parameters:
                if parameter.device.type == "meta":
                    raise ModelError(f"parameter {name!r} is on the meta device and there are no weights for it")
                self.store.fill(name, parameter)

    def step(self, batch: Batch) -> float:
        """One minibatch through to its update; the mean loss of its microbatches."""
        self._start()
        number = self._bodies
        step = Step(self.step_count, self._microbatches(batch))
        self.compute.steps[number] = step
        self.executor.run(self._body(number), self.step_count)
        self._bodies += 1
        self.step_count += 1
        self.compute.steps.pop(number - 1, None)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return float(torch.stack(list(step.losses.values())).mean())

    def _body(self, number: int) -> Iterable[Task]:
        m = self.program.num_microbatches
        return (shift(task, number, m) for task in self.program.devices[0].body)

    def _start(self) -> None:
        if not self._running:
            self._running, self._bodies = True, 0
            self.executor.restart()
            self.executor.run(self.program.devices[0].prologue, self.step_count)

    def settle(self) -> None:
        """Bring everything home, so that what is there is the whole state of the training."""
        if self._running:
            m = self.program.num_microbatches
            tasks = (shift(task, self._bodies, m) for task in self.program.devices[0].epilogue)
            self.executor.run(tasks, self.step_count)
            self.executor.drain()
            self.store.forget_passing()
            self._running = False

    def _microbatches(self, batch: Batch) -> list[Mapping[int, Tensor]]:
        tensors = name_tensors(batch, tuple(self.chain.batch))
        size = self.plan.microbatch_size
        found = _first_size(tensors)
        if found != self.minibatch_size:
            raise ExecutionError(
                f"the batch has {found} samples, the example had {self.minibatch_size}; every step takes as many"
            )
        return [
            self.chain.bind(
                {name: tensor[k : k + size] if tensor.dim() else tensor for name, tensor in tensors.items()}
            )
            for k in range(0, found, size)
        ]

    def timeline(self) -> Timeline:
        """When each task ran, measured."""
        executor = self.executor
        spans = tuple(sorted(executor.spans, key=lambda span: (span.start_ns, span.device, span.lane)))
        ends: dict[int, int] = {}
        for span in spans:
            if span.lane == "compute":
                ends[span.step] = max(ends.get(span.step, 0), span.end_ns)
        moved = (("disk read", self.store.counters.loaded_bytes), ("disk write", self.store.counters.evicted_bytes))
        return Timeline(1, spans, tuple(ends[s] for s in sorted(ends)), tuple(executor.memory), moved, ())

    def describe(self) -> str:
        """The forecast as text."""
        return describe(self.forecast)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _chain(model: nn.Module | Sequence[nn.Module], example: Batch, loss: object) -> Chain:
    return decompose(model, example, loss=loss)  # type: ignore[arg-type]


def _names(model: nn.Module | Sequence[nn.Module], chain: Chain) -> dict[int, str]:
    assert isinstance(model, nn.Module)
    return {
        id(parameter): chain.aliases.get(name, name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _buffers(model: nn.Module | Sequence[nn.Module]) -> dict[str, Tensor]:
    assert isinstance(model, nn.Module)
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def _states(frame: Frame, rule: UpdateRule) -> tuple[Flat, ...]:
    """Each layer's optimizer state as a flat stretch; slots are named by parameter and key."""
    known: dict[tuple[int, tuple[int, ...], torch.dtype], tuple] = {}  # type: ignore[type-arg]
    found = []
    for weights in frame.weights:
        tensors = []
        for slot in weights.slots:
            if slot.name not in rule.group_of:
                continue
            key = (rule.group_of[slot.name], slot.shape, slot.dtype)
            if key not in known:
                known[key] = rule.state_tensors(slot.name, slot.shape, slot.dtype)
            tensors += [(f"{slot.name}\0{t.key}", t.shape, t.dtype) for t in known[key]]
        found.append(Flat.of(tensors))
    return tuple(found)


def _machine(budget: int, folder: Path) -> Machine:
    """This machine as the planner sees it: RAM under a budget, and a disk."""
    speed = probe_disk(folder / "probe")
    home = Home("disk", ("disk read",), ("disk write",))
    links = (
        Link("disk read", speed.read_bytes_per_s, 100_000),
        Link("disk write", speed.write_bytes_per_s, 100_000),
    )
    return Machine("this machine", (Device("cpu", budget, (home,)),), links, (Tier("disk", 2**62),))


def _divisors(size: int) -> list[int]:
    return [d for d in (1, 2, 4, 8, 16, 32) if size % d == 0]


def _batch_size(chain: Chain, example: Batch) -> int:
    return _first_size(name_tensors(example, tuple(chain.batch)))


def _first_size(tensors: Mapping[str, Tensor]) -> int:
    return next((int(tensor.shape[0]) for tensor in tensors.values() if tensor.dim()), 1)


def _tokens_per_sample(chain: Chain, example: Batch) -> int:
    first = next(iter(name_tensors(example, tuple(chain.batch)).values()))
    return int(first.shape[1]) if first.dim() == 2 and not first.dtype.is_floating_point else 1
