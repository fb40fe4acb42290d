"""What a person sees: lines in a log, a panel on a terminal, and a word when asked to stop."""

import io
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from counterpoint.job.interruption import Interruption
from counterpoint.job.metrics import Metrics, MetricsLog, read_metrics
from counterpoint.job.progress import Lines, Panel

METRICS = Metrics(
    step=3, loss=2.5, learning_rate=1e-3, tokens=512, step_ns=2 * 10**9, resident_bytes=600 << 20,
    peak_bytes=700 << 20, read_bytes=1 << 30, written_bytes=1 << 29, waited_ns=(("load", 3 * 10**8), ("evict", 10)),
)  # fmt: skip


def test_lines_say_it_all() -> None:
    out = io.StringIO()
    with Lines(10, 1 << 30, 1, out) as lines:
        lines.step(METRICS)
        lines.step(replace(METRICS, step=4, evaluation_loss=2.25, waited_ns=()))
    assert out.getvalue().splitlines() == [
        "step 3/10  loss 2.5000  256 tokens/s  memory 600 MiB of 1.00 GiB  read 1.00 GiB, wrote 512 MiB  "
        "15 % waiting for loads",
        "step 4/10  loss 2.5000 (held out 2.2500)  256 tokens/s  memory 600 MiB of 1.00 GiB  "
        "read 1.00 GiB, wrote 512 MiB  no waiting",
    ]


def test_lines_come_as_often_as_asked_for_and_at_the_end() -> None:
    out = io.StringIO()
    with Lines(10, 1 << 30, 4, out) as lines:
        for step in range(1, 11):
            lines.step(replace(METRICS, step=step, evaluation_loss=1.0 if step == 3 else None))
    assert [line.split("/")[0] for line in out.getvalue().splitlines()] == ["step 3", "step 4", "step 8", "step 10"]


@pytest.mark.parametrize("width", [80, 120])
def test_the_panel_shows_everything_within_a_terminal(width: int) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=width, color_system=None)
    with Panel(10, 0, 1 << 30, console) as panel:
        panel.note("a note")
        panel.step(replace(METRICS, step=2, loss=3.5))
        panel.step(replace(METRICS, evaluation_loss=2.25))
    shown = out.getvalue()
    for words in ("a note", "3/10", "14 s left", "2.5000, held out 2.2500", "600 MiB of 1.00 GiB", "256 tokens/s",
                  "2.00 s per step", "1.00 GiB read, 512 MiB written", "15 % waiting for loads", "█▁"):  # fmt: skip
        assert words in shown, words
    assert "…" not in shown


def test_the_first_signal_asks_and_the_second_ends() -> None:
    said: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    with Interruption(said.append) as interruption:
        assert not interruption.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert (interruption.requested, interruption.number) == (True, signal.SIGTERM)
        assert said == ["SIGTERM: finishing this step, then saving; once more to stop at once"]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_metrics_are_read_as_they_were_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", None, 0)
    written = (METRICS, replace(METRICS, step=4, evaluation_loss=2.25))
    for metrics in written:
        log.write(metrics)
    log.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == written


def test_a_run_that_goes_back_forgets_what_came_after(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for first, steps in ((0, (1, 2, 3, 4)), (2, (3,))):
        log = MetricsLog(path, None, first)
        for step in steps:
            log.write(replace(METRICS, step=step, loss=float(first)))
        log.close()
    assert [(metrics.step, metrics.loss) for metrics in read_metrics(path)] == [(1, 0.0), (2, 0.0), (3, 2.0)]


def test_a_torn_last_line_is_not_read_and_other_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, None, 0)
    log.write(METRICS)
    log.close()
    whole = path.read_text()
    path.write_text(whole + '{"step": 4, "lo')
    assert read_metrics(path) == (METRICS,)
    path.write_text("nonsense\n" + whole)
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        read_metrics(path)
    path.write_text("[]\n")
    with pytest.raises(ValueError, match="line 1 is not a step's metrics"):
        read_metrics(path)
