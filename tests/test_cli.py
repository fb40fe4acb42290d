"""The command line: what it prints, writes and refuses, and with which exit code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from counterpoint.cli import main
from counterpoint.core import files
from counterpoint.core.plan import SCHEDULES
from counterpoint.core.text import parse
from counterpoint.planner import catalog

SMALL = ("simulate", "--model", "tiny", "--devices", "2", "--minibatch", "16", "--microbatch", "2")


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("more", [(), ("--memory", "6MiB", "--microbatch", "1", "--pack", "1"), ("--clip",)])
def test_every_schedule_is_forecast(schedule: str, more: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(*SMALL, "--schedule", schedule, *more, capsys=capsys)
    assert (code, err) == (0, "")
    for words in ("training state", "step time", "tokens/s", "computing", "moved in one step", "peak memory"):
        assert words in out
    assert max(map(len, out.splitlines())) <= 110


@pytest.mark.parametrize("residency", ["planned", "lru", "none"])
@pytest.mark.parametrize("activations", ["recompute", "keep", "evict"])
def test_policies(residency: str, activations: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--schedule", "gpipe", "--residency", residency, "--activations", activations, "--json")
    code, out, _ = run(*SMALL, *options, capsys=capsys)
    assert code == 0
    plan = json.loads(out)["plan"]
    assert plan["activations"] == [activations] * len(plan["backward_packs"])
    assert plan.get("residency", "planned") == residency


def test_json_numbers_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(*SMALL, "--json", "--schedule", "flush", capsys=capsys)
    found = json.loads(out)
    shares = [found["useful_permille"], found["repeated_permille"], found["updating_permille"]]
    assert sum(shares) + sum(permille for _, permille in found["idle_permille"]) == pytest.approx(1000, abs=15)
    assert found["step_ns"] > 0
    assert all(tier["peak_bytes"] <= tier["capacity_bytes"] for tier in found["tiers"])


def test_views_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"--svg": "a.svg", "--html": "a.html", "--trace": "a.json", "--text": "a.txt"}
    options = [part for option, name in names.items() for part in (option, str(tmp_path / name))]
    code, out, _ = run(*SMALL, "--grid", "--schedule", "gpipe", *options, capsys=capsys)
    assert code == 0
    assert "0 | F0  F1" in out
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert "<html" in (tmp_path / "a.html").read_text()
    assert json.loads((tmp_path / "a.json").read_text())
    assert len(parse((tmp_path / "a.txt").read_text()).devices) == 2


def test_files_stand_in_for_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = catalog.machine("4090", 2)
    files.save(machine, tmp_path / "machine.json")
    files.save(catalog.profile("tiny", machine), tmp_path / "profile.json")
    named = ("--model", str(tmp_path / "profile.json"), "--machine", str(tmp_path / "machine.json"))
    code, out, _ = run("simulate", *named, "--minibatch", "8", capsys=capsys)
    assert code == 0
    assert "2 x 4090" in out


def test_the_list_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("simulate", "--list", capsys=capsys)
    assert code == 0
    for name in ("gpt2-xl-1080ti", "llama-8b", "v100-100gbit", "laptop", "harmony_pp", *SCHEDULES):
        assert name in out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--model", "gpt2xl"), "did you mean gpt2-xl?"),
        (("--machine", "4080"), "did you mean 4090?"),
        (("--schedule", "1f1b"), "unknown schedule '1f1b'"),
        (("--schedule", "gipe"), "did you mean gpipe?"),
        (("--model", "missing.json"), "cannot read missing.json"),
        (("--memory", "64KiB"), "smallest budget that fits"),
        (("--minibatch", "7"), "does not divide into microbatches"),
        (("--schedule", "flush", "--devices", "16", "--machine", "v100"), "16 stages for 10 layers"),
        (("--schedule", "2bw", "--devices", "8", "--minibatch", "4", "--microbatch", "1"), "use flush"),
        (("--schedule", "harmony_pp", "--replicas", "2"), "harmony_pp has no replicas"),
        (
            ("--schedule", "harmony_pp", "--servers", "2", "--network", "1GB"),
            "harmony_pp needs devices that share a home",
        ),
        (("--svg", "/nowhere/a.svg"), "/nowhere/a.svg: No such file or directory"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    options: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(*SMALL, *options, capsys=capsys)
    assert code == 2
    assert err.startswith("counterpoint: error: ")
    assert err.count("\n") == 1
    assert text in err


@pytest.mark.parametrize("options", [("--devices", "0"), ("--minibatch", "-3"), ("--memory", "lots"), ("--nonsense",)])
def test_bad_arguments_are_explained(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main((*SMALL, *options))
    assert stopped.value.code == 2
    assert "error" in capsys.readouterr().err


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("counterpoint.planner.catalog.machine", interrupt)
    assert main(SMALL) == 130


def test_a_closed_pipe_is_quiet() -> None:
    command = [sys.executable, "-m", "counterpoint.cli", "simulate", "--list"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert done.stderr == b""
    assert done.returncode == 141


def test_forecasting_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from counterpoint.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, *SMALL], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
