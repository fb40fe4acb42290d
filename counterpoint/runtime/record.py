"""Jobs that are done -> spans and memory points, the raw material of a measured timeline."""

import itertools
import time
from collections.abc import Callable

from counterpoint.core.task import Task
from counterpoint.core.timeline import MemoryPoint, Span
from counterpoint.runtime.lanes import Job


class Record:
    """When each task of a device ran, and what was in use after each computation; times from `origin_ns`."""

    def __init__(self, device: int, used_bytes: Callable[[], int]) -> None:
        self.device, self._used_bytes = device, used_bytes
        self.origin_ns = time.monotonic_ns()
        self.spans: list[Span] = []
        self.memory: list[MemoryPoint] = []

    def add(self, job: Job, task: Task) -> None:
        start, end = job.start_ns - self.origin_ns, job.end_ns - self.origin_ns
        self.spans.append(Span(self.device, job.lane, task, start, end, job.step, job.blocker))
        if job.lane == "compute":
            self.memory.append(MemoryPoint(f"device {self.device}", end, self._used_bytes()))

    def forget_before(self, step: int) -> None:
        """A long run keeps only the record of its last steps."""
        begin_ns = min((span.start_ns for span in self.spans if span.step >= step), default=0)
        del self.spans[: sum(1 for _ in itertools.takewhile(lambda s: s.step < step, self.spans))]
        del self.memory[: sum(1 for _ in itertools.takewhile(lambda m: m.time_ns < begin_ns, self.memory))]

    def forget_step(self, step: int) -> None:
        """Drop the record of a step that was undone."""
        self.spans[:] = [span for span in self.spans if span.step != step]
