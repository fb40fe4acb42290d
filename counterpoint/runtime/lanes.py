"""Jobs into threads: a queue in order for each lane, and one beside each receiving lane for what is to arrive."""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from counterpoint.core.task import Task
from counterpoint.runtime.backend import Backend


class Job:
    """A task under way: what it waits for, and when it ran."""

    __slots__ = (
        "blocker",
        "call",
        "done",
        "end_ns",
        "lane",
        "predecessors",
        "result",
        "start_ns",
        "step",
        "task",
    )

    def __init__(self, task: Task | None, lane: str, predecessors: list["Job"], step: int) -> None:
        self.task, self.lane, self.step = task, lane, step
        self.predecessors = predecessors
        self.done = threading.Event()
        self.start_ns = self.end_ns = 0
        self.blocker: Task | None = None
        self.call: Callable[[], Any] | None = None
        self.result: Any = None


class Lanes:
    """The threads of a device's lanes. Each job is given to `run`; one that is posted is given to `finish` in turn."""

    def __init__(
        self, names: Iterable[str], backend: Backend, run: Callable[[Job], None], finish: Callable[[Job], None]
    ) -> None:
        self._backend, self._run, self._finish = backend, run, finish
        self._queues: dict[str, queue.SimpleQueue[Job | None]] = {name: queue.SimpleQueue() for name in names}
        receiving = [name for name in self._queues if name.startswith("receive")]
        self._arrivals: dict[str, queue.SimpleQueue[Job | None]] = {name: queue.SimpleQueue() for name in receiving}
        self._threads = [_thread(name, self._serve, name) for name in self._queues]
        self._threads += [_thread(f"{name} arrivals", self._serve_arrivals, name) for name in receiving]
        for thread in self._threads:
            thread.start()

    def __contains__(self, name: str) -> bool:
        return name in self._queues

    def put(self, job: Job) -> None:
        self._queues[job.lane].put(job)

    def post(self, job: Job) -> None:
        """A job that is begun: only its end is left to wait for."""
        self._arrivals[job.lane].put(job)

    def close(self, patience_seconds: float | None) -> None:
        """End the threads once they are through; those that are not when patience ends are left behind."""
        for waiting in (*self._queues.values(), *self._arrivals.values()):
            waiting.put(None)
        end = None if patience_seconds is None else time.monotonic() + patience_seconds
        for thread in self._threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))

    def _serve(self, name: str) -> None:
        with self._backend.lane(name):
            while (job := self._queues[name].get()) is not None:
                self._run(job)

    def _serve_arrivals(self, name: str) -> None:
        with self._backend.lane(f"{name} arrivals"):
            while (job := self._arrivals[name].get()) is not None:
                self._finish(job)


def _thread(name: str, work: Callable[[str], None], lane: str) -> threading.Thread:
    return threading.Thread(target=work, args=(lane,), name=f"counterpoint {name}", daemon=True)
