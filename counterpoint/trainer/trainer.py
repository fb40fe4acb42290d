"""The public Trainer: a model, its optimizer and an example batch into training steps within a memory budget."""

import contextlib
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from counterpoint.core.costs import Costs
from counterpoint.core.errors import ExecutionError, LossError, ModelError
from counterpoint.core.plan import POLICIES, Plan
from counterpoint.core.task import Task, shift
from counterpoint.core.timeline import Timeline
from counterpoint.core.units import parse_bytes
from counterpoint.decomposer.chain import Batch
from counterpoint.decomposer.example import Loss
from counterpoint.planner.forecast_text import describe
from counterpoint.planner.search import Freedom
from counterpoint.profiler.measure import measured_sizes, profile_of
from counterpoint.runtime.checkpoint import Facts, read_checkpoint, read_facts, write_checkpoint
from counterpoint.runtime.compute import Compute, Step
from counterpoint.runtime.disk import Disk
from counterpoint.runtime.executor import Executor
from counterpoint.runtime.frame import frame_of
from counterpoint.runtime.home import unused_sizes
from counterpoint.runtime.memory import Pool
from counterpoint.runtime.memory_process import (
    memory_limit_bytes,
    peak_resident_bytes,
    resident_bytes,
    set_allocator_thresholds,
    trim,
)
from counterpoint.runtime.optimizer import UpdateRule
from counterpoint.runtime.rescue import bring_home, discard
from counterpoint.runtime.store import STAGING_BYTES, Store, home_sizes
from counterpoint.trainer.chosen_plan import ChosenPlan
from counterpoint.trainer.decision import decide
from counterpoint.trainer.evaluation import Evaluator
from counterpoint.trainer.export import export_model
from counterpoint.trainer.initial_weights import blank_buffers, fill
from counterpoint.trainer.parts import (
    Model,
    batch_size,
    chain_of,
    microbatches,
    module_of,
    names_of,
    states_of,
    tokens_per_sample,
)
from counterpoint.trainer.statistics import Statistics, waited

PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}
SCHEDULES = ("harmony", "plain")
RECORDED_STEPS = 16


class Trainer:
    """Trains `model` with `optimizer` in at most `memory` bytes; weights end up as plain PyTorch would leave them.

    `example` is a minibatch: its first dimension is the number of samples of every step. The budget covers the whole
    process. What does not fit lives in the folder `disk`. A model on the meta device gets its own initial weights, or
    those in the folder `weights`, or those of the checkpoint `resume`, which also brings the state of the training.
    Everything else may be left to the planner or given by hand.
    """

    def __init__(
        self,
        model: Model,
        optimizer: Optimizer,
        *,
        example: Batch,
        memory: str | int | None = None,
        disk: str | Path | None = None,
        loss: Loss | None = None,
        max_grad_norm: float | None = None,
        microbatch: int | None = None,
        precision: str = "fp32",
        seed: int = 0,
        schedule: str = "harmony",
        activations: str | None = None,
        pack: int | None = None,
        residency: str = "planned",
        plan: Plan | None = None,
        weights: str | Path | None = None,
        resume: str | Path | None = None,
    ) -> None:
        _refuse_unknown("precision", precision, tuple(PRECISIONS))
        _refuse_unknown("schedule", schedule, SCHEDULES)
        _refuse_unknown("activations", activations, (None, *POLICIES))
        set_allocator_thresholds()
        self.model, self.optimizer, self.max_grad_norm = module_of(model), optimizer, max_grad_norm
        self.memory_bytes = parse_bytes(memory) if memory is not None else memory_limit_bytes() * 8 // 10
        self.chain = chain_of(model, example, loss)
        self.frame = frame_of(self.chain)
        self.rule = UpdateRule(optimizer, names_of(self.model, self.chain))
        self.states = states_of(self.frame, self.rule)
        self.step_count = 0
        self.data_position = 0
        self.extra: dict[str, Any] = {}
        self.minibatch_size = batch_size(self.chain, example)
        if resume is not None and microbatch is None and plan is None:
            microbatch = _kept_microbatch(read_facts(Path(resume)), self.minibatch_size)
        freedom = Freedom(
            self.minibatch_size,
            [microbatch] if microbatch else _divisors(self.minibatch_size),
            (schedule,),
            (pack,) if pack else (1, 2, 4),
            (activations,) if activations else ("evict", "recompute"),
            max_grad_norm is not None,
            residency,
        )
        _refuse_bad_sizes(self.minibatch_size, microbatch, plan)
        self._running, self._bodies = False, 0
        self._failure: BaseException | None = None
        self._begin_ns, self._moved = 0, (0, 0)
        with contextlib.ExitStack() as stack:
            self._prepare(stack, freedom, plan, example, PRECISIONS[precision], seed, disk)
            if resume is not None:
                self.load(resume)
            else:
                self.compute.buffers.update(fill(self.store, self.model, Path(weights) if weights else None, seed))
            self._stack = stack.pop_all()

    def _prepare(
        self,
        stack: contextlib.ExitStack,
        freedom: Freedom,
        plan: Plan | None,
        example: Batch,
        autocast: torch.dtype | None,
        seed: int,
        disk: str | Path | None,
    ) -> None:
        """Take the disk, measure, decide, and build what runs."""
        self.folder = Path(disk or stack.enter_context(tempfile.TemporaryDirectory(prefix="counterpoint-")))
        sizes = {**home_sizes(self.frame, self.states), **unused_sizes(self.chain)}
        self.disk = stack.enter_context(Disk(self.folder, sizes))
        micro_sizes = [plan.microbatch_size] if plan else freedom.microbatch_sizes
        tokens = tokens_per_sample(self.chain, example)
        name = type(self.model).__name__
        limit = max(0, self.memory_bytes - resident_bytes()) // 2
        self.profile = profile_of(self.frame, self.states, self.rule, micro_sizes, name, tokens, autocast, limit)
        freedom = replace(freedom, microbatch_sizes=measured_sizes(self.profile))
        trim()
        self.base_bytes = resident_bytes() + 2 * STAGING_BYTES
        chosen = decide(self.profile, self.memory_bytes, self.base_bytes, self.folder, freedom, plan)
        self.machine, self.program, self.forecast = chosen.machine, chosen.program, chosen.forecast
        self.plan = ChosenPlan.of(chosen.plan, describe(chosen.forecast))
        budget, m = chosen.budget_bytes, self.plan.num_microbatches
        self.store = Store(self.frame, self.states, self.disk, Pool(budget + budget // 50), m)
        buffers = blank_buffers(self.chain)
        self.compute = Compute(self.frame, self.store, self.rule, buffers, m, seed, autocast, self.max_grad_norm)
        costs = Costs(self.profile, self.plan)
        self.executor = Executor(self.store, self.compute, costs, budget)
        stack.callback(self.executor.close)
        self._evaluator = Evaluator(self.executor, self.compute, costs, self.plan, budget)

    # ---- training

    def step(self, batch: Batch) -> float:
        """One minibatch through to its update; the mean loss of its microbatches.

        A loss that is not finite raises LossError and leaves everything as it was before the step.
        """
        self._refuse_failed()
        if (found := batch_size(self.chain, batch)) != self.minibatch_size:
            raise ModelError(
                f"the batch has {found} samples, the example had {self.minibatch_size}; every step takes as many"
            )
        step = Step(self.step_count, microbatches(self.chain, batch, self.plan.microbatch_size))
        before = dict(self.compute.buffers)
        counters = self.store.counters
        self._begin_ns = time.monotonic_ns() - self.executor.origin_ns
        moved = (counters.loaded_bytes, counters.evicted_bytes)
        with self._guarded(before):
            self._run_step(step)
        self._moved = (counters.loaded_bytes - moved[0], counters.evicted_bytes - moved[1])
        self.step_count += 1
        self.executor.forget_spans(self.step_count - RECORDED_STEPS)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        return float(torch.stack(list(step.losses.values())).mean())

    def _run_step(self, step: Step) -> None:
        if not self._running:
            self._running, self._bodies = True, 0
            self.executor.restart()
            self.executor.run(self.program.devices[0].prologue, self.step_count)
        number = self._bodies
        self.compute.steps[number] = step
        self.executor.run(self._shifted(self.program.devices[0].body, number), self.step_count)
        self._bodies += 1
        self.compute.steps.pop(number - 1, None)

    def _shifted(self, tasks: Iterable[Task], steps: int) -> Iterator[Task]:
        return (shift(task, steps, self.program.num_microbatches) for task in tasks)

    def settle(self) -> None:
        """Bring everything home, so that what is there is the whole state of the training."""
        self._refuse_failed()
        if self._running:
            with self._guarded(self.compute.buffers):
                self.executor.run(self._shifted(self.program.devices[0].epilogue, self._bodies), self.step_count)
                self.executor.drain()
                discard(self.store, self.compute)
            self._running = False

    def evaluate(self, batch: Batch) -> float:
        """The mean loss of a batch of whole microbatches as in eval mode: nothing of the training is changed."""
        self._refuse_failed()
        size = self.plan.microbatch_size
        if (found := batch_size(self.chain, batch)) % size:
            raise ModelError(f"the batch has {found} samples, which are not whole microbatches of {size}")
        batches = microbatches(self.chain, batch, size)
        self.settle()
        with self._guarded(self.compute.buffers):
            return self._evaluator.loss(batches)

    @contextlib.contextmanager
    def _guarded(self, buffers: Mapping[str, Tensor]) -> Iterator[None]:
        """The user's random numbers are left alone; a bad loss is undone; any other error ends the run."""
        generator = torch.get_rng_state()
        try:
            yield
        except LossError:
            self.executor.abandon()
            bring_home(self.store, self.compute)
            self.compute.buffers.update(buffers)
            self._running = False
            raise
        except BaseException as error:
            self._failure = error
            raise
        finally:
            torch.set_rng_state(generator)

    def _refuse_failed(self) -> None:
        if self._failure is not None:
            raise ExecutionError(
                f"this run failed in step {self.step_count} and its weights are not whole any more; load a "
                f"checkpoint, or make a new trainer with resume (the failure: {self._failure})"
            )

    # ---- checkpoints

    def save(self, folder: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint, whole or not at all; `extra`, such as a scheduler's state_dict, comes back by `load`."""
        self.settle()
        facts = Facts(
            step=self.step_count,
            data_position=self.data_position,
            seed=self.compute.seed,
            microbatch_size=self.plan.microbatch_size,
            minibatch_size=self.minibatch_size,
            optimizer=type(self.optimizer).__name__,
            groups=[{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups],
            scalars=self.rule.scalars,
            generator=torch.get_rng_state(),
            extra=dict(extra or {}),
        )
        write_checkpoint(Path(folder), self.store, self.compute.buffers, facts)

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Go on from a checkpoint, also after a failure and under any plan; returns the `extra` it was saved with.

        The steps that follow are bit for bit those that would have followed it, if microbatches have the same size.
        """
        facts = read_facts(Path(folder))
        _refuse_other_optimizer(facts, self.optimizer)
        if self._failure is not None:
            self.executor.abandon()
        else:
            self.settle()
        discard(self.store, self.compute)
        self._running = False
        self._failure = ExecutionError(f"loading {folder} was not finished")
        read_checkpoint(Path(folder), self.store, self.compute.buffers)
        self.step_count, self.data_position, self.extra = facts.step, facts.data_position, facts.extra
        self.compute.seed, self.rule.scalars = facts.seed, facts.scalars
        for group, saved in zip(self.optimizer.param_groups, facts.groups, strict=True):
            group.update(saved)
        torch.set_rng_state(facts.generator)
        self._failure = None
        return self.extra

    def export(self, folder: str | Path, max_shard: str | int = "5GB") -> None:
        """Write the model as safetensors in Hugging Face layout, in files of at most `max_shard`."""
        self.settle()
        export_model(Path(folder), self.model, self.store, self.compute.buffers, parse_bytes(max_shard))

    # ---- what it did

    def statistics(self) -> Statistics:
        """Memory, bytes moved, and what the last step waited for."""
        counters, last = self.store.counters, self.step_count - 1
        return Statistics(
            resident_bytes(),
            peak_resident_bytes(),
            counters.loaded_bytes,
            counters.evicted_bytes,
            *self._moved,
            waited(self.executor.spans, last, self._begin_ns),
        )

    def timeline(self, steps: int = RECORDED_STEPS) -> Timeline:
        """When each task of the last steps ran, measured."""
        first = self.step_count - steps
        spans = [span for span in tuple(self.executor.spans) if span.step >= first]
        spans.sort(key=lambda span: (span.start_ns, span.device, span.lane))
        ends: dict[int, int] = {}
        for span in spans:
            if span.lane == "compute":
                ends[span.step] = max(ends.get(span.step, 0), span.end_ns)
        memory = tuple(self.executor.memory)
        moved = (("disk read", self.store.counters.loaded_bytes), ("disk write", self.store.counters.evicted_bytes))
        return Timeline(1, tuple(spans), tuple(ends[s] for s in sorted(ends)), memory, moved, ())

    def describe(self) -> str:
        """The forecast as text."""
        return self.plan.text

    def close(self) -> None:
        """End the threads and remove what lies in the disk folder; what was not saved or exported is gone."""
        self._stack.close()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _refuse_unknown(option: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise ValueError(f"unknown {option} {value!r}; known are {', '.join(str(k) for k in known if k is not None)}")


def _refuse_bad_sizes(minibatch_size: int, microbatch: int | None, plan: Plan | None) -> None:
    if microbatch is not None and (microbatch < 1 or minibatch_size % microbatch):
        raise ValueError(f"microbatches of {microbatch} do not divide a minibatch of {minibatch_size} samples")
    if plan is not None and plan.minibatch_size != minibatch_size:
        raise ValueError(f"the plan is for minibatches of {plan.minibatch_size}, the example has {minibatch_size}")


def _refuse_other_optimizer(facts: Facts, optimizer: Optimizer) -> None:
    name, count = type(optimizer).__name__, len(optimizer.param_groups)
    if (facts.optimizer, len(facts.groups)) != (name, count):
        raise ExecutionError(
            f"the checkpoint is of {facts.optimizer} with {len(facts.groups)} parameter groups, "
            f"this run has {name} with {count}; build the same optimizer"
        )


def _kept_microbatch(facts: Facts, minibatch_size: int) -> int | None:
    """The checkpoint's microbatch size, for the run to go on bit for bit; None if the minibatch has changed."""
    return facts.microbatch_size if minibatch_size % facts.microbatch_size == 0 else None


def _divisors(size: int) -> list[int]:
    return [d for d in (1, 2, 4, 8, 16, 32) if size % d == 0]
