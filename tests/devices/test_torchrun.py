"""torchrun with a script of the user's own: a lost process and a restart, and processes that never come."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.devices.launch import Crew
from tests.devices.problems import Problem, Setting, act, differences, folder_of, staged

ROOT = Path(__file__).parents[2]
PROBLEM = Problem()


def torchrun(folder: Path, kills: str, *options: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    script = str(Path(__file__).parent / "resuming.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options, script]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, str(folder), kills], env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def test_a_script_goes_on_from_its_checkpoint_after_a_restart(tmp_path: Path) -> None:
    broken = torchrun(tmp_path / "broken", "kills", "--max-restarts", "2")
    assert broken.returncode == 0, broken.stderr
    assert re.findall(r"from step \d", broken.stdout) == ["from step 0", "from step 3"]
    whole = torchrun(tmp_path / "whole", "lives")
    assert whole.returncode == 0, whole.stderr
    exported = [load_file(tmp_path / name / "exported" / "model.safetensors") for name in ("broken", "whole")]
    assert differences(*exported) == {}


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
