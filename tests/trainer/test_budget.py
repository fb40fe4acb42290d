"""The budget holds for the whole process: while it starts, trains, evaluates, saves, loads and exports."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


FORECAST = """
import json, sys, torch
from transformers import GPT2Config, GPT2LMHeadModel
from counterpoint import Trainer
from counterpoint.runtime.memory_process import reset_peak_resident
torch.set_num_threads(1)
config = GPT2Config(
    vocab_size=20000, n_layer=6, n_embd=512, n_head=8, n_positions=128, use_cache=False,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)
with torch.device("meta"):
    model = GPT2LMHeadModel(config)
tokens = torch.randint(20000, (8, 128))
batch = {"input_ids": tokens, "labels": tokens}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
options = {"memory": sys.argv[1], "disk": sys.argv[2], "microbatch": 2}
with Trainer(model, optimizer, example=batch, **options) as trainer:
    reset_peak_resident()
    for _ in range(5):
        trainer.step(batch)
    found = {"forecast": trainer.peak_bytes, "peak": trainer.statistics().peak_bytes, "plan": trainer.describe()}
print(json.dumps(found))
"""


def outcome_of(script: str, *arguments: str) -> Any:
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("memory", "stay"), [("8GiB", True), ("1200MiB", False)])
def test_memory_is_foreseen_within_a_tenth(tmp_path: Path, memory: str, stay: bool) -> None:
    found = outcome_of(FORECAST, memory, str(tmp_path))
    assert ("freed tensors stay" in found["plan"]) is stay
    assert found["peak"] <= found["forecast"] <= found["peak"] * 1.1, found


def test_the_process_keeps_to_the_smallest_budget_in_all_it_does(tmp_path: Path) -> None:
    found = outcome_of(RUN, str(Path(__file__).parents[1]), str(tmp_path))
    over = {name: peak for name, peak in found["peaks"].items() if peak > found["memory"]}
    assert over == {}, found
    assert found["state"] > 400 << 20, found  # what is trained would not have fitted beside the process
