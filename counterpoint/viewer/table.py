"""Timeline -> a summary: how long a step takes, what it waits for, what moves over which link, what is held where."""

from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.core.timeline import Timeline
from counterpoint.core.units import format_bytes, format_ns
from counterpoint.viewer.palette import CAUSES


@dataclass(frozen=True, slots=True)
class Entry:
    """One fact; `share` in percent says how much of a whole it is, None where there is no whole."""

    name: str
    text: str
    share: int | None = None


def facts(timeline: Timeline, budgets: Sequence[int] = ()) -> tuple[tuple[str, tuple[Entry, ...]], ...]:
    """Headings with their facts, those of one step for the step that took the median time."""
    sections = (
        ("run", _run(timeline)),
        ("time of one step, per device", _time(timeline)),
        ("moved in one step", _links(timeline)),
        ("most held", _peaks(timeline, budgets)),
    )
    return tuple((heading, entries) for heading, entries in sections if entries)


def summarize(timeline: Timeline, budgets: Sequence[int] = ()) -> str:
    """The facts as aligned lines."""
    sections = facts(timeline, budgets)
    every = [entry for _, entries in sections for entry in entries]
    name_width = max((len(entry.name) for entry in every), default=0)
    text_width = max((len(entry.text) for entry in every), default=0)
    lines = []
    for heading, entries in sections:
        lines.append(heading)
        for entry in entries:
            share = "" if entry.share is None else f"  {entry.share:3d} %"
            lines.append(f"  {entry.name:<{name_width}}  {entry.text:>{text_width}}{share}")
    return "\n".join(lines)


def _run(timeline: Timeline) -> tuple[Entry, ...]:
    steps = len(timeline.step_ends_ns)
    begin = min((span.start_ns for span in timeline.spans), default=0)  # a measured one may begin within the run
    return (
        Entry("step", format_ns(timeline.step_ns)),
        Entry(f"{steps} step{'s' * (steps != 1)} in all", format_ns(timeline.makespan_ns - begin)),
        Entry("devices", str(timeline.num_devices)),
        Entry("tasks", str(len(timeline.spans))),
    )


def _time(timeline: Timeline) -> tuple[Entry, ...]:
    """Computing and every cause of idleness, averaged over the devices; they sum up to the step."""
    begin, end = timeline.steady_window_ns
    whole = max((end - begin) * timeline.num_devices, 1)
    computing = sum(
        max(min(span.end_ns, end) - max(span.start_ns, begin), 0) for span in timeline.spans if span.lane == "compute"
    )
    idle = timeline.steady_idle_ns()
    rest = whole - computing - sum(idle.values())
    times = {"computes": computing}
    times |= {f"waits for {text}": idle[cause] for cause, text in CAUSES.items() if cause in idle}
    if rest > whole // 200:
        times["done, waits for the others"] = rest
    return tuple(
        Entry(name, format_ns(time // max(timeline.num_devices, 1)), _percent(time, whole))
        for name, time in times.items()
    )


def _links(timeline: Timeline) -> tuple[Entry, ...]:
    return tuple(Entry(f"link {name}", format_bytes(size)) for name, size in timeline.steady_link_bytes if size)


def _peaks(timeline: Timeline, budgets: Sequence[int]) -> tuple[Entry, ...]:
    entries = []
    for tier, peak in timeline.peak_bytes().items():
        kind, _, number = tier.rpartition(" ")
        known = kind == "device" and number.isdecimal() and int(number) < len(budgets)
        budget = budgets[int(number)] if known else 0
        text = f"{format_bytes(peak)} of {format_bytes(budget)}" if budget else format_bytes(peak)
        entries.append(Entry(tier, text, _percent(peak, budget) if budget else None))
    return tuple(entries)


def _percent(part: int, whole: int) -> int:
    return (100 * part + whole // 2) // whole
