"""A run's folder -> what it did, set beside what was forecast."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from counterpoint.core import files
from counterpoint.core.units import format_bytes, format_ns
from counterpoint.job.config import Config
from counterpoint.job.config_file import read_config
from counterpoint.job.expected import Expected
from counterpoint.job.folder import RunFolder
from counterpoint.job.metrics import Metrics, read_metrics
from counterpoint.job.progress import sparkline, waiting

_CURVE = 48


def report(root: Path) -> str:
    """The same words at the end of a run and from `counterpoint report`."""
    folder = RunFolder(root)
    if not folder.config.is_file():
        raise ValueError(f"{root} is not a run folder: it has no {folder.config.name}")
    config = read_config(folder.config, {})
    metrics = read_metrics(folder.metrics)
    expected = files.load(Expected, folder.forecast) if folder.forecast.exists() else None
    done = metrics[-1].step if metrics else 0
    rows = [("run", f"{config.model}, {done} of {config.steps} steps")]
    if metrics:
        rows += [*_learned(metrics), *_measured(metrics, expected)]
    rows += _places(folder, config)
    return "\n".join(f"{name:<12}{text}".rstrip() for name, text in rows)


def _learned(metrics: Sequence[Metrics]) -> Iterator[tuple[str, str]]:
    losses = [m.loss for m in metrics if not math.isnan(m.loss)] or [math.nan]
    yield "loss", f"{losses[0]:.4f} -> {losses[-1]:.4f}, lowest {min(losses):.4f}   {sparkline(_thinned(losses))}"
    held_out = [m.evaluation_loss for m in metrics if m.evaluation_loss is not None]
    if held_out:
        yield "held out", f"{held_out[0]:.4f} -> {held_out[-1]:.4f}, lowest {min(held_out):.4f}"


def _thinned(values: Sequence[float]) -> Sequence[float]:
    if len(values) <= _CURVE:
        return values
    return [values[i * (len(values) - 1) // (_CURVE - 1)] for i in range(_CURVE)]


def _measured(metrics: Sequence[Metrics], expected: Expected | None) -> Iterator[tuple[str, str]]:
    """Medians: the first steps and those beside a checkpoint are not like the others."""
    step_ns, read, written = (
        round(median(getattr(m, name) for m in metrics)) for name in ("step_ns", "read_bytes", "written_bytes")
    )
    peak = max(m.peak_bytes for m in metrics)
    started = max((m.start_peak_bytes or 0 for m in metrics), default=0)
    start = f", {format_bytes(started)} while starting" if started else ""
    total = sum(m.written_bytes for m in metrics)
    speed = f"{metrics[-1].tokens * 1e9 / max(step_ns, 1):,.0f} tokens/s, {format_ns(step_ns)} per step"
    moved = f"{format_bytes(read)} read and {format_bytes(written)} written per step"
    if expected is not None:
        budget = format_bytes(expected.budget_bytes)
        yield (
            "state",
            f"{format_bytes(expected.state_bytes)}, {expected.state_bytes / expected.budget_bytes:.2g} x the budget",
        )
        yield "memory", f"peak {format_bytes(peak)} of {budget}{_forecast(format_bytes(expected.peak_bytes))}{start}"
        yield "speed", f"{speed}{_forecast(format_ns(expected.step_ns))}"
        sizes = f"{format_bytes(expected.read_bytes)} and {format_bytes(expected.written_bytes)}"
        yield "moved", f"{moved}{_forecast(sizes)}"
    else:
        yield from (("memory", f"peak {format_bytes(peak)}{start}"), ("speed", speed), ("moved", moved))
    yield "", f"{format_bytes(total)} written in all"
    yield "waited", waiting(_waits(metrics), sum(m.step_ns for m in metrics))


def _forecast(text: str) -> str:
    return f" (forecast {text})"


def _waits(metrics: Sequence[Metrics]) -> tuple[tuple[str, int], ...]:
    causes = dict.fromkeys(cause for m in metrics for cause, _ in m.waited_ns)
    return tuple((cause, sum(dict(m.waited_ns).get(cause, 0) for m in metrics)) for cause in causes)


def _places(folder: RunFolder, config: Config) -> Iterator[tuple[str, str]]:
    checkpoint = folder.last_checkpoint()
    if checkpoint is not None:
        yield "checkpoint", str(checkpoint)
    if folder.timeline.exists():
        yield "timeline", f"{folder.timeline} (open it in a browser)"
    if folder.trace.exists():
        yield "trace", f"{folder.trace} (for ui.perfetto.dev)"
    yield "metrics", str(folder.metrics)
