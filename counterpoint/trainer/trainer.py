"""The public Trainer: a model, its optimizer and an example batch into training steps within a memory budget."""

import contextlib
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.optim import Optimizer

from counterpoint.core.costs import Costs
from counterpoint.core.errors import ExecutionError, ModelError
from counterpoint.core.plan import Plan
from counterpoint.core.timeline import Timeline
from counterpoint.core.units import parse_bytes
from counterpoint.decomposer.chain import Batch
from counterpoint.decomposer.example import Loss
from counterpoint.runtime.checkpoint import Facts, read_checkpoint, read_facts, write_checkpoint
from counterpoint.runtime.compute import Step
from counterpoint.runtime.memory_process import keep_freed_memory
from counterpoint.runtime.share import Share
from counterpoint.runtime.updates import bad_loss
from counterpoint.simulator import simulate
from counterpoint.trainer.agreement import agree_on_weights
from counterpoint.trainer.engine import Engine
from counterpoint.trainer.export import export_model
from counterpoint.trainer.initial_weights import announce, fill
from counterpoint.trainer.parts import Model, Parts, batch_size, microbatches, parts_of
from counterpoint.trainer.resumption import kept_microbatch, refuse_other_optimizer
from counterpoint.trainer.statistics import Statistics, measured_timeline, waited, with_process
from counterpoint.trainer.together import join, telling
from counterpoint.trainer.wishes import PRECISIONS, Wishes, read_wishes

RECORDED_STEPS = 16


class Trainer:
    """Trains `model` with `optimizer` in at most `memory` bytes; weights end up as plain PyTorch would leave them.

    `example` is a minibatch: its first dimension is the number of samples of every step. The budget covers the whole
    process; on an accelerator, which `device` names and the machine's own is taken for, all that torch allocates there.
    What does not fit lives in the folder `disk`, beside an accelerator in `host_memory` first. A model on the meta
    device gets its own initial weights, or those in the folder `weights`, or those of the checkpoint `resume`, which
    also brings the state of the training. Everything else may be left to the planner or given by hand.

    Started by torchrun, or with a process group of one's own, each process is one device with `memory` to itself. All
    of them make the same calls with the same batches, and every call tells all of them the same. `replicas` are copies
    of the model, each with its share of the batch; `network` is the speed between servers, in bytes per second. Under
    2bw a step is finished while the next one runs: `step` then returns the loss of the step before, and `settle`
    finishes the last. Its first `flush_steps` are run as flush does.

    `plan` prints as its forecast. `step_count` counts finished steps; `data_position` is the caller's to set, and is
    saved and loaded with the rest.
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
        replicas: int | None = None,
        flush_steps: int = 0,
        devices: int | None = None,
        network: str | int | None = None,
        weights: str | Path | None = None,
        resume: str | Path | None = None,
        device: str | torch.device | None = None,
        host_memory: str | int | None = None,
    ) -> None:
        keep_freed_memory()
        self.optimizer = optimizer
        self._share: Share | None = None
        with contextlib.ExitStack() as stack:
            self.peers = join(stack, devices)
            with telling(self.peers.fail if self.peers else None):
                facts = None if resume is None else read_facts(Path(resume))
                parts = parts_of(model, optimizer, example, loss, PRECISIONS.get(precision), device)
                self.minibatch_size = batch_size(parts.chain, example)
                if facts is not None and microbatch is None and plan is None:
                    microbatch = kept_microbatch(facts, self.minibatch_size)
                wishes = read_wishes(
                    minibatch_size=self.minibatch_size, memory=memory, disk=disk, max_grad_norm=max_grad_norm,
                    microbatch=microbatch, precision=precision, seed=seed, schedule=schedule, activations=activations,
                    pack=pack, residency=residency, plan=plan, replicas=replicas, flush_steps=flush_steps,
                    network=network, host_memory=host_memory, backend=parts.backend,
                    num_devices=self.peers.count if self.peers else 1,
                    num_servers=len(set(self.peers.servers)) if self.peers else 1,
                )  # fmt: skip
                self._begin(stack, parts, wishes, example)
                if resume is not None:
                    self.load(resume)
                else:
                    self._fill(Path(weights) if weights else None, seed)
            self._stack = stack.pop_all()

    def _begin(self, stack: contextlib.ExitStack, parts: Parts, wishes: Wishes, example: Batch) -> None:
        self.memory_bytes = wishes.memory_bytes
        self.step_count = self.data_position = 0
        self.extra: dict[str, Any] = {}
        self.loss = math.nan
        self._begin_ns, self._moved = 0, (0, 0)
        self._engine = engine = Engine(stack, parts, wishes, example, self.peers)
        self.model, self.chain, self.frame, self.rule = parts.module, parts.chain, parts.frame, parts.rule
        self.plan, self.program, self.forecast = engine.plan, engine.program, engine.forecast
        self.profile, self.machine, self.base_bytes = engine.profile, engine.machine, engine.base_bytes
        self.peak_bytes = engine.memory.peak_bytes
        self.folder, self.disk, self.store = engine.folder, engine.disk, engine.store
        self.compute, self.executor, self.device = engine.compute, engine.executor, engine.device
        if self.peers is not None:
            self._share = Share(self.peers, engine.duties, parts.chain)

    def _fill(self, weights: Path | None, seed: int) -> None:
        if self.peers is not None and weights is None:
            agree_on_weights(self.peers, self.model)
        self.compute.buffers.update(fill(self.store, self.model, weights, seed, self._engine.fills))
        if self.peers is not None:
            self.peers.barrier("the weights are home")

    # ---- training

    def step(self, batch: Batch) -> float:
        """One minibatch through to its update; the mean loss of its microbatches.

        A loss that is not finite raises LossError, on every device, and leaves everything as it was before the step.
        Under 2bw the loss is that of the step before, not a number the first time. If that is not finite, its update
        changes nothing, the new batch is under way nevertheless, and the next may be given.
        """
        self._enter(f"step {self.step_count}")
        if (found := batch_size(self.chain, batch)) != self.minibatch_size:
            raise ModelError(
                f"the batch has {found} samples, the example had {self.minibatch_size}; every step takes as many"
            )
        step = Step(self.step_count, microbatches(self.chain, batch, self.plan.microbatch_size, self.compute.backend))
        counters = self.store.counters
        self._begin_ns = time.monotonic_ns() - self.executor.record.origin_ns
        loaded, evicted = counters.loaded_bytes, counters.evicted_bytes
        step.groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        finished = self._engine.run(step)
        if self._engine.looks_ahead:
            self.step_count += 1
        self._take_loss(finished)
        self._moved = (counters.loaded_bytes - loaded, counters.evicted_bytes - evicted)
        self.step_count = step.number + 1
        self.executor.record.forget_before(self.step_count - RECORDED_STEPS)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler looks for
        return self.loss

    def _take_loss(self, step: Step | None) -> None:
        if step is not None:
            if (error := bad_loss(step)) is not None:
                raise error
            self.loss = float(torch.stack([step.losses[number].cpu() for number in sorted(step.losses)]).mean())

    def evaluate(self, batch: Batch) -> float:
        """The mean loss of a batch of any size as in eval mode: nothing of the training is changed."""
        self._enter("evaluate")
        size, count = self.plan.microbatch_size, batch_size(self.chain, batch)
        if not count:
            raise ModelError("the batch is empty: give at least one sample")
        sizes = [min(size, count - start) for start in range(0, count, size)]
        self._settle()
        return self._engine.evaluate(microbatches(self.chain, batch, size, self.compute.backend), sizes)

    def settle(self) -> float:
        """Finish all steps and bring everything home: the state of the training is there. The newest step's loss."""
        self._enter("settle")
        self._settle()
        return self.loss

    def _settle(self) -> None:
        self._take_loss(self._engine.settle(self.step_count))

    def _enter(self, call: str) -> None:
        if self.peers is not None:
            self.peers.enter(call)

    def agreed(self, wish: bool) -> bool:
        """Whether to stop, for loops on several devices: some steps after one of them wishes it, all hear the same.

        A single device gets its wish at once.
        """
        return wish if self.peers is None else self.peers.agreed(wish, self.step_count)

    # ---- checkpoints

    def save(self, folder: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint, whole or not at all; `extra`, such as a scheduler's state_dict, comes back by `load`."""
        self._enter("save")
        self._settle()
        facts = Facts(
            step=self.step_count,
            data_position=self.data_position,
            seed=self.compute.seed,
            microbatch_size=self.plan.microbatch_size,
            minibatch_size=self.minibatch_size,
            optimizer=self.rule.name,
            groups=[{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups],
            scalars=self.rule.scalars,
            generator=torch.get_rng_state(),
            extra=dict(extra or {}),
        )
        with self._engine.telling():
            write_checkpoint(Path(folder), self.store, self.compute.buffers, facts, self._share)

    def load(self, folder: str | Path) -> dict[str, Any]:
        """Go on from a checkpoint, also after a failure and under any plan; returns the `extra` it was saved with.

        The steps that follow are bit for bit those that would have followed it, if microbatches have the same size.
        """
        self._enter("load")
        facts = read_facts(Path(folder))
        refuse_other_optimizer(facts, self.rule)
        with self._engine.replaced(self.step_count, f"loading {folder}"):
            self._engine.begin_at(facts.step)
            read_checkpoint(Path(folder), self.store, self.compute.buffers, self._engine.fills)
            announce(self.store, self._engine.fills)
            if self.peers is not None:
                self.peers.barrier("the checkpoint is home")
        self.step_count, self.data_position, self.extra = facts.step, facts.data_position, facts.extra
        self.compute.seed, self.rule.scalars = facts.seed, facts.scalars
        for group, saved in zip(self.optimizer.param_groups, facts.groups, strict=True):
            group.update(saved)
        torch.set_rng_state(facts.generator)
        return self.extra

    def export(self, folder: str | Path, max_shard: str | int = "5GB") -> None:
        """Write the model as safetensors in Hugging Face layout, in files of at most `max_shard`."""
        self._enter("export")
        self._settle()
        max_bytes = parse_bytes(max_shard)
        with self._engine.telling():
            export_model(Path(folder), self.model, self.store, self.compute.buffers, max_bytes, self._share)

    # ---- what it did

    def statistics(self) -> Statistics:
        """Memory of the process, bytes moved, and what the last step waited for."""
        counters = self.store.counters
        return Statistics(
            self.compute.backend.used_bytes(),
            self.compute.backend.peak_bytes(),
            counters.loaded_bytes,
            counters.evicted_bytes,
            *self._moved,
            waited(self.executor.record.spans, self.step_count - 1 - self._engine.looks_ahead, self._begin_ns),
        )

    def timeline(self, steps: int = RECORDED_STEPS) -> Timeline:
        """When each task of the last steps ran, measured."""
        return measured_timeline(self.executor, self.step_count - steps)

    def simulated_timeline(self) -> Timeline:
        """When each task of the first steps would run by the forecast: the same program as is executed."""
        found = simulate(self.program, Costs(self._engine.chosen.profile, self.plan), self.machine, steps=3)
        return with_process(found, self.base_bytes)

    def describe(self) -> str:
        """The forecast as text."""
        return self.plan.text

    def close(self) -> None:
        """End the threads and remove what lies in the disk folder; what was not saved or exported is gone."""
        self._enter("close")
        self._stack.close()
        if self.peers is not None and self.peers.disagreement is not None and self._engine.failure is None:
            raise ExecutionError(self.peers.disagreement)  # the others still train

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        if self.peers is not None:
            self.peers.fail(error)
        self._stack.close()
