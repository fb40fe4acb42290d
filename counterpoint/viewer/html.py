"""Timeline -> one HTML page that needs nothing else: the summary, one step close up, and the whole run."""

from collections.abc import Iterator, Sequence
from html import escape

from counterpoint.core.timeline import Timeline
from counterpoint.viewer.svg import draw
from counterpoint.viewer.table import Entry, facts

_STYLE = """\
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1c2733; --faint: #6b7885; --line: #e4e9ee;
  --bar: #cfe0f5; }
@media (prefers-color-scheme: dark) { :root { --ground: #12181f; --ink: #e3e9ef; --faint: #8f9ba7; --line: #29323c;
  --bar: #2b4460; } }
body { margin: 24px auto; max-width: 1400px; padding: 0 16px; background: var(--ground); color: var(--ink);
  font: 14px/1.45 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 22px; margin: 0 0 4px; } h2 { font-size: 15px; margin: 28px 0 8px; }
p { margin: 0 0 16px; color: var(--faint); max-width: 80ch; }
.facts { display: flex; flex-wrap: wrap; gap: 12px 36px; align-items: start; }
table { border-collapse: collapse; }
caption { text-align: left; white-space: nowrap; color: var(--faint); padding: 0 0 4px; }
td { padding: 3px 10px 3px 0; border-top: 1px solid var(--line); white-space: nowrap; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
td.share { min-width: 110px; padding-right: 0;
  background: linear-gradient(var(--bar) 0 0) 0 50% / var(--share) 70% no-repeat; }
.drawing { overflow-x: auto; } .drawing svg { max-width: 100%; height: auto; }
@media (max-width: 900px) { .drawing svg { max-width: none; } }
"""


def page(
    timeline: Timeline, title: str, budgets: Sequence[int] = (), notes: str = "", forecast: Timeline | None = None
) -> str:
    """`notes` is a sentence or two below the title, say which plan on which machine.

    With the `forecast` of a measured run, a step of it stands below the measured one, to the same scale.
    """
    return "\n".join(_page(timeline, title, budgets, notes, forecast)) + "\n"


def _page(
    timeline: Timeline, title: str, budgets: Sequence[int], notes: str, forecast: Timeline | None
) -> Iterator[str]:
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>"
    yield f"<h1>{escape(title)}</h1>"
    if notes:
        yield f"<p>{escape(notes)}</p>"
    yield '<div class="facts">'
    for heading, entries in facts(timeline, budgets):
        yield from _table(heading, entries)
    yield "</div>"
    if len(timeline.step_ends_ns) > 1:
        shown = [timeline] if forecast is None else [timeline, forecast]
        length = max(end - begin for begin, end in (each.steady_window_ns for each in shown))
        for heading, each in zip(("One step close up", "The same step as it was forecast"), shown, strict=False):
            begin = each.steady_window_ns[0]
            yield f"<h2>{heading}</h2>"
            yield f'<div class="drawing">{draw(each, "", budgets, (begin, begin + length))}</div>'
    yield "<h2>The whole run</h2>"
    yield f'<div class="drawing">{draw(timeline, "", budgets)}</div>'
    yield "<p>Point at anything to see what it is, how long it took and what it waited for.</p>"
    yield "</body>\n</html>"


def _table(heading: str, entries: tuple[Entry, ...]) -> Iterator[str]:
    yield f"<table><caption>{escape(heading)}</caption>"
    shared = any(entry.share is not None for entry in entries)
    for entry in entries:
        row = f'<tr><td>{escape(entry.name)}</td><td class="number">{escape(entry.text)}</td>'
        if entry.share is not None:
            row += f'<td class="share" style="--share: {min(entry.share, 100)}%">{entry.share} %</td>'
        elif shared:
            row += "<td></td>"
        yield f"{row}</tr>"
    yield "</table>"
