"""The pages of docs/ against the code: examples load and run, grids, output and pictures are those of today."""

import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from counterpoint.core.costs import Costs
from counterpoint.core.files import from_json
from counterpoint.core.machine import Device, Machine
from counterpoint.core.plan import Plan, equal_packs
from counterpoint.core.profile import Curve, LayerCost, Profile, ValueCost
from counterpoint.schedules import write_program
from counterpoint.simulator import simulate

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
STALE = "this page is stale: run python docs/draw.py"


def _load_draw() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_draw", DOCS / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


draw = _load_draw()


@pytest.mark.parametrize("name", PAGES)
def test_grids_and_output_are_those_of_today(name: str) -> None:
    page = (DOCS / name).read_text()
    assert draw.renewed(page) == page, STALE


@pytest.mark.parametrize("name", draw.CASES)
def test_pictures_are_those_of_today(name: str) -> None:
    assert (DOCS / "pictures" / f"{name}.svg").read_text() == draw.picture(draw.CASES[name]), STALE
    assert f"(pictures/{name}.svg)" in (DOCS / "schedules.md").read_text()


def test_commands_of_the_pages_do_what_they_say() -> None:
    page = (DOCS / "simulate.md").read_text()
    shown = [block.text for block in draw.blocks(page) if block.language == "console"]
    assert len(shown) >= 4
    refused = [text for text in shown if "counterpoint: error" in text]
    assert len(refused) == 1
    assert "smallest budget that fits" in refused[0]


def test_example_files_load() -> None:
    examples = {block.mark: block for block in draw.blocks((DOCS / "simulate.md").read_text()) if block.mark}
    profile = from_json(Profile, json.loads(examples["profile.json"].text), "profile.json")
    machine = from_json(Machine, json.loads(examples["machine.json"].text), "machine.json")
    assert profile.weight_bytes + profile.state_bytes + profile.grad_bytes > machine.devices[0].capacity_bytes


def test_the_python_example_of_simulate_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = list(draw.blocks((DOCS / "simulate.md").read_text()))
    monkeypatch.chdir(tmp_path)
    for block in found:
        if block.language == "json":
            Path(block.mark).write_text(block.text)
    exec(next(block.text for block in found if block.language == "python"), {})
    printed = capsys.readouterr().out
    command = next(block.text for block in found if block.language == "console" and "profile.json" in block.text)
    assert printed == command.partition("\n")[2]


def bubbles(schedule: str, depth: int, num_microbatches: int) -> float:
    """Time of 20 steps over that of an ideal pipeline."""
    layer = LayerCost("layer", Curve.proportional(1000), Curve.proportional(2000), weight_bytes=1, grad_bytes=1)
    values = tuple(ValueCost(index, (index + 1,), Curve.constant(0)) for index in range(depth - 1))
    profile = Profile("equal stages", (layer,) * depth, values)
    stages = equal_packs(depth, 1)
    plan = Plan(schedule, num_microbatches, 1, stages, stages, ("keep",) * depth, num_devices=depth, stages=stages)
    machine = Machine("no links", tuple(Device(str(index), 1000) for index in range(depth)))
    timeline = simulate(write_program(plan, profile.outline()), Costs(profile, plan), machine, 20)
    return timeline.makespan_ns / (20 * num_microbatches * 3000)


@pytest.mark.parametrize(("depth", "num_microbatches"), [(4, 4), (8, 8)])
def test_bubbles_are_as_the_table_says(depth: int, num_microbatches: int) -> None:
    row = [f"{bubbles(name, depth, num_microbatches):g}" for name in ("gpipe", "flush", "2bw")]
    assert " | ".join(("", str(depth), str(num_microbatches), *row, "")).strip() in (DOCS / "schedules.md").read_text()


@pytest.mark.parametrize("name", PAGES)
def test_links_and_paths_lead_somewhere(name: str) -> None:
    page = (DOCS / name).read_text()
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page)
    assert [target for target in targets if not (DOCS / target).exists()] == []
    paths = re.findall(r"`((?:tests|benchmarks|docs)/[\w/.]+|(?:core|passes|runtime|schedules)/\w+\.py)`", page)
    roots = (DOCS.parent, DOCS.parent / "counterpoint")
    assert [path for path in paths if not any((root / path).exists() for root in roots)] == []


def test_the_config_of_train_is_one(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    from counterpoint.job.config_file import read_config

    path = tmp_path / "first.yaml"
    path.write_text(next(b.text for b in draw.blocks((DOCS / "train.md").read_text()) if b.language == "yaml"))
    assert read_config(path, {"steps": "3000"}).steps == 3000


def test_the_example_of_train_runs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text = next(b.text for b in draw.blocks((DOCS / "train.md").read_text()) if b.language == "python")
    (tmp_path / "example.py").write_text(text)
    command = [sys.executable, "-W", "error", "example.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "samples/s" in done.stdout
    assert (tmp_path / "checkpoint" / "checkpoint.json").is_file()
    assert (tmp_path / "model" / "model.safetensors").is_file()


def test_names_of_the_trainer_are_its_own() -> None:
    pytest.importorskip("torch")
    from counterpoint import Trainer

    page = (DOCS / "train.md").read_text()
    arguments, methods = page.split("### What to give it")[1].split("### What it can do")
    known = set(inspect.signature(Trainer).parameters)
    rows = [row for row in arguments.splitlines() if row.startswith("| `")]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row.split(" | ")[0])} == known
    called = re.findall(r"^\| `(\w+)\(", methods, re.MULTILINE)
    assert len(called) >= 8
    assert [name for name in called if not callable(getattr(Trainer, name, None))] == []
