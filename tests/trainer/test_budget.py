"""The budget holds for the whole process: while it starts, trains, evaluates, saves, loads and exports."""

import json
import subprocess
import sys
from pathlib import Path

RUN = """
import json, sys, torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from trainer.test_faults import Wide, smallest_memory, wide_batch, wide_trainer
from counterpoint import BudgetError
from counterpoint.core.units import parse_bytes
from counterpoint.runtime.memory_process import peak_resident_bytes, reset_peak_resident
from pathlib import Path
folder = Path(sys.argv[2])
named = smallest_memory(folder / "disk", depth=12)
peaks = {}

def measure(name):
    peaks[name] = peak_resident_bytes()
    reset_peak_resident()

reset_peak_resident()
with wide_trainer(folder / "disk", named, depth=12) as trained:
    measure("start")
    for name, action in (
        ("step", lambda: trained.step(wide_batch())), ("evaluate", lambda: trained.evaluate(wide_batch())),
        ("save", lambda: trained.save(folder / "checkpoint")), ("load", lambda: trained.load(folder / "checkpoint")),
        ("export", lambda: trained.export(folder / "model")),
    ):
        action()
        measure(name)
    state = trained.forecast.training_bytes
print(json.dumps({"memory": parse_bytes(named), "state": state, "peaks": peaks}))
"""


def test_the_process_keeps_to_the_smallest_budget_in_all_it_does(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", RUN, str(Path(__file__).parents[1]), str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    over = {name: peak for name, peak in found["peaks"].items() if peak > found["memory"]}
    assert over == {}, found
    assert found["state"] > 400 << 20, found  # what is trained would not have fitted beside the process
