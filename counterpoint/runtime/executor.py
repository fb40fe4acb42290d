"""A program's tasks into work on lanes, and the timeline of when each ran.

The caller's thread is the compute lane. It walks the list, hands every other task to its lane and runs computations
itself. Whoever a task waits for is what `core/edges.py` says, the same as in the simulator. A receive is posted as
soon as its memory is allowed for, not only when the one before it has arrived.

A thread that waits for a lost peer cannot be woken. It is left behind; whoever waits for it is told after a moment.
"""

import itertools
import queue
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
from counterpoint.core.program import lane, renames, writes
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
    activation,
)
from counterpoint.core.timeline import MemoryPoint, Span
from counterpoint.runtime.compute import Compute
from counterpoint.runtime.memory_process import HEAP_BYTES, Headroom, resident_bytes
from counterpoint.runtime.store import FLAT_KINDS, Store
from counterpoint.runtime.transport import Transport

LANES = ("load", "evict", "drop", "host")
ASIDE = "aside"
WATCHDOG_SECONDS = 600
_WIDENING = 4  # of a transformer's block, inside
_LOOK_SECONDS = 0.25
_JOIN_SECONDS = 2.0


class _Job:
    """A task under way: what it waits for, and when it ran."""

    __slots__ = (
        "blocker",
        "call",
        "done",
        "end_ns",
        "lane",
        "mark",
        "predecessors",
        "result",
        "start_ns",
        "step",
        "task",
    )

    def __init__(self, task: Task | None, lane_name: str, predecessors: list["_Job"], step: int) -> None:
        self.task, self.lane, self.step = task, lane_name, step
        self.predecessors = predecessors
        self.done = threading.Event()
        self.start_ns = self.end_ns = 0
        self.blocker: Task | None = None
        self.call: Callable[[], Any] | None = None
        self.result: Any = None
        self.mark: object = None


class Executor:
    """Runs tasks in list order on one device. Use `run` for a section, `drain` before looking at what is at home.

    `lanes` are those of a device among others, which `transport` reaches; `explain` says why one of them is gone.
    """

    def __init__(
        self,
        store: Store,
        compute: Compute,
        costs: Costs,
        budget: int,
        headroom: Headroom | None = None,
        device: int = 0,
        lanes: Iterable[str] = (),
        transport: Transport | None = None,
        explain: Callable[[str], str] = str,
    ) -> None:
        self.store, self.compute, self.costs, self.budget = store, compute, costs, budget
        self.headroom = headroom
        if headroom:
            compute.between_layers = headroom.relieve
        self.device, self.transport, self.explain = device, transport, explain
        self.lost = False
        self.whole_names = False  # values of different microbatches look different
        self._awaited: Task | None = None
        self._aside = (0, "")
        self._active: dict[str, Task] = {}
        self._ended = False
        store.stopped = lambda: self.lost or self._ended or self.error is not None
        self.outline = store.frame.outline
        self.error: BaseException | None = None
        self.spans: list[Span] = []
        self.memory: list[MemoryPoint] = []
        self.origin_ns = time.monotonic_ns()
        self.outside: dict[object, int] = {}
        names = dict.fromkeys((*LANES, *(name for name in lanes if name != "compute"), *([ASIDE] if transport else [])))
        self._queues: dict[str, queue.SimpleQueue[_Job | None]] = {name: queue.SimpleQueue() for name in names}
        self._threads = [self._thread(name, partial(self._serve, name)) for name in names]
        self._arrivals: dict[str, queue.SimpleQueue[_Job | None]] = {}
        for name in (name for name in names if name.startswith("receive")):
            self._arrivals[name] = queue.SimpleQueue()
            self._threads.append(self._thread(f"{name} arrivals", partial(self._serve_arrivals, name)))
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
            if job.lane in self._queues:
                self._queues[job.lane].put(job)
            else:
                self._run(job)
                self._raise()
        self._prune()

    def aside(self, call: Callable[[], Any], peer: int, what: str) -> Any:
        """Ask a peer for something; unlike the call itself, this ends when the peer is lost."""
        job = _Job(None, ASIDE, [], -1)
        job.call, self._aside = call, (peer, what)
        self._queues[ASIDE].put(job)
        self._wait(job)
        self._raise()
        self._aside = (peer, "")
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

    def forget_spans(self, before_step: int) -> None:
        """A long run keeps only the record of its last steps."""
        begin_ns = min((span.start_ns for span in self.spans if span.step >= before_step), default=0)
        del self.spans[: sum(1 for _ in itertools.takewhile(lambda s: s.step < before_step, self.spans))]
        del self.memory[: sum(1 for _ in itertools.takewhile(lambda m: m.time_ns < begin_ns, self.memory))]

    def forget_step(self, step: int) -> None:
        """Drop the record of a step that was undone."""
        self.spans[:] = [span for span in self.spans if span.step != step]

    def lose(self, text: str) -> None:
        """A peer is gone: whoever waits is told, and what for."""
        if self.error is None:
            self.error = ExecutionError(text + self._waiting())
        self.lost = True

    def close(self) -> None:
        """End the lanes; what they hold is finished or, after an error, skipped; what waits for a peer is left."""
        self._ended = True
        for waiting in (*self._queues.values(), *self._arrivals.values()):
            waiting.put(None)
        end = time.monotonic() + (0.0 if self.lost else _JOIN_SECONDS)
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()) if self.transport is not None else None)

    def _thread(self, name: str, work: Callable[[], None]) -> threading.Thread:
        return threading.Thread(target=work, name=f"counterpoint {name}", daemon=True)

    def _waiting(self) -> str:
        """What this device waits for, for an error."""
        awaited = [self._awaited] if self._awaited is not None else []
        tasks = dict.fromkeys(dump_task(task) for task in (*awaited, *tuple(self._active.values())))
        tasks |= {self._aside[1]: None} if self._aside[1] else {}
        return f"; device {self.device} was waiting for {', '.join(tasks)}" if tasks else ""

    def _submit(self, task: Task, step: int) -> _Job:
        name = lane(task)
        before = self._scan.add(self._count, task, name)
        jobs = [self._jobs[index] for index in before if index in self._jobs]
        if isinstance(task, Receive):
            jobs = [job for job in jobs if job.lane != name]
        job = _Job(task, name, jobs, step)
        self._jobs[self._count] = job
        self._count += 1
        return job

    def _serve(self, name: str) -> None:
        with self.store.backend.lane(name):
            while (job := self._queues[name].get()) is not None:
                self._run(job)

    def _serve_arrivals(self, name: str) -> None:
        while (job := self._arrivals[name].get()) is not None:
            self._finish(job)

    def _run(self, job: _Job) -> None:
        """Wait for what the task needs, do it, tell the others; after an error only the telling is left."""
        posted = False
        try:
            for other in job.predecessors:
                if not other.done.is_set():
                    job.blocker = other.task
                    self._wait(other)
                self.store.backend.follow(other.mark)
            if self.error is None:
                job.start_ns = time.monotonic_ns()
                posted = self._begin(job)
        except BaseException as error:
            self._fail(job, error)
        finally:
            if not posted:
                self._settle(job)

    def _begin(self, job: _Job) -> bool:
        """Do a task, or begin it: whether someone else will finish it."""
        if job.call is not None:
            job.result = job.call()
        elif isinstance(job.task, Receive):
            assert self.transport is not None
            self._active[job.lane] = job.task
            self.outside[job.task.buffer] = self.costs.buffer_bytes(job.task.buffer)
            if self.headroom:
                self.headroom.load(self.outside[job.task.buffer])
            job.call = self.transport.post(self._name(job.task.buffer), job.task.peer)
            self._arrivals[job.lane].put(job)
            return True
        elif isinstance(job.task, Send | AllReduce | Clip) and job.lane in self._queues:
            self._active[job.lane] = job.task
            self._perform(job.task)
            self._active.pop(job.lane, None)
        elif job.task is not None:
            self._perform(job.task)
        return False

    def _finish(self, job: _Job) -> None:
        """Take what has arrived; gradients are added to what is there."""
        try:
            assert job.call is not None
            assert isinstance(job.task, Receive)
            self._active[job.lane] = job.task
            tensor = job.call() if self.error is None else None
            if tensor is not None:
                self.store.take(job.task.buffer, tensor)
            self._active.pop(job.lane, None)
        except BaseException as error:
            self._fail(job, error)
        finally:
            job.call = None
            self._settle(job)

    def _settle(self, job: _Job) -> None:
        job.end_ns = time.monotonic_ns()
        if job.task is not None:
            self._record(job, job.task)
        job.predecessors = []
        job.mark = self.store.backend.mark()
        job.done.set()

    def _fail(self, job: _Job, error: BaseException) -> None:
        """The first error counts; that of a message is a lost peer, which may have said why."""
        if self.error is not None:
            return
        waits = job.lane == ASIDE or isinstance(job.task, Send | Receive | AllReduce | Clip)
        if self.transport is not None and waits and isinstance(error, RuntimeError):
            self.lose(self.explain(f"{_peer_of(job.task) or f'device {self._aside[0]}'} is gone ({_reason(error)})"))
        else:
            self.error = error

    def _wait(self, job: _Job) -> None:
        """Ends early when a peer is lost: the job may be left waiting for it for ever."""
        main = threading.current_thread() is threading.main_thread()
        if main:
            self._awaited = job.task
        since = time.monotonic()
        while not job.done.wait(_LOOK_SECONDS if self.transport is not None else WATCHDOG_SECONDS):
            if self.lost and self.error is not None:
                raise self.error
            if self.error is None and time.monotonic() - since >= WATCHDOG_SECONDS:
                what = "what the peers say" if job.task is None else dump_task(job.task)
                raise ExecutionError(f"nothing happened for {WATCHDOG_SECONDS} s; waiting for {what}")
        if main:
            self._awaited = None

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
            case Clip(_, peers):
                self.compute.clip(task, None if len(peers) == 1 else partial(self._exchange, peers))
            case Update():
                self.compute.update(task)
                for old, new in renames(task, self.outline):
                    self.store.rename(old, new)
            case Load(buffer, _):
                if self.headroom:
                    self.headroom.load(self.costs.buffer_bytes(buffer))
                self.store.load(buffer)
            case Evict(buffer, _):
                self.store.evict(buffer)
            case Drop(buffer):
                self.store.drop(buffer)
                self.outside.pop(buffer, None)
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
            outside = sum(self.outside.values()) - born
            needed = born + workspace
            self.headroom.compute(needed, self._fresh_bytes(task, needed), self.store.pool.mapped_bytes + outside)

    def _fresh_bytes(self, task: Forward | Backward, needed_bytes: int) -> int:
        """What of a computation's memory cannot come from the heap: tensors that are too large for it.

        Gradients of weights are as large as they. Within a layer values may be a few times as large as at its borders,
        and in the last one, where the loss is, as large as can be.
        """
        layers = range(task.first, task.last + 1)
        borders = {*self.outline.inputs(task.first, task.last), *self.outline.outputs(task.first, task.last)}
        widest = max((self.costs.buffer_bytes(activation(value, 0)) for value in borders), default=0)
        if task.last == self.outline.num_layers - 1 or widest * _WIDENING >= HEAP_BYTES:
            return needed_bytes
        owners = {owner for layer in layers for owner in (layer, *self.outline.layers[layer].tied)}
        slots = (slot.num_bytes for owner in owners for slot in self.store.frame.weights[owner].slots)
        largest = max(slots, default=0) if isinstance(task, Backward) else 0
        return min(largest, needed_bytes) if largest >= HEAP_BYTES else 0

    def _record(self, job: _Job, task: Task) -> None:
        start, end = job.start_ns - self.origin_ns, job.end_ns - self.origin_ns
        self.spans.append(Span(self.device, job.lane, task, start, end, job.step, job.blocker))
        if job.lane == "compute":
            self.memory.append(MemoryPoint(f"device {self.device}", end, resident_bytes()))

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


def _peer_of(task: Task | None) -> str:
    match task:
        case Send(_, peer) | Receive(_, peer):
            return f"device {peer}"
        case AllReduce(peers=peers) | Clip(peers=peers):
            return f"one of devices {', '.join(map(str, peers))}"
        case _:
            return ""


def _reason(error: BaseException) -> str:
    """What gloo says, without the place in its sources."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.partition("] ")[2].partition(". ")[0][:120] or text[:120]
