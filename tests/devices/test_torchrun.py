"""torchrun with a script of the user's own: a lost process and a restart, and processes that never come."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from tests.devices import resuming
from tests.devices.launch import PATIENT, Crew
from tests.devices.problems import Problem, Setting, act, differences, folder_of, staged

ROOT = Path(__file__).parents[2]
PROBLEM = Problem()


def plain_weights() -> dict[str, Tensor]:
    """What the script would train in one process without us."""
    model, optimizer = resuming.build()
    for step in range(resuming.STEPS):
        batch = resuming.batch(step)
        parts = [{name: tensor[k : k + 2] for name, tensor in batch.items()} for k in range(0, 8, resuming.MICROBATCH)]
        for part in parts:
            (resuming.loss(model(part["input"]), part) / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_a_script_goes_on_from_its_checkpoint_after_a_restart(tmp_path: Path) -> None:
    options = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "2", resuming.__file__, str(tmp_path))
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    environment = {**os.environ, **PATIENT, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    assert re.findall(r"from step \d", run.stdout) == ["from step 0", "from step 3"]
    assert differences(load_file(tmp_path / "exported" / "model.safetensors"), plain_weights()) == {}


@pytest.mark.parametrize("present", [0, 1], ids=["the first", "the second"])
def test_a_missing_process_is_waited_for_as_long_as_told(present: int, tmp_path: Path) -> None:
    """Of two processes only one is started."""
    environment = {"RANK": str(present), "WORLD_SIZE": "2", "COUNTERPOINT_JOIN_SECONDS": "2"}
    setting = Setting(staged("flush", PROBLEM))
    begin = time.monotonic()
    with Crew(1, act, PROBLEM, setting, folder_of(tmp_path), [("steps", 1)], environments=[environment]) as crew:
        (found,) = crew.outcomes()
    assert f"device {present} did not find the other 1 devices within 2 s" in found.error
    assert "start all of them, with the same MASTER_ADDR and MASTER_PORT" in found.error
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("seconds", ["soon", "0", "inf"])
def test_patience_is_a_number(seconds: str, tmp_path: Path) -> None:
    environment = {"WORLD_SIZE": "2", "COUNTERPOINT_JOIN_SECONDS": seconds}
    setting = Setting(staged("flush", PROBLEM))
    with Crew(1, act, PROBLEM, setting, folder_of(tmp_path), [("steps", 1)], environments=[environment]) as crew:
        (found,) = crew.outcomes()
    assert f"COUNTERPOINT_JOIN_SECONDS must be a number of seconds from 1 on, not '{seconds}'" in found.error
