"""Parts and wishes -> what runs the steps: disk, store, computations and executor under the program of a plan."""

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from counterpoint.core.costs import Costs
from counterpoint.core.duties import duties_of
from counterpoint.core.errors import ExecutionError
from counterpoint.core.homes import UPDATE_STAGING_BYTES
from counterpoint.core.profile import Profile
from counterpoint.core.program import DeviceProgram, Program
from counterpoint.core.task import Task, shift
from counterpoint.decomposer.chain import Batch
from counterpoint.planner.forecast_text import describe
from counterpoint.planner.freed_memory import settled_bytes
from counterpoint.profiler.measure import measured_sizes
from counterpoint.runtime.buffer_exchange import BufferExchange
from counterpoint.runtime.compute import Compute, Step
from counterpoint.runtime.discard import discard
from counterpoint.runtime.executor import Executor
from counterpoint.runtime.headroom import Headroom
from counterpoint.runtime.home import home_sizes, unused_sizes
from counterpoint.runtime.home_update import HomeUpdate
from counterpoint.runtime.losses import LossExchange
from counterpoint.runtime.memory import Pool
from counterpoint.runtime.peers import Peers
from counterpoint.runtime.store import STAGING_BYTES, Store
from counterpoint.runtime.transport import SLICE_BYTES, Transport
from counterpoint.runtime.updates import bad_loss
from counterpoint.runtime.wires import wires_of
from counterpoint.trainer.agreement import agree, decide_together, share_buffers, shared
from counterpoint.trainer.chosen_plan import ChosenPlan
from counterpoint.trainer.decision import decide_alone, usable_bytes
from counterpoint.trainer.evaluation import Evaluator
from counterpoint.trainer.initial_weights import blank_buffers, repeat
from counterpoint.trainer.measured import measured
from counterpoint.trainer.parts import Parts, batch_bytes
from counterpoint.trainer.process_memory import ProcessMemory, let_be
from counterpoint.trainer.shared_home import SharedHome, common_folder, open_home
from counterpoint.trainer.this_machine import Surroundings
from counterpoint.trainer.tiered_home import host_folder, open_tiers
from counterpoint.trainer.together import telling
from counterpoint.trainer.wishes import Wishes

POOL_SLACK_PERCENT = 2  # whole pages, and remapped regions that tensors still view
_STEPS_KEPT = 3  # an update at home may still run when the next step has: it needs its own step's groups and losses


def pool_bytes(budget_bytes: int) -> int:
    """What a program that keeps to a budget may find in its pool."""
    return budget_bytes + budget_bytes * POOL_SLACK_PERCENT // 100


class Engine:
    """One training under way. What it owns is given to `stack`, which its owner closes.

    With `peers` it is one device of several; all of them make the same calls. A program that looks ahead (2BW) runs a
    step when the batch after it is there, or when it is settled. Where the first steps have a program of their own,
    everything is settled before the other one begins.
    """

    def __init__(
        self, stack: contextlib.ExitStack, parts: Parts, wishes: Wishes, example: Batch, peers: Peers | None = None
    ) -> None:
        self.peers, self.device = peers, peers.device if peers else 0
        self.failure: BaseException | None = None
        self._closed, self._running, self._bodies, self._given = False, False, 0, 0
        stack.enter_context(parts.backend.held_to(wishes.memory_bytes))
        if peers is None:
            self.folder = wishes.disk or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="counterpoint-")))
            sizes = {**home_sizes(parts.frame, parts.states), **unused_sizes(parts.chain)}
            in_memory = host_folder(stack, wishes.host_bytes)
            self.disk = open_tiers(stack, self.folder, sizes, parts.backend, in_memory, wishes.host_bytes)
            self._plan(parts, wishes, example)
            self.duties = duties_of(self.program)
            self._build(parts, wishes, None)
        else:
            agree(peers, parts, wishes)
            self.folder = common_folder(stack, peers, wishes.disk)
            self._plan(parts, wishes, example)
            self.duties = duties_of(self.program)
            home = open_home(stack, peers, self.folder, parts, self.duties, wishes.host_bytes)
            self.disk = home.disk
            self._build(parts, wishes, home)
        self.begin_at(0)
        stack.callback(self._close)

    def _plan(self, parts: Parts, wishes: Wishes, example: Batch) -> None:
        """Measure the layers and decide; of several devices the first does it for all."""
        if self.peers is None or self.device == 0:
            self.profile = measured(parts, wishes, example)
        if self.peers is not None:
            self.profile = shared(self.peers, Profile, "the profile", getattr(self, "profile", None))
        updated_at_home = tuple(range(parts.frame.num_layers)) if parts.rule.elementwise else ()
        freedom = replace(wishes.freedom, microbatch_sizes=measured_sizes(self.profile), host_layers=updated_at_home)
        backend, around = parts.backend, Surroundings(self.folder, parts.backend, wishes.host_bytes)
        self.base_bytes = backend.base_bytes() + _STEPS_KEPT * batch_bytes(parts.chain, example, backend)
        self.base_bytes += 2 * STAGING_BYTES if backend.is_process else 0
        own_bytes = sum(p.nbytes for p in parts.module.parameters() if not p.is_meta)
        if self.peers is None:
            chosen = decide_alone(
                self.profile, wishes.memory_bytes, self.base_bytes, own_bytes, around, freedom, wishes.plan
            )
        else:
            reduce_bytes = SLICE_BYTES * max(1, self.peers.count - 1)
            self.base_bytes += reduce_bytes
            budget = usable_bytes(wishes.memory_bytes, self.base_bytes)
            chosen = decide_together(self.peers, self.profile, budget, around, freedom, wishes)
        self.machine, self.program, self.forecast = chosen.machine, chosen.program, chosen.forecast
        self.chosen, self._current = chosen, chosen.program
        self.base_bytes += UPDATE_STAGING_BYTES if chosen.plan.host_layers and backend.is_process else 0
        settled = settled_bytes(chosen.profile, chosen.plan, chosen.program, self.device, chosen.freed)
        stays = chosen.freed == "stay"
        self.memory = ProcessMemory.of(wishes.memory_bytes, self.base_bytes + settled, stays, backend.memory_name)
        self.plan = ChosenPlan.of(chosen.plan, f"{describe(chosen.forecast)}\n{self.memory}")

    def _build(self, parts: Parts, wishes: Wishes, home: SharedHome | None) -> None:
        budget, m = self.machine.devices[self.device].capacity_bytes, self.program.num_microbatches
        backend = parts.backend
        pool = backend.pool(pool_bytes(budget))
        names, passing, versions = (home.names, home.passing, home.versions) if home else (None, None, None)
        self.fills = home.fills if home else None
        self.store = Store(parts.frame, parts.states, self.disk, pool, m, names, passing, versions, backend)
        buffers = blank_buffers(parts.chain, backend.device)
        self.compute = Compute(
            parts.frame, self.store, parts.rule, buffers, m, wishes.seed, wishes.autocast, wishes.max_grad_norm
        )
        self.compute.makings = self.profile.makings(self.plan.microbatch_size)
        if self.plan.host_layers:
            self.compute.updates.home = HomeUpdate(self.store, parts.rule)
        costs = Costs(self.chosen.profile, self.plan)
        workspace_bytes = Costs(self.profile, self.plan).workspace_bytes
        memory = self.memory
        limits = (memory.limit_bytes, workspace_bytes, memory.target_bytes, memory.trusted_bytes)
        headroom = Headroom(pool, self.base_bytes, *limits) if isinstance(pool, Pool) else None
        let_be(self.chosen.freed)
        self.transport: Transport | None = None
        self.losses: LossExchange | None = None
        self.shared_buffers: BufferExchange | None = None
        if self.peers is None:
            self.executor = Executor(self.store, self.compute, costs, headroom)
        else:
            wires = wires_of(backend, self.device, self.duties.senders, self.duties.reducers)
            self.transport = Transport(self.device, self.peers.count, backend, wires)
            lanes, explain = self.duties.lanes[self.device], self.peers.explained
            self.executor = Executor(
                self.store, self.compute, costs, headroom, self.device, lanes, self.transport, explain
            )
            self.peers.on_failure = self.executor.lose
            devices = (self.executor, self.transport, self.compute, self.duties)
            self.losses, self.shared_buffers = LossExchange(*devices), BufferExchange(*devices)
        self.executor.outside.stows = self.chosen.freed == "wait"
        self._evaluator = Evaluator(self.executor, self.compute, costs, self.plan, self.program.budgets, self.peers)

    @property
    def part(self) -> DeviceProgram:
        return self._current.devices[self.device]

    @property
    def looks_ahead(self) -> int:
        """Steps whose batch is here while they are not finished."""
        return self._current.epilogue_steps

    def run(self, step: Step) -> Step | None:
        """Take a step's batch in and run what can run: the newest step that is finished, if one is.

        Transfers of the next step may be under way. A bad loss leaves no trace.
        """
        if self._current is not self._program_of(step.number):
            self.settle(step.number)
            self._current = self._program_of(step.number)
        self.refuse_failed()
        finished: Step | None = None
        buffers = dict(self.compute.buffers)
        with self._guarded():
            if not self._running:
                self._running, self._bodies, self._given = True, 0, 0
                self.executor.restart()
                self.compute.steps[0] = step
                self.executor.run(self.part.prologue, step.number)
            self.compute.steps[self._given] = step
            self._given += 1
            if self._bodies < self._given - self.looks_ahead:
                finished = self._finish_step(self.part.body)
                self._forget_bad(finished, buffers)
                if self.shared_buffers is not None and not self.looks_ahead:
                    self.shared_buffers.take_first()
        return finished

    def _forget_bad(self, step: Step, buffers: Mapping[str, Tensor]) -> None:
        """Undo what a bad loss has left beside weights; not statistics that later microbatches have seen."""
        error = bad_loss(step)
        if error is None:
            return
        if not self.looks_ahead:
            self.executor.drain()
            self.executor.record.forget_step(step.number)
            self.compute.buffers.update(buffers)
        elif any(layer.mutates for layer in self.compute.chain.layers):
            raise error

    def _finish_step(self, tasks: Iterable[Task]) -> Step:
        number = self._bodies
        step = self.compute.steps[number]
        self.executor.run(self._shifted(tasks, number), step.number)
        self._bodies += 1
        self.compute.steps.pop(number - _STEPS_KEPT, None)
        if self.losses is not None:
            self.losses.hear(number)
        return step

    def settle(self, step: int) -> Step | None:
        """Finish what is under way and bring everything home: the whole state of the training is there then."""
        self.refuse_failed()
        finished: Step | None = None
        if self._running:
            with self._guarded():
                if self._bodies < self._given:
                    finished = self._finish_step(self.part.epilogue)
                    self._forget_bad(finished, {})
                else:
                    self.executor.run(self._shifted(self.part.epilogue, self._bodies), step)
                self.executor.drain()
                discard(self.store, self.compute)
                self.updates += self._bodies
                self.store.names.base = self.updates
                if self.peers is not None:
                    share_buffers(self.peers, self.duties, self.compute)
                    if self._current is self.chosen.flush:  # which leaves one version; 2bw begins with two alike
                        repeat(self.store, self.fills)
                        self.peers.barrier("both versions are home")
            self._running = False
        return finished

    def evaluate(self, batches: Sequence[Mapping[int, Tensor]], sizes: Sequence[int]) -> float:
        """The mean loss of microbatches of these sizes, as in eval mode."""
        with self._guarded():
            if self.peers is not None:
                self.peers.barrier("evaluate")
            return self._evaluator.loss(batches, sizes)

    @contextlib.contextmanager
    def replaced(self, step: int, what: str) -> Iterator[None]:
        """Everything at home is about to be replaced: also a failed run is whole again afterwards."""
        if self.failure is None or self._closed or self.peers is not None:
            self.settle(step)
        else:
            self.executor.abandon()
        discard(self.store, self.compute)
        self._running = False
        self.failure = ExecutionError(f"{what} was not finished")
        with self.telling():
            yield
        self.failure = None

    def refuse_failed(self) -> None:
        if self._closed:
            raise ExecutionError("this trainer is closed; make a new one, with resume to go on from a checkpoint")
        if self.failure is not None:
            raise ExecutionError(
                "this run failed before and its weights are not whole any more; load a checkpoint, or make a new "
                f"trainer with resume (the failure: {self.failure})"
            )

    def begin_at(self, updates: int) -> None:
        """What is home from here on has seen so many updates."""
        self.updates = self.store.names.base = updates
        self._current = self._program_of(updates)

    def _program_of(self, step: int) -> Program:
        return (self.chosen.flush if step < self.plan.flush_steps else None) or self.program

    def telling(self) -> contextlib.AbstractContextManager[None]:
        """Something that all devices do together: who fails tells the others; a single device may try again."""
        return telling(self.fail if self.peers else None)

    def fail(self, error: BaseException) -> None:
        """This device cannot go on, and so cannot the others."""
        self.failure = error
        if self.peers is not None:
            self.peers.fail(error)

    def _close(self) -> None:
        self._closed = True
        self.executor.close()

    def _shifted(self, tasks: Iterable[Task], steps: int) -> Iterator[Task]:
        return (shift(task, steps, self.program.num_microbatches) for task in tasks)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """The user's random numbers are left alone; any error ends the run."""
        generator = torch.get_rng_state()
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            torch.set_rng_state(generator)
