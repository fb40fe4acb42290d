"""`counterpoint train` and its kin, from the outside: what they print, write and refuse, and with which exit code."""

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from counterpoint.cli import main

if not find_spec("torch") or not find_spec("transformers"):
    pytest.skip("needs torch and transformers", allow_module_level=True)

SMALL = ("--model", "llama-tiny", "--sequence-length", "16", "--minibatch", "2", "--memory", "2GiB", "--no-trace",
         "--learning-rate", "1e-3")  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"{number} times {number} is {number**2}\n" for number in range(400)))
    return str(path)


def losses(root: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (root / "metrics.jsonl").read_text().splitlines()]


def started(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "counterpoint.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def finished(text: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run of six steps with all there is, and what it printed."""
    root = tmp_path_factory.mktemp("runs") / "run"
    options = ("--data", text, "--run", str(root), "--steps", "6", "--save-every", "2", "--evaluate-every", "3",
               "--validation-share", "0.1", "--tensorboard", "--trace")  # fmt: skip
    process = started("train", *SMALL, *options)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    return root, out


def test_a_run_leaves_everything_in_its_folder(finished: tuple[Path, str]) -> None:
    root, _ = finished
    names = ("config.yaml", "plan.json", "forecast.json", "forecast.txt", "metrics.jsonl", "trace.json",
             "timeline.html", "tensorboard", "checkpoints/step-4", "checkpoints/step-6")  # fmt: skip
    assert [name for name in names if not (root / name).exists()] == []
    assert not (root / "checkpoints" / "step-2").exists()
    assert not (root / "scratch").exists()
    assert json.loads((root / "trace.json").read_text())["traceEvents"]
    assert list((root / "tensorboard").iterdir())


def test_a_run_says_what_it_does(finished: tuple[Path, str]) -> None:
    root, out = finished
    for words in (f"run folder  {root}", "samples to train on", "step 1/6  loss ", "(held out ", "tokens/s",
                  " of 2.00 GiB", "loss   ", "(forecast ", "written in all", "waited", "timeline.html"):  # fmt: skip
        assert words in out, words
    assert "\x1b" not in out


def test_the_loss_falls_and_the_memory_holds(finished: tuple[Path, str]) -> None:
    metrics = [json.loads(line) for line in (finished[0] / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert [line["step"] for line in metrics if "evaluation_loss" in line] == [3, 6]
    assert max(line["peak_bytes"] for line in metrics) <= 2 << 30


def test_a_report_repeats_the_summary(finished: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    root, out = finished
    assert main(("report", str(root))) == 0
    assert out.endswith(capsys.readouterr().out)


def test_a_run_that_goes_on_is_the_run_that_never_stopped(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With microbatches of a given size: the planner's choice follows its measurements."""
    parted, whole = tmp_path / "parted", tmp_path / "whole"
    options = (*SMALL, "--data", text, "--microbatch", "1", "--decay", "constant")
    assert main(("train", *options, "--run", str(parted), "--steps", "2")) == 0
    assert main(("train", "--resume", str(parted), "--steps", "4", "--memory", "1900MiB")) == 0
    assert "changed     memory 2GiB -> 1900MiB, steps 2 -> 4" in capsys.readouterr().out
    assert main(("train", *options, "--run", str(whole), "--steps", "4")) == 0
    assert losses(parted) == losses(whole)


def wait_for(process: "subprocess.Popen[str]", words: str) -> None:
    assert process.stdout is not None
    assert any(line.startswith(words) for line in process.stdout), process.communicate()


def test_a_signal_ends_a_run_after_its_step(text: str, tmp_path: Path) -> None:
    process = started("train", *SMALL, "--data", text, "--run", str(tmp_path / "run"), "--steps", "100000")
    wait_for(process, "step 2/")
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "")
    done = len(losses(tmp_path / "run"))
    assert f"stopped by SIGINT after step {done} and saved" in out
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [f"step-{done}"]


def test_a_run_that_is_ended_before_its_first_step_leaves_nothing_behind(text: str, tmp_path: Path) -> None:
    process = started("train", *SMALL, "--data", text, "--run", str(tmp_path / "run"))
    wait_for(process, "next ")
    process.terminate()
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, "")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_goes_on_from_its_last_checkpoint(text: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    options = (*SMALL, "--data", text, "--run", str(root), "--microbatch", "2", "--decay", "constant")
    process = started("train", *options, "--steps", "100000", "--save-every", "2")
    wait_for(process, "step 3/")
    process.kill()
    process.communicate()
    last = max(int(path.name.removeprefix("step-")) for path in (root / "checkpoints").glob("step-*"))
    before = losses(root)[:last]
    assert main(("train", "--resume", str(root), "--steps", str(last + 1))) == 0
    assert losses(root)[:last] == before
    assert len(losses(root)) == last + 1
    assert not (root / "scratch").exists()


def test_a_loss_that_is_not_finite_ends_the_run_and_leaves_the_checkpoint(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "run"
    options = (*SMALL, "--data", text, "--run", str(root), "--steps", "20", "--save-every", "1", "--optimizer", "sgd",
               "--learning-rate", "1e30", "--max-grad-norm", "none")  # fmt: skip
    assert main(("train", *options)) == 2
    err = capsys.readouterr().err
    assert err.startswith("counterpoint: error: ")
    assert err.count("\n") == 1
    last = sorted(path.name for path in (root / "checkpoints").iterdir())[-1]
    assert f"the last checkpoint is {root}/checkpoints/{last}" in err


def test_planning_leaves_nothing_behind(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("plan", *SMALL, "--data", text, "--run", str(tmp_path / "run"))) == 0
    assert "step time" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "gpt5"), "unknown model 'gpt5'"),
        (("--data", "/nowhere"), "no data at /nowhere"),
        (("--steps", "none"), "steps must be a whole number, not 'none'"),
        (("--memory", "lots"), "cannot read 'lots' as a size"),
        (("--memory", "10MiB"), "10.0 MiB"),
        (("--model", "gpt2-bytes", "--sequence-length", "2048"), "takes sequences of up to 1024 tokens, not 2048"),
        (("--vocabulary", "100"), "the tokenizer has 256 tokens, the model's vocabulary 100"),
        (("--resume", "last", "--run", "/nowhere"), "no run and no checkpoint at /nowhere"),
        (("absent.yaml",), "cannot read absent.yaml: No such file or directory"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(
    options: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(("train", *SMALL, *options)) == 2
    err = capsys.readouterr().err
    assert err.startswith("counterpoint: error: ")
    assert err.count("\n") == 1
    assert message in err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "--stesp", "3"), "unknown argument '--stesp' (did you mean --steps?)"),
        (("train", "--step", "3"), "unknown argument '--step' (did you mean --steps?)"),
        (("export", "a"), "the following arguments are required: target"),
        (("trian",), "invalid choice: 'trian'"),
        ((), "the following arguments are required: command"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    err = capsys.readouterr().err
    assert (stopped.value.code, err.count("\n")) == (2, 1)
    assert message in err


def test_models_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("train", "--list")) == 0
    assert "gpt2-medium     355M parameters, 24 blocks x 1024" in capsys.readouterr().out


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("report", str(tmp_path))) == 2
    assert "is not a run folder: it has no config.yaml" in capsys.readouterr().err


def test_the_doctor_looks_at_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(("doctor", "--disk", str(tmp_path))) == 0
    out = capsys.readouterr().out
    for words in ("cores", "GFLOP/s", "GB/s", "transformers", "gpt2-xl", "of state"):
        assert words in out
    assert list(tmp_path.iterdir()) == []
    assert main(("doctor", "--disk", str(tmp_path / "absent"))) == 2


def test_the_other_commands_need_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import counterpoint.cli; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
