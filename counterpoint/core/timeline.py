"""When each task ran, simulated or measured: the one result of a simulation and of a real run."""

import itertools
from collections import defaultdict
from dataclasses import dataclass

from counterpoint.core.task import AllReduce, Clip, Drop, Evict, Load, Receive, Send, Task, Update

CAUSES = ("load", "evict", "peer", "optimizer", "start")


@dataclass(frozen=True, slots=True)
class Span:
    """One task on one lane. `blocked_by` is the task whose end it waited for last, None if only for its lane."""

    device: int
    lane: str
    task: Task
    start_ns: int
    end_ns: int
    step: int
    blocked_by: Task | None = None


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """Bytes held in a tier (`device 0`, `host`, `disk`) from this moment on."""

    tier: str
    time_ns: int
    held_bytes: int


@dataclass(frozen=True, slots=True)
class Wait:
    """A stretch in which a device computed nothing, and why."""

    device: int
    start_ns: int
    end_ns: int
    cause: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans by (start, device, lane); `step_ends_ns` says when the last computation of each step ended.

    `link_bytes` counts whole runs. `steady_link_bytes` counts one step between others.
    """

    num_devices: int
    spans: tuple[Span, ...]
    step_ends_ns: tuple[int, ...]
    memory: tuple[MemoryPoint, ...]
    link_bytes: tuple[tuple[str, int], ...]
    steady_link_bytes: tuple[tuple[str, int], ...]

    @property
    def makespan_ns(self) -> int:
        return max((span.end_ns for span in self.spans), default=0)

    @property
    def step_ns(self) -> int:
        """Time from one step's end to the next, the median once the run is under way."""
        ends = self.step_ends_ns
        if len(ends) < 2:
            return ends[0] if ends else 0
        lengths = sorted(b - a for a, b in itertools.pairwise(ends))
        return lengths[len(lengths) // 2]

    def peak_bytes(self) -> dict[str, int]:
        peaks: dict[str, int] = {}
        for point in self.memory:
            peaks[point.tier] = max(peaks.get(point.tier, 0), point.held_bytes)
        return peaks

    def waits(self) -> tuple[Wait, ...]:
        """Gaps on the compute lanes, by what ended them."""
        found: list[Wait] = []
        free: defaultdict[int, int] = defaultdict(int)
        for span in self.spans:
            if span.lane != "compute":
                continue
            if span.start_ns > free[span.device]:
                found.append(Wait(span.device, free[span.device], span.start_ns, cause_of(span.blocked_by)))
            free[span.device] = max(free[span.device], span.end_ns)
        return tuple(found)

    @property
    def steady_window_ns(self) -> tuple[int, int]:
        """When the step that took the median time began and ended."""
        ends = self.step_ends_ns
        windows = list(itertools.pairwise(ends)) or [(0, end) for end in ends[:1]] or [(0, self.makespan_ns)]
        return next((w for w in windows if w[1] - w[0] == self.step_ns), windows[0])

    def steady_idle_ns(self) -> dict[str, int]:
        """Idle time per cause in the median step, summed over the devices."""
        begin, end = self.steady_window_ns
        idle: dict[str, int] = dict.fromkeys(CAUSES, 0)
        for wait in self.waits():
            overlap = min(wait.end_ns, end) - max(wait.start_ns, begin)
            if overlap > 0:
                idle[wait.cause] += overlap
        return {cause: time for cause, time in idle.items() if time}


def cause_of(task: Task | None) -> str:
    """Why a computation that waited for `task` was idle."""
    match task:
        case Load():
            return "load"
        case Evict() | Drop():
            return "evict"
        case Send() | Receive() | AllReduce():
            return "peer"
        case Clip() | Update():
            return "optimizer"
        case _:
            return "start"
