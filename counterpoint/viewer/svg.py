"""Timeline -> SVG: per device its lanes over time, why it was idle, and the memory it held."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from counterpoint.core.notation import dump_task
from counterpoint.core.timeline import Span, Timeline, Wait
from counterpoint.core.units import format_bytes, format_ns
from counterpoint.viewer.palette import CAUSES, KINDS, STYLE, kind_of, labels
from counterpoint.viewer.scale import Scale

LEFT, RIGHT = 104, 96
LANES = {"compute": 28, "host": 11, "load": 9, "evict": 9, "send": 9, "receive": 9, "reduce": 9}
_GAP, _DEVICE_GAP, _MEMORY = 2, 16, 44


@dataclass(frozen=True, slots=True)
class _Group:
    """Where one device is drawn: the top of each of its lanes, and of its memory."""

    device: int
    tops: dict[str, float]
    memory: float
    bottom: float


def draw(
    timeline: Timeline,
    title: str = "",
    budgets: Sequence[int] = (),
    window_ns: tuple[int, int] | None = None,
    width: int = 1280,
) -> str:
    """A drawing that needs nothing else: colours follow the reader's light or dark setting, titles show on hover.

    `window_ns` shows a part of the time. Neighbours narrower than a pixel are drawn as one.
    """
    begin, end = window_ns or (0, timeline.makespan_ns)
    scale = Scale(begin, end, LEFT, width - RIGHT)
    spans = [s for s in timeline.spans if s.end_ns > s.start_ns and scale.shows(s.start_ns, s.end_ns)]
    waits = [wait for wait in timeline.waits() if scale.shows(wait.start_ns, wait.end_ns)]
    legend, top = _legend(spans, waits, 36 if title else 8, width)
    groups = _layout(timeline.num_devices, spans, top + 33)
    height = (groups[-1].bottom if groups else top + 33) + 14
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {_n(height)}" width="{width}" '
        f'height="{_n(height)}" role="img"><title>{escape(title or "timeline")}</title>',
        f"<style>{STYLE}</style>",
        *_patterns(),
        f'<text class="title" x="12" y="24">{escape(title)}</text>' if title else "",
        *legend,
        *_rows(groups, scale),
        *_axis(timeline, scale, top, height),
    ]
    lanes = _by_lane(spans)
    for group in groups:
        parts += _device(group, lanes, [wait for wait in waits if wait.device == group.device], scale)
        parts += _memory(timeline, group, budgets[group.device] if budgets else 0, scale)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _layout(num_devices: int, spans: Sequence[Span], top: float) -> list[_Group]:
    """The same lanes for every device: those that any of them uses."""
    used = {span.lane.split()[0] for span in spans}
    groups = []
    for device in range(num_devices):
        tops, y = {}, top
        for name, height in LANES.items():
            if name in used or name == "compute":
                tops[name] = y
                y += height + _GAP
        groups.append(_Group(device, tops, y + 3, y + 3 + _MEMORY))
        top = y + 3 + _MEMORY + _DEVICE_GAP
    return groups


def _by_lane(spans: Sequence[Span]) -> dict[tuple[int, str], list[Span]]:
    found: defaultdict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in spans:
        found[span.device, span.lane.split()[0]].append(span)
    return found


def _patterns() -> Iterator[str]:
    """One hatching per cause of idleness."""
    yield "<defs>"
    for cause in CAUSES:
        yield (
            f'<pattern id="idle-{cause}" width="6" height="6" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate(45)"><line class="hatch idle-{cause}" x1="0" y1="0" x2="0" y2="6"/></pattern>'
        )
    yield "</defs>"


def _legend(spans: Sequence[Span], waits: Sequence[Wait], y: float, width: int) -> tuple[list[str], float]:
    """What the drawing uses and nothing else, in as many lines as it takes; and where the next line would be."""
    kinds = {kind_of(span.task) for span in spans}
    causes = {wait.cause for wait in waits}
    entries = [(f'class="{kind}"', text) for kind, text in KINDS.items() if kind in kinds]
    entries += [(f'fill="url(#idle-{c})"', f"waits for {text}") for c, text in CAUSES.items() if c in causes]
    parts, x = [], 12.0
    for mark, text in entries:
        length = 19 + 6 * len(text) + 14
        if x + length > width:
            x, y = 12.0, y + 17
        parts.append(f'<rect {mark} x="{_n(x)}" y="{_n(y)}" width="14" height="10" rx="2"/>')
        parts.append(f'<text x="{_n(x + 19)}" y="{_n(y + 9)}">{escape(text)}</text>')
        x += length
    return parts, y + 17


def _rows(groups: list[_Group], scale: Scale) -> Iterator[str]:
    for group in groups:
        for name, top in group.tops.items():
            yield _rect("row", LEFT, top, scale.right - LEFT, LANES[name])
        yield _rect("row", LEFT, group.memory, scale.right - LEFT, _MEMORY)


def _axis(timeline: Timeline, scale: Scale, top: float, height: float) -> Iterator[str]:
    bottom = _n(height - 10)
    for time, label in scale.ticks():
        x = _n(scale.x(time))
        yield f'<line class="grid" x1="{x}" x2="{x}" y1="{_n(top + 21)}" y2="{bottom}"/>'
        yield f'<text class="faint middle small" x="{x}" y="{_n(top + 17)}">{label}</text>'
    begin = 0
    for step, end in enumerate(timeline.step_ends_ns):
        if scale.begin_ns < end <= scale.end_ns:
            x = _n(scale.x(end))
            yield f'<line class="step" x1="{x}" x2="{x}" y1="{_n(top + 1)}" y2="{bottom}"/>'
        left, right = scale.x(begin), scale.x(end)
        if right - left > 44:
            yield f'<text class="faint middle small" x="{_n((left + right) / 2)}" y="{_n(top + 5)}">step {step}</text>'
        begin = end


def _device(
    group: _Group, lanes: dict[tuple[int, str], list[Span]], waits: Sequence[Wait], scale: Scale
) -> Iterator[str]:
    computed = lanes.get((group.device, "compute"), ())
    shown = sum(min(s.end_ns, scale.end_ns) - max(s.start_ns, scale.begin_ns) for s in computed)
    busy = 100 * shown // max(scale.end_ns - scale.begin_ns, 1)
    y = group.tops["compute"]
    yield f'<text class="device" x="12" y="{_n(y + 13)}">device {group.device}</text>'
    yield f'<text class="faint small" x="12" y="{_n(y + 25)}">computes {busy} %</text>'
    for wait in waits:
        yield from _idle(wait, y, scale)
    for name, top in group.tops.items():
        if name != "compute":
            text = f'x="{LEFT - 6}" y="{_n(top + LANES[name] - 2)}"'
            yield f'<text class="faint small end" {text}>{name}</text>'
        yield from _lane(lanes.get((group.device, name), []), top, LANES[name], scale)


def _idle(wait: Wait, y: float, scale: Scale) -> Iterator[str]:
    left, right = scale.x(wait.start_ns), scale.x(wait.end_ns)
    if right - left >= 1:
        title = f"idle for {format_ns(wait.end_ns - wait.start_ns)}, waits for {CAUSES[wait.cause]}"
        shape = f'x="{_n(left)}" y="{_n(y)}" width="{_n(right - left)}" height="{LANES["compute"]}"'
        yield f'<rect fill="url(#idle-{wait.cause})" {shape}><title>{title}</title></rect>'


def _lane(spans: list[Span], y: float, height: float, scale: Scale) -> Iterator[str]:
    """Wide spans one by one; runs of narrow ones as one, in the colour of what takes most of its time."""
    narrow: list[Span] = []
    for span in spans:
        left, right = scale.x(span.start_ns), scale.x(span.end_ns)
        if narrow and (right - left >= 1.5 or left - scale.x(narrow[-1].end_ns) > 0.5 or _wide(narrow, scale)):
            yield _merged(narrow, y, height, scale)
            narrow = []
        if right - left < 1.5:
            narrow.append(span)
        else:
            yield from _single(span, left, right, y, height)
    if narrow:
        yield _merged(narrow, y, height, scale)


def _wide(narrow: list[Span], scale: Scale) -> bool:
    return scale.x(narrow[-1].end_ns) - scale.x(narrow[0].start_ns) > 3


def _merged(spans: list[Span], y: float, height: float, scale: Scale) -> str:
    if len(spans) == 1:
        text = _title(spans[0])
    else:
        text = f"{len(spans)} tasks in {format_ns(spans[-1].end_ns - spans[0].start_ns)}, first {_title(spans[0])}"
    times: defaultdict[str, int] = defaultdict(int)
    for span in spans:
        times[kind_of(span.task)] += span.end_ns - span.start_ns
    left, right = scale.x(spans[0].start_ns), scale.x(spans[-1].end_ns)
    return _rect(max(times, key=lambda kind: times[kind]), left, y, max(right - left, 0.6), height, text)


def _single(span: Span, left: float, right: float, y: float, height: float) -> Iterator[str]:
    kind = kind_of(span.task)
    yield _rect(kind, left, y, right - left - (0.7 if right - left > 3 else 0), height, _title(span), 2)
    if height >= 20:
        for text in labels(span.task):
            if 5.6 * len(text) + 2 < right - left:
                middle = f'x="{_n((left + right) / 2)}" y="{_n(y + height / 2 + 3.3)}"'
                yield f'<text class="on on-{kind}" {middle}>{text}</text>'
                break


def _title(span: Span) -> str:
    waited = f", waited for {dump_task(span.blocked_by)}" if span.blocked_by else ""
    time = f"{format_ns(span.end_ns - span.start_ns)} from {format_ns(span.start_ns)} on"
    return f"{dump_task(span.task)}: {time}, step {span.step}{waited}"


def _memory(timeline: Timeline, group: _Group, budget: int, scale: Scale) -> Iterator[str]:
    """The most that is held in each pixel's time, so that no peak is lost."""
    points = [p for p in timeline.memory if p.tier == f"device {group.device}"]
    peak = max((point.held_bytes for point in points), default=0)
    bottom = group.memory + _MEMORY
    full = max(peak, budget, 1) * 1.1
    yield f'<text class="faint small end" x="{LEFT - 6}" y="{_n(bottom - 2)}">memory</text>'
    columns: dict[int, int] = {}
    held = 0
    for point in points:
        if point.time_ns > scale.end_ns:
            break
        column = int(scale.x(point.time_ns))
        columns[column] = max(columns.get(column, held), point.held_bytes)
        columns[column + 1] = held = point.held_bytes
    path = " ".join(f"H{x} V{_n(bottom - _MEMORY * size / full)}" for x, size in columns.items() if x <= scale.right)
    if points:
        yield f'<path class="held" d="M{LEFT} {_n(bottom)} {path} H{_n(scale.right)} V{_n(bottom)} Z"/>'
    x = f'x="{_n(scale.right + 6)}"'
    late = ' class="over"' if budget and peak > budget else ""
    yield f'<text {x} y="{_n(bottom - 16)}"{late}>peak {format_bytes(peak)}</text>'
    if budget:
        y = _n(bottom - _MEMORY * budget / full)
        yield f'<line class="budget" x1="{LEFT}" x2="{_n(scale.right)}" y1="{y}" y2="{y}"/>'
        yield f'<text class="faint" {x} y="{_n(bottom - 3)}">of {format_bytes(budget)}</text>'


def _rect(name: str, x: float, y: float, width: float, height: float, title: str = "", radius: int = 0) -> str:
    shape = f'<rect class="{name}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
    shape += f' rx="{radius}"' if radius else ""
    return f"{shape}><title>{escape(title)}</title></rect>" if title else f"{shape}/>"


def _n(value: float) -> str:
    """Two decimals, without trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
