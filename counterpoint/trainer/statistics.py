"""Spans of a run -> what a trainer tells of itself: memory, bytes moved, time waited."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from counterpoint.core.timeline import Span, Timeline, cause_of
from counterpoint.runtime.executor import Executor


@dataclass(frozen=True, slots=True)
class Statistics:
    """Memory of the whole process now and at its peak; bytes moved in all and in the last step; waits of that step."""

    resident_bytes: int
    peak_bytes: int
    loaded_bytes: int
    evicted_bytes: int
    read_bytes: int
    written_bytes: int
    waited_ns: tuple[tuple[str, int], ...]


def waited(spans: Iterable[Span], step: int, begin_ns: int) -> tuple[tuple[str, int], ...]:
    """How long the computations of a step that began at `begin_ns` stood still, by cause."""
    found: dict[str, int] = {}
    free = begin_ns
    for span in spans:
        if span.lane != "compute" or span.step != step:
            continue
        if span.start_ns > free:
            cause = cause_of(span.blocked_by)
            found[cause] = found.get(cause, 0) + span.start_ns - free
        free = max(free, span.end_ns)
    return tuple(sorted(found.items(), key=lambda item: -item[1]))


def with_process(timeline: Timeline, base_bytes: int) -> Timeline:
    """A simulated timeline in the terms of a measured one: devices hold the process itself too."""
    memory = tuple(
        replace(point, held_bytes=point.held_bytes + base_bytes) if point.tier.startswith("device ") else point
        for point in timeline.memory
    )
    return replace(timeline, memory=memory)


def measured_timeline(executor: Executor, first_step: int) -> Timeline:
    """The executor's record from a step on; what was moved counts the whole run."""
    spans = [span for span in tuple(executor.record.spans) if span.step >= first_step]
    spans.sort(key=lambda span: (span.start_ns, span.device, span.lane))
    ends: dict[int, int] = {}
    for span in spans:
        if span.lane == "compute":
            ends[span.step] = max(ends.get(span.step, 0), span.end_ns)
    counters = executor.store.counters
    moved = (("disk read", counters.loaded_bytes), ("disk write", counters.evicted_bytes))
    memory = tuple(point for point in tuple(executor.record.memory) if spans and point.time_ns >= spans[0].start_ns)
    return Timeline(1, tuple(spans), tuple(ends[step] for step in sorted(ends)), memory, moved, ())
