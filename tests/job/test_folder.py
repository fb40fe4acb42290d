"""Run folders: where a run goes, and which checkpoint it goes on from."""

from pathlib import Path

import pytest

from counterpoint.job.config import Config
from counterpoint.job.flags import chosen_config
from counterpoint.job.folder import RunFolder, open_folder


def with_checkpoints(root: Path, *steps: int) -> RunFolder:
    folder = RunFolder(root)
    for step in steps:
        folder.checkpoint(step).mkdir(parents=True)
    (root / "checkpoints" / "step-99.unfinished").mkdir(exist_ok=True)
    folder.config.write_text("model: tiny\nsteps: 7\n")
    return folder


def test_new_runs_get_new_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_folder(Config(model="gpt2"))[0].root == Path("runs/gpt2-1")
    Path("runs/gpt2-1").mkdir(parents=True)
    assert open_folder(Config(model="gpt2"))[0].root == Path("runs/gpt2-2")
    assert open_folder(Config(model="mine:build it"))[0].root == Path("runs/mine-build-it-1")


def test_a_run_is_not_run_over(tmp_path: Path) -> None:
    with_checkpoints(tmp_path, 3)
    with pytest.raises(ValueError, match="already holds a run: go on with resume: last"):
        open_folder(Config(run=str(tmp_path)))


def test_what_is_gone_on_from(tmp_path: Path) -> None:
    folder = with_checkpoints(tmp_path / "a", 3, 20, 100)
    at = str(tmp_path / "a")
    assert open_folder(Config(run=at, resume="last")) == (folder, folder.checkpoint(100))
    assert open_folder(Config(resume=at)) == (folder, folder.checkpoint(100))
    assert open_folder(Config(resume=str(folder.checkpoint(20)))) == (folder, folder.checkpoint(20))
    other = RunFolder(tmp_path / "b")
    assert open_folder(Config(resume=at, run=str(other.root))) == (other, folder.checkpoint(100))


def test_nothing_to_go_on_from(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no run and no checkpoint at"):
        open_folder(Config(run=str(tmp_path / "absent"), resume="last"))
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="has no checkpoint to go on from"):
        open_folder(Config(run=str(tmp_path), resume="last"))
    with pytest.raises(ValueError, match="lies in no run folder"):
        open_folder(Config(resume=str(tmp_path / "loose")))


def test_only_the_newest_are_kept_and_abandoned_ones_go(tmp_path: Path) -> None:
    folder = with_checkpoints(tmp_path, 5, 10, 15, 20)
    folder.remove_other_checkpoints(15, keep=2)
    assert [step for step, _ in folder.checkpoints()] == [10, 15]


def test_a_run_that_goes_on_takes_its_own_config(tmp_path: Path) -> None:
    folder = with_checkpoints(tmp_path / "a", 3)
    at = str(tmp_path / "a")
    expected = Config(model="tiny", steps=9, run=at, resume=str(folder.checkpoint(3).resolve()))
    assert chosen_config(None, {"resume": str(folder.checkpoint(3).resolve()), "steps": "9"}) == expected
    assert chosen_config(None, {"resume": "last", "run": at}).model == "tiny"
    assert chosen_config(None, {"resume": at, "run": str(tmp_path / "b")}).run == str(tmp_path / "b")
    assert chosen_config(None, {"resume": str(tmp_path / "c"), "run": at}).model == "gpt2"
