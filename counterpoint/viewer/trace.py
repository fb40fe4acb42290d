"""Timeline -> Chrome trace JSON, for Perfetto (ui.perfetto.dev) or chrome://tracing.

A process per device, a thread per lane, a counter per tier, and an arrow from each send to its receive.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from counterpoint.core.notation import dump_task
from counterpoint.core.task import Receive, Send
from counterpoint.core.timeline import Span, Timeline
from counterpoint.viewer.palette import KINDS, kind_of

_ORDER = ("compute", "host", "load", "evict", "drop", "send", "receive", "reduce")


def trace(timeline: Timeline) -> str:
    """One event per line."""
    events = [json.dumps(event) for event in _events(timeline)]
    return '{"displayTimeUnit": "ms", "traceEvents": [\n' + ",\n".join(events) + "\n]}\n"


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    threads = _threads(timeline)
    for device in range(timeline.num_devices):
        yield _metadata("process_name", device, name=f"device {device}")
        yield _metadata("process_sort_index", device, sort_index=device)
    for (device, lane), thread in threads.items():
        yield _metadata("thread_name", device, thread, name=lane)
        yield _metadata("thread_sort_index", device, thread, sort_index=thread)
    for span in timeline.spans:
        yield _span(span, threads[span.device, span.lane])
    yield from _arrows(timeline, threads)
    for point in timeline.memory:
        device = int(point.tier.removeprefix("device ")) if point.tier.startswith("device ") else timeline.num_devices
        values = {"held bytes": point.held_bytes}
        yield {"ph": "C", "name": f"memory, {point.tier}", "pid": device, "ts": point.time_ns / 1000, "args": values}
    if any(not point.tier.startswith("device ") for point in timeline.memory):
        yield _metadata("process_name", timeline.num_devices, name="home tiers")


def _threads(timeline: Timeline) -> dict[tuple[int, str], int]:
    """A number for each lane of each device, in the order in which they are shown."""
    lanes = {(span.device, span.lane) for span in timeline.spans}
    ordered = sorted(lanes, key=lambda key: (key[0], _ORDER.index(key[1].split()[0]), key[1]))
    threads: dict[tuple[int, str], int] = {}
    for device, lane in ordered:
        threads[device, lane] = sum(other == device for other, _ in threads)
    return threads


def _metadata(what: str, device: int, thread: int = 0, **values: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": device, "tid": thread, "args": values}


def _span(span: Span, thread: int) -> dict[str, Any]:
    waited = {"waited for": dump_task(span.blocked_by)} if span.blocked_by else {}
    return {
        "ph": "X",
        "name": dump_task(span.task),
        "cat": KINDS[kind_of(span.task)],
        "pid": span.device,
        "tid": thread,
        "ts": span.start_ns / 1000,
        "dur": (span.end_ns - span.start_ns) / 1000,
        "args": {"step": span.step, **waited},
    }


def _arrows(timeline: Timeline, threads: dict[tuple[int, str], int]) -> Iterator[dict[str, Any]]:
    """The n-th send of a buffer between two devices goes to its n-th receive."""
    sends: defaultdict[tuple[object, ...], list[Span]] = defaultdict(list)
    receives: defaultdict[tuple[object, ...], list[Span]] = defaultdict(list)
    for span in timeline.spans:
        match span.task:
            case Send(buffer, peer):
                sends[buffer, span.device, peer].append(span)
            case Receive(buffer, peer):
                receives[buffer, peer, span.device].append(span)
            case _:
                pass
    number = 0
    for key, sent in sends.items():
        for start, end in zip(sent, receives[key], strict=False):
            common = {"name": "transfer", "cat": "transfer", "id": number}
            number += 1
            for span, phase in ((start, {"ph": "s"}), (end, {"ph": "f", "bp": "e"})):
                place = {"pid": span.device, "tid": threads[span.device, span.lane], "ts": span.start_ns / 1000}
                yield {**common, **phase, **place}
