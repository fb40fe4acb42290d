"""A program's tasks into work on lanes, and the record of when each ran.

The caller's thread is the compute lane. It walks the list, hands every other task to its lane and runs computations
itself. Whoever a task waits for is what `core/edges.py` says, the same as in the simulator. A receive is posted as
soon as its memory is allowed for, not only when the one before it has arrived.

A thread that waits for a lost peer cannot be woken. It is left behind; whoever waits for it is told after a moment.
"""

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, assert_never

from torch import Tensor

from counterpoint.core.costs import Costs
from counterpoint.core.edges import HomeWriters, Scan
from counterpoint.core.errors import CounterpointError, ExecutionError
from counterpoint.core.notation import dump_task
from counterpoint.core.program import lane, renames
from counterpoint.core.task import (
    AllReduce,
    Backward,
    Buffer,
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
from counterpoint.runtime.awaited import Awaited
from counterpoint.runtime.compute import Compute
from counterpoint.runtime.headroom import Headroom
from counterpoint.runtime.lanes import Job, Lanes
from counterpoint.runtime.outside import Outside
from counterpoint.runtime.record import Record
from counterpoint.runtime.store import Store
from counterpoint.runtime.transport import PeerGone, Transport

LANES = ("load", "evict", "evict values", "drop", "host")
ASIDE = "aside"
WATCHDOG_SECONDS = 600
_LOOK_SECONDS = 0.25
_JOIN_SECONDS = 2.0


class Executor:
    """Runs tasks in list order on one device. Use `run` for a section, `drain` before looking at what is at home.

    `lanes` are those of a device among others, which `transport` reaches; `explain` says why one of them is gone.
    """

    def __init__(
        self,
        store: Store,
        compute: Compute,
        costs: Costs,
        headroom: Headroom | None = None,
        device: int = 0,
        lanes: Iterable[str] = (),
        transport: Transport | None = None,
        explain: Callable[[str], str] = str,
    ) -> None:
        self.store, self.compute, self.costs = store, compute, costs
        self.outside = Outside(store, costs, headroom or compute.headroom)
        compute.headroom = self.outside.headroom
        self.device, self.transport, self.explain = device, transport, explain
        self.whole_names = False  # values of different microbatches look different
        self.record, self.awaited = Record(device, store.backend.used_bytes), Awaited(device)
        self.outline = store.frame.outline
        self.error: BaseException | None = None
        self.lost = self._ended = False
        store.stopped = lambda: self.lost or self._ended or self.error is not None
        names = dict.fromkeys((*LANES, *(name for name in lanes if name != "compute"), *([ASIDE] if transport else [])))
        self.lanes = Lanes(names, store.backend, self._run, self._finish)
        self.restart()

    def restart(self) -> None:
        """Forget the past: the numbers of the next section begin anew. Only after `drain`."""
        self._scan = Scan(self.outline, HomeWriters())
        self._jobs: dict[int, Job] = {}
        self._count = 0
        self.outside.forget()

    def run(self, tasks: Iterable[Task], step: int) -> None:
        """Run a section; returns when its computations are done, transfers may still be under way."""
        for task in tasks:
            job = self._submit(task, step)
            if job.lane in self.lanes:
                self.lanes.put(job)
            else:
                self.awaited.computed = task
                self._run(job)
                self._raise()
        self._prune()

    def aside(self, call: Callable[[], Any], peer: int, what: str) -> Any:
        """Ask a peer for something; unlike the call itself, this ends when the peer is lost."""
        job = Job(None, ASIDE, [], -1)
        job.call = call
        self.awaited.ask(peer, what)
        self.lanes.put(job)
        self._wait(job)
        self._raise()
        self.awaited.ask(peer, "")
        return job.result

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

    def lose(self, text: str) -> None:
        """A peer is gone: whoever waits is told, and what for."""
        if self.error is None:
            self.error = ExecutionError(text + self.awaited.text())
        self.lost = True

    def close(self) -> None:
        """End the lanes; what they hold is finished or, after an error, skipped; what waits for a peer is left."""
        self._ended = True
        patience_seconds = 0.0 if self.lost else _JOIN_SECONDS
        if self.transport is not None and self.lost:
            self.transport.wires.cut()
        self.lanes.close(None if self.transport is None else patience_seconds)

    def _submit(self, task: Task, step: int) -> Job:
        name = lane(task)
        before = self._scan.add(self._count, task, name)
        jobs = [self._jobs[index] for index in before if index in self._jobs]
        if isinstance(task, Receive):
            jobs = [job for job in jobs if job.lane != name]
        job = Job(task, name, jobs, step)
        self._jobs[self._count] = job
        self._count += 1
        return job

    def _run(self, job: Job) -> None:
        """Wait for what the task needs, do it, tell the others; after an error only the telling is left."""
        posted = False
        try:
            for other in job.predecessors:
                if not other.done.is_set():
                    job.blocker = other.task
                    self._wait(other)
            if self.error is None:
                job.start_ns = time.monotonic_ns()
                posted = self._begin(job)
                self.store.backend.finish()
        except BaseException as error:
            self._fail(job, error)
        finally:
            if not posted:
                self._settle(job)

    def _begin(self, job: Job) -> bool:
        """Do a task, or begin it: whether someone else will finish it."""
        if job.call is not None:
            job.result = job.call()
        elif isinstance(job.task, Receive):
            assert self.transport is not None
            self.awaited.by_lane[job.lane] = job.task
            self.outside.before_arrival(job.task.buffer)
            job.call = self.transport.post(self._name(job.task.buffer), job.task.peer)
            self.lanes.post(job)
            return True
        elif isinstance(job.task, Send | AllReduce | Clip) and job.lane in self.lanes:
            self.awaited.by_lane[job.lane] = job.task
            self._perform(job.task)
            self.awaited.by_lane.pop(job.lane, None)
        elif job.task is not None:
            self._perform(job.task)
        return False

    def _finish(self, job: Job) -> None:
        """Take what has arrived; gradients are added to what is there."""
        try:
            assert job.call is not None
            assert isinstance(job.task, Receive)
            self.awaited.by_lane[job.lane] = job.task
            tensor = job.call() if self.error is None else None
            if tensor is not None:
                self.store.take(job.task.buffer, tensor)
                self.outside.headroom.landed(job.task.buffer)
            self.store.backend.finish()
            self.awaited.by_lane.pop(job.lane, None)
        except BaseException as error:
            self._fail(job, error)
        finally:
            job.call = None
            self._settle(job)

    def _settle(self, job: Job) -> None:
        job.end_ns = time.monotonic_ns()
        if job.task is not None:
            self.record.add(job, job.task)
        job.predecessors = []
        job.done.set()

    def _fail(self, job: Job, error: BaseException) -> None:
        """The first error counts; that of a message is a lost peer, which may have said why."""
        if self.error is not None:
            return
        waits = job.lane == ASIDE or isinstance(job.task, Send | Receive | AllReduce | Clip)
        waits |= isinstance(error, PeerGone)
        if self.transport is not None and waits and isinstance(error, RuntimeError):
            self.lose(self.explain(self.awaited.gone(job.task, error)))
        else:
            self.error = error

    def _wait(self, job: Job) -> None:
        """Ends early when a peer is lost: the job may be left waiting for it for ever."""
        main = threading.current_thread() is threading.main_thread()
        if main:
            self.awaited.by_caller = job.task
        since = time.monotonic()
        while not job.done.wait(_LOOK_SECONDS if self.transport is not None else WATCHDOG_SECONDS):
            if self.lost and self.error is not None:
                raise self.error
            if self.error is None and time.monotonic() - since >= WATCHDOG_SECONDS:
                what = "what the peers say" if job.task is None else dump_task(job.task)
                raise ExecutionError(f"nothing happened for {WATCHDOG_SECONDS} s; waiting for {what}")
        if main:
            self.awaited.by_caller = None

    def _perform(self, task: Task) -> None:
        match task:
            case Forward():
                self.outside.before_computation(task)
                self.compute.forward(task)
                self.outside.after_forward(task)
            case Backward():
                self.outside.before_computation(task)
                self.compute.backward(task)
            case Norm():
                self.compute.norm(task)
            case Clip(_, peers):
                self.compute.clip(task, None if len(peers) == 1 else partial(self._exchange, peers))
            case Update():
                self.compute.update(task)
                for old, new in renames(task, self.outline):
                    self.store.rename(old, new)
            case Load(buffer, _):
                self.outside.before_load(buffer)
                self.store.load(buffer, self.outside.headroom.landed)
            case Evict(buffer, _):
                self.store.evict(buffer)
            case Drop(buffer):
                self.store.drop(buffer)
                self.outside.dropped(buffer)
            case Send(buffer, peer) if self.transport is not None:
                held = self.store.values.get(buffer)
                self.transport.send(self._name(buffer), None if held is None else held.tensor, peer)
            case AllReduce(peers=peers) if self.transport is not None:
                transport = self.transport
                self.compute.reduce(task, lambda flats, started: transport.reduce(flats, started, peers))
            case Send() | Receive() | AllReduce():
                raise ExecutionError(f"{dump_task(task)} needs several devices, this run has one")
            case _:
                assert_never(task)

    def _name(self, buffer: Buffer) -> object:
        """What has one form: a value, whatever the microbatch."""
        return buffer if self.whole_names else buffer[:2]

    def _exchange(self, peers: tuple[int, ...], norms: Tensor) -> Iterable[Tensor]:
        assert self.transport is not None
        found = self.transport.exchange_norms(norms, peers)
        return [found[peer] for peer in peers if peer != self.device]

    def _raise(self) -> None:
        if self.error is None:
            return
        error = self.error
        if isinstance(error, CounterpointError | KeyboardInterrupt):
            raise error
        raise ExecutionError(f"a task failed: {type(error).__name__}: {error}") from error

    def _prune(self) -> None:
        self._scan.home.foreign.clear()  # whoever wrote it, the store waits for it
        done = [index for index, job in self._jobs.items() if job.done.is_set()]
        for index in done:
            del self._jobs[index]
