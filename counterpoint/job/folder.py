"""A run's folder -> the places of all it holds, and which of its checkpoints there are."""

import re
import shutil
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from counterpoint.job.config import LAST, Config

_CHECKPOINT = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True)
class RunFolder:
    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def forecast(self) -> Path:
        return self.root / "forecast.json"

    @property
    def forecast_text(self) -> Path:
        return self.root / "forecast.txt"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def trace(self) -> Path:
        return self.root / "trace.json"

    @property
    def timeline(self) -> Path:
        return self.root / "timeline.html"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def scratch(self) -> Path:
        return self.root / "scratch"

    def checkpoint(self, step: int) -> Path:
        return self.root / "checkpoints" / f"step-{step}"

    def checkpoints(self) -> tuple[tuple[int, Path], ...]:
        """Steps and folders, oldest first."""
        folder = self.root / "checkpoints"
        paths = folder.iterdir() if folder.is_dir() else ()
        matches = ((_CHECKPOINT.fullmatch(path.name), path) for path in paths)
        return tuple(sorted((int(match.group(1)), path) for match, path in matches if match))

    def last_checkpoint(self) -> Path | None:
        found = self.checkpoints()
        return found[-1][1] if found else None

    def remove_other_checkpoints(self, step: int, keep: int) -> None:
        """All but the newest `keep` up to `step`; later ones belong to a run that was gone back on."""
        past = [path for at, path in self.checkpoints() if at <= step]
        for _, path in self.checkpoints():
            if path not in past[-keep:]:
                shutil.rmtree(path)


def open_folder(config: Config) -> tuple[RunFolder, Path | None]:
    """The folder to run in, and the checkpoint to go on from."""
    if config.resume is None:
        folder = RunFolder(Path(config.run)) if config.run else _new_folder(config.model)
        if folder.metrics.exists() or folder.checkpoints():
            raise ValueError(f"{folder.root} already holds a run: go on with resume: last, or give another run folder")
        return folder, None
    if config.resume == LAST:
        assert config.run is not None
        return RunFolder(Path(config.run)), newest_checkpoint(Path(config.run))
    place = Path(config.resume)
    own = run_of(place)
    root = Path(config.run) if config.run else own
    if root is None:
        raise ValueError(f"{place} lies in no run folder: give the run folder to go on in")
    return RunFolder(root), newest_checkpoint(place)


def newest_checkpoint(place: Path) -> Path:
    """A checkpoint as it is given, or the newest of a run folder."""
    if not place.is_dir():
        raise ValueError(f"no run and no checkpoint at {place}")
    if _CHECKPOINT.fullmatch(place.name) or not (place / "checkpoints").is_dir():
        return place
    found = RunFolder(place).last_checkpoint()
    if found is None:
        raise ValueError(f"{place} has no checkpoint to go on from")
    return found


def run_of(place: Path) -> Path | None:
    """The run folder that a checkpoint or the folder itself belongs to."""
    if (place / "config.yaml").is_file():
        return place
    above = place.resolve().parents
    return above[1] if len(above) > 1 and above[0].name == "checkpoints" else None


def _new_folder(model: str) -> RunFolder:
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(model).name or model)
    return next(RunFolder(path) for number in count(1) if not (path := Path("runs") / f"{name}-{number}").exists())
