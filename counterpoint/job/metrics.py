"""What each step measured -> lines of JSON, and TensorBoard events; and the lines back."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from counterpoint.core.files import from_json, to_json


@dataclass(frozen=True, slots=True)
class Metrics:
    """One step. `waited_ns` is the time the computation stood still, by cause; `resident_bytes` is all of the process.

    `peak_bytes` is the most since training began. `evaluation_loss` is there after the steps that were followed by an
    evaluation, `start_peak_bytes` after the first: the most the process took until then.
    """

    step: int
    loss: float
    learning_rate: float
    tokens: int
    step_ns: int
    resident_bytes: int
    peak_bytes: int
    read_bytes: int
    written_bytes: int
    waited_ns: tuple[tuple[str, int], ...] = ()
    evaluation_loss: float | None = None
    start_peak_bytes: int | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.tokens * 1e9 / max(self.step_ns, 1)


class MetricsLog:
    """The owner of a run's metrics files. A run that goes on from a step drops the lines behind it."""

    def __init__(self, path: Path, tensorboard: Path | None, first_step: int) -> None:
        kept = [line for line in _lines(path) if line["step"] <= first_step]
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(unfinished, path)
        self._file = path.open("a", buffering=1)
        self._writer = _writer(tensorboard, first_step) if tensorboard else None

    def write(self, metrics: Metrics) -> None:
        self._file.write(json.dumps(to_json(metrics)) + "\n")
        if self._writer is None:
            return
        for name in ("loss", "evaluation_loss", "learning_rate", "tokens_per_s", "resident_bytes", "read_bytes",
                     "written_bytes"):  # fmt: skip
            value = getattr(metrics, name)
            if value is not None:
                self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def read_metrics(path: Path) -> tuple[Metrics, ...]:
    return tuple(from_json(Metrics, line, str(path)) for line in _lines(path))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """A last line without an end is what a killed run left of it."""
    if not path.exists():
        return
    for number, line in enumerate(path.read_text().splitlines(keepends=True), 1):
        if not line.endswith("\n"):
            return
        try:
            found = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path} line {number} is not JSON: {error}") from error
        if not isinstance(found, dict) or "step" not in found:
            raise ValueError(f"{path} line {number} is not a step's metrics")
        yield found


def _writer(folder: Path, first_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError("tensorboard: true needs the package tensorboard: pip install tensorboard") from error
    return SummaryWriter(str(folder), purge_step=first_step + 1)
