"""`counterpoint train --devices`: a whole run, and one that loses a process and goes on from its last checkpoint."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.devices.launch import PATIENT

if not find_spec("transformers"):
    pytest.skip("needs transformers", allow_module_level=True)

OPTIONS = (
    "--model", "tiny", "--sequence-length", "16", "--minibatch", "4", "--microbatch", "1", "--memory", "2GiB",
    "--quiet", "--no-trace", "--devices", "2", "--learning-rate", "1e-3",
)  # fmt: skip
ROOT = Path(__file__).parents[2]


def command(run: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "counterpoint.cli", "train", "--run", str(run), *OPTIONS, *options]


def environment() -> dict[str, str]:
    return {**os.environ, **PATIENT, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def workers(parent: int) -> list[int]:
    """Processes of the run below its launcher, the newest last."""
    tasks = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in tasks if b"counterpoint.cli" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_run_on_two_devices_and_its_resumption(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = subprocess.run(
        command(run, "--schedule", "flush", "--steps", "3"), env=environment(), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert first.returncode == 0, first.stderr
    assert first.stdout.count("step 3/3") == 1, "only the first process speaks"
    assert not (run / "scratch").exists()
    more = ("--schedule", "harmony_pp", "--steps", "4", "--resume", "last")
    second = subprocess.run(
        command(run, *more), env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert second.returncode == 0, second.stderr
    assert len(losses(run)) == 4


def test_a_lost_process_costs_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    """It is lost among the first steps, which are by flush."""
    run = tmp_path / "run"
    trained = ("--schedule", "2bw", "--steps", "40", "--flush-steps", "30", "--error-feedback", "0.5")
    options = (*trained, "--save-every", "4", "--restarts", "1")
    with subprocess.Popen(
        command(run, *options), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            end = time.monotonic() + 200
            while not list(run.glob("checkpoints/step-*")):
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < end
                time.sleep(0.05)
            os.kill(workers(process.pid)[-1], signal.SIGKILL)
            out, err = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0, err
    assert "goes on     from" in out
    assert len(losses(run)) == 40
    whole = tmp_path / "whole"
    subprocess.run(command(whole, *trained), env=environment(), capture_output=True, text=True, timeout=300, check=True)
    assert losses(run)[-1] == losses(whole)[-1]
    assert json.loads((whole / "plan.json").read_text())["flush_steps"] == 30
    assert "2bw after 30 steps by flush" in (whole / "forecast.txt").read_text()
