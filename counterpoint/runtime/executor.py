"""A program's tasks into work on lanes, and the timeline of when each ran.

The caller's thread is the compute lane. It walks the list, hands every other task to its lane and runs computations
itself. Whoever a task waits for is what `core/edges.py` says, the same as in the simulator.
"""

import itertools
import queue
import threading
import time
from collections.abc import Iterable
from typing import assert_never

from counterpoint.core.costs import Costs
from counterpoint.core.edges import HomeWriters, Scan
from counterpoint.core.errors import CounterpointError, ExecutionError
from counterpoint.core.notation import dump_task
from counterpoint.core.program import lane, renames, writes
from counterpoint.core.task import (
    AllReduce,
    Backward,
    Clip,
    Drop,
    Evict,
    Forward,
    Load,
    Norm,
    Receive,
    Send,
    Task,
    Update,
)
from counterpoint.core.timeline import MemoryPoint, Span
from counterpoint.runtime.compute import Compute
from counterpoint.runtime.memory_process import Headroom, resident_bytes
from counterpoint.runtime.store import FLAT_KINDS, Store

LANES = ("load", "evict", "drop", "host")
WATCHDOG_SECONDS = 600


class _Job:
    """A task under way: what it waits for, and when it ran."""

    __slots__ = ("blocker", "done", "end_ns", "lane", "predecessors", "start_ns", "step", "task")

    def __init__(self, task: Task, lane_name: str, predecessors: list["_Job"], step: int) -> None:
        self.task, self.lane, self.step = task, lane_name, step
        self.predecessors = predecessors
        self.done = threading.Event()
        self.start_ns = self.end_ns = 0
        self.blocker: Task | None = None


class Executor:
    """Runs tasks in list order on one device. Use `run` for a section, `drain` before looking at what is at home."""

    def __init__(
        self, store: Store, compute: Compute, costs: Costs, budget: int, headroom: Headroom | None = None
    ) -> None:
        self.store, self.compute, self.costs, self.budget = store, compute, costs, budget
        self.headroom = headroom
        self.outline = store.frame.outline
        self.error: BaseException | None = None
        self.spans: list[Span] = []
        self.memory: list[MemoryPoint] = []
        self.origin_ns = time.monotonic_ns()
        self.outside: dict[object, int] = {}
        self._queues: dict[str, queue.SimpleQueue[_Job | None]] = {name: queue.SimpleQueue() for name in LANES}
        self._threads = [
            threading.Thread(target=self._serve, args=(name,), name=f"counterpoint {name}", daemon=True)
            for name in LANES
        ]
        for thread in self._threads:
            thread.start()
        self.restart()

    def restart(self) -> None:
        """Forget the past: the numbers of the next section begin anew. Only after `drain`."""
        self._scan = Scan(self.outline, HomeWriters())
        self._jobs: dict[int, _Job] = {}
        self._count = 0
        self.outside.clear()

    def run(self, tasks: Iterable[Task], step: int) -> None:
        """Run a section; returns when its computations are done, transfers may still be under way."""
        for task in tasks:
            job = self._submit(task, step)
            if job.lane == "compute" or job.lane == "reduce":
                self._run(job)
                self._raise()
            else:
                self._queues[job.lane].put(job)
        self._prune()

    def drain(self) -> None:
        """Wait until every lane is empty."""
        for job in list(self._jobs.values()):
            self._wait(job)
        self._raise()
        self._prune()

    def abandon(self) -> None:
        """Wait until every lane is empty and forget the error: what is on the device is as the error left it."""
        for job in list(self._jobs.values()):
            self._wait(job)
        self.error = None
        self.restart()

    def forget_spans(self, before_step: int) -> None:
        """A long run keeps only the record of its last steps."""
        begin_ns = min((span.start_ns for span in self.spans if span.step >= before_step), default=0)
        del self.spans[: sum(1 for _ in itertools.takewhile(lambda s: s.step < before_step, self.spans))]
        del self.memory[: sum(1 for _ in itertools.takewhile(lambda m: m.time_ns < begin_ns, self.memory))]

    def forget_step(self, step: int) -> None:
        """Drop the record of a step that was undone."""
        self.spans[:] = [span for span in self.spans if span.step != step]

    def close(self) -> None:
        """End the lanes; what they hold is finished or, after an error, skipped."""
        for name in LANES:
            self._queues[name].put(None)
        for thread in self._threads:
            thread.join()

    def _submit(self, task: Task, step: int) -> _Job:
        name = lane(task)
        before = self._scan.add(self._count, task, name)
        job = _Job(task, name, [self._jobs[index] for index in before if index in self._jobs], step)
        self._jobs[self._count] = job
        self._count += 1
        return job

    def _serve(self, name: str) -> None:
        while (job := self._queues[name].get()) is not None:
            self._run(job)

    def _run(self, job: _Job) -> None:
        """Wait for what the task needs, do it, tell the others; after an error only the telling is left."""
        try:
            for other in job.predecessors:
                if not other.done.is_set():
                    job.blocker = other.task
                    self._wait(other)
            if self.error is None:
                job.start_ns = time.monotonic_ns()
                self._perform(job.task)
        except BaseException as error:
            if self.error is None:
                self.error = error
        finally:
            job.end_ns = time.monotonic_ns()
            self._record(job)
            job.predecessors = []
            job.done.set()

    def _wait(self, job: _Job) -> None:
        while not job.done.wait(WATCHDOG_SECONDS):
            if self.error is None:
                raise ExecutionError(f"nothing happened for {WATCHDOG_SECONDS} s; waiting for {dump_task(job.task)}")

    def _perform(self, task: Task) -> None:
        match task:
            case Forward():
                self._make_room(task)
                self.compute.forward(task)
            case Backward():
                self._make_room(task)
                self.compute.backward(task)
            case Norm():
                self.compute.norm(task)
            case Clip():
                self.compute.clip(task)
            case Update():
                self.compute.update(task)
                for old, new in renames(task, self.outline):
                    self.store.rename(old, new)
            case Load(buffer, _):
                if self.headroom:
                    self.headroom.make(self.costs.buffer_bytes(buffer))
                self.store.load(buffer)
            case Evict(buffer, _):
                self.store.evict(buffer)
            case Drop(buffer):
                self.store.drop(buffer)
                self.outside.pop(buffer, None)
            case Send() | Receive() | AllReduce():
                raise ExecutionError(f"{dump_task(task)} needs several devices, this run has one")
            case _:
                assert_never(task)

    def _make_room(self, task: Forward | Backward) -> None:
        """Unmap free regions where torch is about to allocate outside the pool."""
        born = 0
        for buffer in writes(task, self.outline):
            if buffer.kind not in FLAT_KINDS and buffer not in self.store.values:
                self.outside[buffer] = self.costs.buffer_bytes(buffer)
                born += self.outside[buffer]
        workspace = self.costs.workspace_bytes(task)
        self.store.pool.shrink(max(0, self.budget - sum(self.outside.values()) - workspace))
        if self.headroom:
            self.headroom.make(born + workspace)

    def _record(self, job: _Job) -> None:
        start, end = job.start_ns - self.origin_ns, job.end_ns - self.origin_ns
        self.spans.append(Span(0, job.lane, job.task, start, end, job.step, job.blocker))
        if job.lane == "compute":
            self.memory.append(MemoryPoint("process", end, resident_bytes()))

    def _raise(self) -> None:
        if self.error is None:
            return
        error = self.error
        if isinstance(error, CounterpointError | KeyboardInterrupt):
            raise error
        raise ExecutionError(f"a task failed: {type(error).__name__}: {error}") from error

    def _prune(self) -> None:
        done = [index for index, job in self._jobs.items() if job.done.is_set()]
        for index in done:
            del self._jobs[index]
