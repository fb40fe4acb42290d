"""Parts and wishes -> what runs the steps: disk, store, computations and executor under the program of a plan."""

import contextlib
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from counterpoint.core.costs import Costs
from counterpoint.core.errors import ExecutionError, LossError
from counterpoint.core.task import Task, shift
from counterpoint.core.units import format_bytes
from counterpoint.decomposer.chain import Batch
from counterpoint.planner.forecast_text import describe
from counterpoint.profiler.measure import measured_sizes, profile_of
from counterpoint.runtime.compute import Compute, Step
from counterpoint.runtime.disk import Disk
from counterpoint.runtime.executor import Executor
from counterpoint.runtime.home import unused_sizes
from counterpoint.runtime.home_update import STAGING_BYTES as HOME_STAGING_BYTES
from counterpoint.runtime.home_update import HomeUpdate
from counterpoint.runtime.memory import Pool
from counterpoint.runtime.memory_process import Headroom, resident_bytes, trim
from counterpoint.runtime.rescue import bring_home, discard
from counterpoint.runtime.store import STAGING_BYTES, Store, home_sizes
from counterpoint.trainer.chosen_plan import ChosenPlan
from counterpoint.trainer.decision import decide
from counterpoint.trainer.evaluation import Evaluator
from counterpoint.trainer.initial_weights import blank_buffers
from counterpoint.trainer.parts import Parts, tokens_per_sample
from counterpoint.trainer.wishes import Wishes

POOL_SLACK_PERCENT = 2  # whole pages, and remapped regions that tensors still view


class Engine:
    """One training under way. What it owns is given to `stack`, which its owner closes."""

    def __init__(self, stack: contextlib.ExitStack, parts: Parts, wishes: Wishes, example: Batch) -> None:
        self.folder = wishes.disk or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="counterpoint-")))
        sizes = {**home_sizes(parts.frame, parts.states), **unused_sizes(parts.chain)}
        self.disk = stack.enter_context(Disk(self.folder, sizes))
        self._plan(parts, wishes, example)
        self._build(parts, wishes)
        stack.callback(self._close)
        self.failure: BaseException | None = None
        self._closed = False
        self._running, self._bodies = False, 0

    def _plan(self, parts: Parts, wishes: Wishes, example: Batch) -> None:
        """Measure the layers and decide."""
        sizes = [wishes.plan.microbatch_size] if wishes.plan else wishes.freedom.microbatch_sizes
        limit = max(0, wishes.memory_bytes - resident_bytes()) // 2
        self.profile = profile_of(
            parts.frame,
            parts.states,
            parts.rule,
            sizes,
            type(parts.module).__name__,
            tokens_per_sample(parts.chain, example),
            wishes.autocast,
            limit,
        )
        updated_at_home = tuple(range(parts.frame.num_layers)) if parts.rule.elementwise else ()
        freedom = replace(wishes.freedom, microbatch_sizes=measured_sizes(self.profile), host_layers=updated_at_home)
        trim()
        self.base_bytes = resident_bytes() + 2 * STAGING_BYTES
        own_bytes = sum(p.nbytes for p in parts.module.parameters() if not p.is_meta)
        chosen = decide(
            self.profile, wishes.memory_bytes, self.base_bytes, own_bytes, self.folder, freedom, wishes.plan
        )
        self.machine, self.program, self.forecast = chosen.machine, chosen.program, chosen.forecast
        self.budget_bytes = chosen.budget_bytes
        self.base_bytes += HOME_STAGING_BYTES if chosen.plan.host_layers else 0
        self.plan = ChosenPlan.of(chosen.plan, f"{describe(chosen.forecast)}\n{self._whole(wishes.memory_bytes)}")

    def _whole(self, memory_bytes: int) -> str:
        """The last line of the forecast: the budget is for the whole process."""
        peak = self.base_bytes + self.forecast.tiers[0].peak_bytes
        sizes = f"{format_bytes(peak):>9} of {format_bytes(memory_bytes)}"
        return f"{'  whole process':<28}{sizes}: fits, {format_bytes(memory_bytes - peak)} to spare"

    def _build(self, parts: Parts, wishes: Wishes) -> None:
        budget, m = self.budget_bytes, self.plan.num_microbatches
        pool = Pool(budget + budget * POOL_SLACK_PERCENT // 100)
        self.store = Store(parts.frame, parts.states, self.disk, pool, m)
        buffers = blank_buffers(parts.chain)
        self.compute = Compute(
            parts.frame, self.store, parts.rule, buffers, m, wishes.seed, wishes.autocast, wishes.max_grad_norm
        )
        if self.plan.host_layers:
            self.compute.updates.home = HomeUpdate(self.store, parts.rule)
        costs = Costs(self.profile, self.plan)
        self.executor = Executor(self.store, self.compute, costs, budget, Headroom(self.base_bytes + budget))
        self._evaluator = Evaluator(self.executor, self.compute, costs, self.plan, budget)

    def run(self, step: Step) -> None:
        """One step to its end; transfers of the next one may be under way. A bad loss leaves no trace."""
        self.refuse_failed()
        with self._guarded(step.number, dict(self.compute.buffers)):
            if not self._running:
                self._running, self._bodies = True, 0
                self.executor.restart()
                self.executor.run(self.program.devices[0].prologue, step.number)
            number = self._bodies
            self.compute.steps[number] = step
            self.executor.run(self._shifted(self.program.devices[0].body, number), step.number)
            self._bodies += 1
            self.compute.steps.pop(number - 1, None)

    def settle(self, step: int) -> None:
        """Bring everything home, so that what is there is the whole state of the training."""
        self.refuse_failed()
        if self._running:
            with self._guarded(step, self.compute.buffers):
                self.executor.run(self._shifted(self.program.devices[0].epilogue, self._bodies), step)
                self.executor.drain()
                discard(self.store, self.compute)
            self._running = False

    def evaluate(self, batches: Sequence[Mapping[int, Tensor]], sizes: Sequence[int], step: int) -> float:
        """The mean loss of microbatches of these sizes, as in eval mode."""
        self.settle(step)
        with self._guarded(step, self.compute.buffers):
            return self._evaluator.loss(batches, sizes)

    @contextlib.contextmanager
    def replaced(self, step: int, what: str) -> Iterator[None]:
        """Everything at home is about to be replaced: also a failed run is whole again afterwards."""
        if self.failure is None or self._closed:
            self.settle(step)
        else:
            self.executor.abandon()
        discard(self.store, self.compute)
        self._running = False
        self.failure = ExecutionError(f"{what} was not finished")
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

    def _close(self) -> None:
        self._closed = True
        self.executor.close()

    def _shifted(self, tasks: Iterable[Task], steps: int) -> Iterator[Task]:
        return (shift(task, steps, self.program.num_microbatches) for task in tasks)

    @contextlib.contextmanager
    def _guarded(self, step: int, buffers: Mapping[str, Tensor]) -> Iterator[None]:
        """The user's random numbers are left alone; a bad loss is undone; any other error ends the run."""
        generator = torch.get_rng_state()
        try:
            yield
        except LossError:
            self.executor.abandon()
            self.executor.forget_step(step)
            bring_home(self.store, self.compute)
            self.compute.buffers.update(buffers)
            self._running = False
            raise
        except BaseException as error:
            self.failure = error
            raise
        finally:
            torch.set_rng_state(generator)
