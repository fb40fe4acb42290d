"""Drawings, pages, traces and summaries of timelines made by hand."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from counterpoint.core.task import Backward, Evict, Forward, Load, Receive, Send, Task, Update, activation, weight
from counterpoint.core.timeline import MemoryPoint, Span, Timeline
from counterpoint.viewer import draw, page, summarize, trace
from counterpoint.viewer.palette import STYLE, kind_of, labels
from counterpoint.viewer.scale import Scale
from counterpoint.viewer.table import facts

MS = 10**6
NAMESPACE = {"svg": "http://www.w3.org/2000/svg"}


def span(device: int, lane: str, task: Task, start: int, end: int, step: int = 0, after: Task | None = None) -> Span:
    return Span(device, lane, task, start * MS, end * MS, step, after)


LOAD = Load(weight(0, 0), "host")
SEND, RECEIVE = Send(activation(0, 0), 1), Receive(activation(0, 0), 0)
TIMELINE = Timeline(
    2,
    (
        span(0, "load", LOAD, 0, 10),
        span(0, "compute", Forward(0, 0, 0, 0), 10, 30, 0, LOAD),
        span(0, "send 1", SEND, 30, 32),
        span(1, "receive 0", RECEIVE, 30, 32),
        span(1, "compute", Backward(1, 1, 0, 0, 0, True), 32, 80, 0, RECEIVE),
        span(1, "compute", Update(1, 1, 0), 80, 90),
        span(1, "evict", Evict(weight(1, 1), "host"), 90, 100),
        span(0, "compute", Forward(0, 0, 1, 1), 100, 120, 1, Evict(weight(1, 1), "host")),
        span(1, "compute", Backward(1, 1, 1, 1, 1, True), 120, 190, 1),
    ),
    (90 * MS, 190 * MS),
    (
        MemoryPoint("device 0", 0, 5 << 20),
        MemoryPoint("device 0", 10 * MS, 7 << 20),
        MemoryPoint("device 1", 0, 0),
        MemoryPoint("device 1", 32 * MS, 9 << 20),
        MemoryPoint("device 1", 33 * MS, 1 << 20),
        MemoryPoint("host", 0, 64 << 20),
    ),
    (("down", 3 << 20),),
    (("down", 1 << 20), ("up", 0)),
)
BUDGETS = (8 << 20, 8 << 20)
EMPTY = Timeline(1, (), (), (), (), ())


def titles(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iterfind(".//svg:rect/svg:title", NAMESPACE)]


def test_every_task_is_drawn_with_a_title() -> None:
    found = titles(draw(TIMELINE, "two devices", BUDGETS))
    assert "F0.m0@0: 20.0 ms from 10.0 ms on, step 0, waited for L w0@0 host" in found
    assert "idle for 10.0 ms, waits for a load" in found
    assert "idle for 32.0 ms, waits for a peer" in found
    assert sum("step" in title for title in found) == len(TIMELINE.spans)


def test_the_drawing_names_devices_lanes_steps_and_budgets() -> None:
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", draw(TIMELINE, "a < b", BUDGETS))
    for text in ("a &lt; b", "device 1", "load", "send", "step 0", "step 1", "peak 7.00 MiB", "of 8.00 MiB", "140 ms"):
        assert text in texts
    assert "all-reduce" not in texts
    assert "host" not in texts


def test_a_peak_above_its_budget_stands_out() -> None:
    assert draw(TIMELINE, "", BUDGETS).count('class="over"') == 1


def test_peaks_shorter_than_a_pixel_are_drawn() -> None:
    points = tuple(
        MemoryPoint("device 0", time, size) for k in range(500) for time, size in ((k * 2000, 10), (k * 2000 + 1, 0))
    )
    busy = (Span(0, "compute", Forward(0, 0, 0, 0), 0, 10**9, 0),)
    svg = draw(Timeline(1, busy, (10**9,), points, (), ()))
    path = re.search(r'class="held" d="([^"]*)"', svg)
    assert path is not None
    heights = {float(y) for y in re.findall(r"V([\d.]+)", path[1])}
    assert len(heights) == 2


def test_a_window_shows_only_what_is_in_it() -> None:
    found = titles(draw(TIMELINE, window_ns=TIMELINE.steady_window_ns))
    assert any(title.startswith("B1.m1") for title in found)
    assert not any(title.startswith(("L w0", "B1.m0")) for title in found)


def test_narrow_neighbours_are_drawn_as_one() -> None:
    spans = tuple(
        Span(0, "compute", Forward(0, 0, k, 0) if k % 3 else Backward(0, 0, k, 0, 0, False), k * 10, k * 10 + 10, 0)
        for k in range(20_000)
    )
    svg = draw(Timeline(1, spans, (200_000,), (), (), ()))
    assert len(svg) < 200_000
    assert 'class="forward"' in svg
    assert sum(int(count) for count in re.findall(r"<title>(\d+) tasks in ", svg)) == 20_000


def test_microbatches_are_written_where_they_fit() -> None:
    wide = replace(TIMELINE, spans=(span(0, "compute", Forward(0, 3, 4, 0, count=2), 0, 100),))
    assert ">F0-3 m4-5</text>" in draw(wide)
    narrow = replace(TIMELINE, spans=(span(0, "compute", Forward(0, 3, 4, 0), 0, 1), *TIMELINE.spans))
    assert ">4</text>" not in draw(narrow)


@pytest.mark.parametrize("timeline", [EMPTY, replace(EMPTY, num_devices=0), TIMELINE])
def test_everything_is_well_formed(timeline: Timeline) -> None:
    ElementTree.fromstring(draw(timeline, "<&>"))
    json.loads(trace(timeline))
    assert summarize(timeline).startswith("run\n")
    assert page(timeline, "<&>").count("<svg") >= 1


def test_colours_exist_in_both_styles() -> None:
    dark = STYLE.partition("@media")[2]
    for kind in {kind_of(span.task) for span in TIMELINE.spans}:
        assert f"--{kind}: #" in STYLE.partition("@media")[0]
        assert f"--{kind}: #" in dark


def test_labels() -> None:
    assert labels(Forward(0, 0, 3, 0)) == ("F0 m3", "3")
    assert labels(Backward(2, 3, 4, 0, 0, True, count=4)) == ("B2-3 m4-7", "4-7")
    assert labels(LOAD) == ()


def test_axis_has_round_times() -> None:
    ticks = Scale(150, 1_000, 0, 100).ticks(4)
    assert ticks == [(500, "500 ns"), (1000, "1000 ns")]
    assert [label for _, label in Scale(0, 3 * 10**9, 0, 1).ticks(3)] == ["0 s", "1 s", "2 s", "3 s"]


def test_summary() -> None:
    assert summarize(TIMELINE, BUDGETS).splitlines() == [
        "run",
        "  step                                             100 ms",
        "  2 steps in all                                   190 ms",
        "  devices                                               2",
        "  tasks                                                 9",
        "time of one step, per device",
        "  computes                                        45.0 ms   45 %",
        "  waits for room                                  5.00 ms    5 %",
        "  waits for a computation elsewhere               15.0 ms   15 %",
        "  done, waits for the others                      35.0 ms   35 %",
        "moved in one step",
        "  link down                                      1.00 MiB",
        "most held",
        "  device 0                           7.00 MiB of 8.00 MiB   88 %",
        "  device 1                           9.00 MiB of 8.00 MiB  113 %",
        "  host                                           64.0 MiB",
    ]


def test_times_of_a_step_sum_up() -> None:
    shares = [entry.share or 0 for entry in dict(facts(TIMELINE))["time of one step, per device"]]
    assert sum(shares) == 100


def test_the_page_needs_nothing_else() -> None:
    text = page(TIMELINE, "two <devices>", BUDGETS, "a note & more")
    assert "<h1>two &lt;devices&gt;</h1>" in text
    assert "a note &amp; more" in text
    assert text.count("<svg") == 2
    assert not re.search(r'(src|href)="http|@import|url\(http', text)
    assert "prefers-color-scheme: dark" in text


def test_trace_has_processes_threads_counters_and_arrows() -> None:
    events = json.loads(trace(TIMELINE))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[0, 0] == "compute"
    assert set(names.values()) == {"compute", "load", "evict", "send 1", "receive 0"}
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == len(TIMELINE.spans)
    forward = next(e for e in complete if e["name"] == "F0.m0@0")
    assert (forward["ts"], forward["dur"], forward["args"]["waited for"]) == (10_000, 20_000, "L w0@0 host")
    start, finish = (e for e in events if e["ph"] in "sf")
    assert (start["pid"], finish["pid"], start["id"]) == (0, 1, finish["id"])
    assert names[start["pid"], start["tid"]] == "send 1"
    assert names[finish["pid"], finish["tid"]] == "receive 0"
    counters = [e for e in events if e["ph"] == "C"]
    assert {e["name"] for e in counters} == {"memory, device 0", "memory, device 1", "memory, host"}
    assert {e["pid"] for e in counters if "host" in e["name"]} == {2}


def test_a_timeline_from_within_a_run_counts_from_its_own_beginning() -> None:
    spans = (Span(0, "compute", Forward(0, 0, 0, 0), 900 * MS, 910 * MS, 0),)
    timeline = Timeline(1, spans, (910 * MS,), (), (), ())
    assert re.search(r"1 step in all +10\.0 ms", summarize(timeline))
