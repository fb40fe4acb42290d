"""Steps as they are measured -> what a person sees: one live panel on a terminal, else plain lines."""

import math
import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from counterpoint.core.units import format_bytes, format_ns
from counterpoint.job.metrics import Metrics
from counterpoint.planner.forecast_text import CAUSE_TEXTS

_BLOCKS = "▁▂▃▄▅▆▇█"
_CAUSE_TEXTS = CAUSE_TEXTS | {"start": "between computations"}
_WIDTH = 32
_HISTORY = _WIDTH


class Progress(Protocol):
    """A context: whatever is shown is put away at its end."""

    def __enter__(self) -> "Progress": ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def step(self, metrics: Metrics) -> None: ...
    def note(self, text: str) -> None: ...


def choose_progress(steps: int, done: int, budget_bytes: int, log_every: int, quiet: bool) -> Progress:
    """A panel where there is a person to look at it."""
    if quiet or not sys.stdout.isatty():
        return Lines(steps, budget_bytes, log_every)
    return Panel(steps, done, budget_bytes)


class Lines:
    """One line per `log_every` steps, and for the last."""

    def __init__(self, steps: int, budget_bytes: int, log_every: int, out: TextIO | None = None) -> None:
        self._steps, self._budget_bytes, self._log_every = steps, budget_bytes, log_every
        self._out = out

    def __enter__(self) -> "Lines":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def step(self, metrics: Metrics) -> None:
        evaluated = metrics.evaluation_loss is not None
        if metrics.step % self._log_every == 0 or metrics.step == self._steps or evaluated:
            self.note(line(metrics, self._steps, self._budget_bytes))

    def note(self, text: str) -> None:
        print(text, file=self._out or sys.stdout, flush=True)


def line(metrics: Metrics, steps: int, budget_bytes: int) -> str:
    held_out = "" if metrics.evaluation_loss is None else f" (held out {metrics.evaluation_loss:.4f})"
    parts = (
        f"step {metrics.step}/{steps}",
        f"loss {metrics.loss:.4f}{held_out}",
        f"{metrics.tokens_per_s:,.0f} tokens/s",
        f"memory {format_bytes(metrics.resident_bytes)} of {format_bytes(budget_bytes)}",
        f"read {format_bytes(metrics.read_bytes)}, wrote {format_bytes(metrics.written_bytes)}",
        waiting(metrics.waited_ns, metrics.step_ns),
    )
    return "  ".join(parts)


def waiting(waited_ns: Iterable[tuple[str, int]], time_ns: int) -> str:
    """What the computation stood still for, the longest wait first.

    >>> waiting((("evict", 5), ("load", 125)), 1000)
    '12 % waiting for loads'
    """
    shares = [(100 * waited // max(time_ns, 1), cause) for cause, waited in waited_ns]
    worst = sorted((share, cause) for share, cause in shares if share)[::-1]
    return ", ".join(f"{share} % {_CAUSE_TEXTS.get(cause, cause)}" for share, cause in worst) or "no waiting"


class Panel:
    """Redrawn in place four times a second, so that a long step is seen to be alive."""

    def __init__(self, steps: int, done: int, budget_bytes: int, console: Console | None = None) -> None:
        self._steps, self._done, self._budget_bytes = steps, done, budget_bytes
        self._history: list[Metrics] = []
        self._held_out: float | None = None
        self._since = time.monotonic()
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> "Panel":
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def step(self, metrics: Metrics) -> None:
        self._history = [*self._history[-_HISTORY + 1 :], metrics]
        self._held_out = metrics.evaluation_loss if metrics.evaluation_loss is not None else self._held_out
        self._done, self._since = metrics.step, time.monotonic()

    def note(self, text: str) -> None:
        self._live.console.print(Text(text))

    def _render(self) -> Table:
        grid = Table.grid(padding=(0, 2), expand=False)
        grid.add_column(style="dim", no_wrap=True, min_width=7)
        grid.add_column(no_wrap=True, min_width=_WIDTH)
        grid.add_column(no_wrap=True)
        grid.add_row("step", ProgressBar(self._steps, self._done, width=_WIDTH), self._position())
        if self._history:
            self._measured(grid, self._history[-1])
        return grid

    def _position(self) -> str:
        position = f"{self._done}/{self._steps}"
        if self._done == self._steps:
            return position
        under_way_ns = int((time.monotonic() - self._since) * 1e9)
        if not self._history:
            return f"{position}, first step for {under_way_ns // 10**9} s"
        usual_ns = sum(metrics.step_ns for metrics in self._history) // len(self._history)
        left_ns = max(0, usual_ns * (self._steps - self._done) - under_way_ns)
        return f"{position}, {-(-left_ns // 10**9)} s left"

    def _measured(self, grid: Table, last: Metrics) -> None:
        memory = ProgressBar(self._budget_bytes, min(last.resident_bytes, self._budget_bytes), width=_WIDTH)
        budget = f"{format_bytes(last.resident_bytes)} of {format_bytes(self._budget_bytes)}"
        held_out = "" if self._held_out is None else f", held out {self._held_out:.4f}"
        losses = [metrics.loss for metrics in self._history if not math.isnan(metrics.loss)]
        grid.add_row("loss", sparkline(losses), f"[bold]{last.loss:.4f}[/]{held_out}")
        grid.add_row("memory", memory, budget)
        grid.add_row("speed", f"{last.tokens_per_s:,.0f} tokens/s", f"{format_ns(last.step_ns)} per step")
        moved = f"{format_bytes(last.read_bytes)} read, {format_bytes(last.written_bytes)} written"
        grid.add_row("moved", moved, waiting(last.waited_ns, last.step_ns))


def sparkline(values: Sequence[float]) -> str:
    """The course of some numbers in one line.

    >>> sparkline([1.0, 2.0, 3.0])
    '▁▅█'
    """
    low, high = min(values), max(values)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((value - low) * scale)] for value in values)
