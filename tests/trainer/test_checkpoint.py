"""Checkpoints: bit-exact under any plan, whole or not at all, refused when torn."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from counterpoint import ExecutionError, Trainer
from counterpoint.runtime.plain_values import decode, encode
from counterpoint.runtime.whole_folder import recover, whole_folder
from tests.home import read_states

from .nets import Net, adam, assert_same, batches, net, tensors, trainer


def straight(folder: Path, steps: int) -> dict[str, Tensor]:
    with trainer(folder, net(0.3), max_grad_norm=0.5) as trained:
        for batch in batches(steps):
            trained.step(batch)
        return state(trained)


def state(trained: Trainer) -> dict[str, Tensor]:
    """Weights, buffers and optimizer state."""
    found = tensors(trained)
    for name, states in read_states(trained.store).items():
        found |= {f"{name}:{key}": tensor for key, tensor in states.items()}
    return found


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"memory": "2GiB", "schedule": "plain"},
        {"activations": "recompute", "pack": 4},
        {"activations": "keep", "pack": 1, "memory": "3GiB"},
    ],
    ids=["same", "plain", "recompute", "keep"],
)
def test_a_run_goes_on_bit_for_bit_under_another_plan(tmp_path: Path, other: dict[str, object]) -> None:
    data = batches(4)
    with trainer(tmp_path / "a", net(0.3), max_grad_norm=0.5) as first:
        for batch in data[:2]:
            first.step(batch)
        first.data_position = 8
        first.save(tmp_path / "checkpoint")
        losses = [first.step(batch) for batch in data[2:]]
    with torch.device("meta"):
        model = Net(0.3)
    model.frozen.requires_grad_(False)
    settings = {"max_grad_norm": 0.5, "resume": tmp_path / "checkpoint", "microbatch": None, "seed": 99, **other}
    with trainer(tmp_path / "b", model, **settings) as second:
        assert (second.step_count, second.data_position) == (2, 8)
        assert [second.step(batch) for batch in data[2:]] == losses
        assert_same(state(second), straight(tmp_path / "c", 4))
    assert (tmp_path / "b").exists()
    assert list((tmp_path / "b").iterdir()) == []


def test_settings_schedulers_and_random_numbers_come_back(tmp_path: Path) -> None:
    model = net()
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)
    with trainer(tmp_path / "a", model, optimizer=optimizer) as trained:
        for batch in batches(3):
            trained.step(batch)
            schedule.step()
        torch.manual_seed(5)
        trained.save(tmp_path / "checkpoint", extra={"schedule": schedule.state_dict(), "epoch": 1})
        drawn = torch.rand(2)
        for batch in batches(2):
            trained.step(batch)
            schedule.step()
        expected = tensors(trained)
    model = net()
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)
    with trainer(tmp_path / "b", model, optimizer=optimizer) as trained:
        extra = trained.load(tmp_path / "checkpoint")
        assert torch.equal(torch.rand(2), drawn)
        assert (extra["epoch"], optimizer.param_groups[1]["betas"]) == (1, (0.8, 0.9))
        assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.005]
        schedule.load_state_dict(extra["schedule"])
        for batch in batches(2):
            trained.step(batch)
            schedule.step()
        assert_same(tensors(trained), expected)


def test_loading_takes_a_run_back(tmp_path: Path) -> None:
    data = batches(3)
    with trainer(tmp_path / "a", net(0.3)) as trained:
        trained.save(tmp_path / "start")  # before the first step there is no optimizer state yet
        first = [trained.step(batch) for batch in data]
        expected = state(trained)
        trained.load(tmp_path / "start")
        assert trained.step_count == 0
        assert [trained.step(batch) for batch in data] == first
        assert_same(state(trained), expected)


def test_optimizers_without_tensors_and_with_numbers_as_state(tmp_path: Path) -> None:
    class Lion(torch.optim.Optimizer):
        """A user's own: one tensor and one plain number for each parameter."""

        def __init__(self, params: object) -> None:
            super().__init__(params, {"lr": 0.01})  # type: ignore[arg-type]

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    own = self.state[p]
                    own["count"] = own.get("count", 0) + 1
                    own.setdefault("mean", torch.zeros_like(p)).mul_(0.9).add_(p.grad, alpha=0.1)
                    p.data.add_(own["mean"].sign(), alpha=-group["lr"] / own["count"])

    def run(folder: Path, save_at: int) -> dict[str, Tensor]:
        model = net()
        with trainer(folder, model, optimizer=Lion([p for p in model.parameters() if p.requires_grad])) as trained:
            for number, batch in enumerate(batches(4)):
                if number == save_at:
                    trained.save(tmp_path / "checkpoint")
                    trained.load(tmp_path / "checkpoint")
                trained.step(batch)
            return state(trained)

    assert_same(run(tmp_path / "a", 2), run(tmp_path / "b", -1))


def _saved(folder: Path) -> Path:
    with trainer(folder / "disk") as trained:
        trained.step(batches(1)[0])
        trained.save(folder / "checkpoint")
    return folder / "checkpoint"


def test_torn_checkpoints_are_refused(tmp_path: Path) -> None:
    good = _saved(tmp_path)
    damages = {
        "is torn: it has 100 of": lambda f: os.truncate(f / "weights.safetensors", 100),
        "optimizer.safetensors is torn: it has 0 of": lambda f: (f / "optimizer.safetensors").unlink(),
        "is not a checkpoint": lambda f: (f / "checkpoint.json").unlink(),
        "checkpoint.json is torn": lambda f: os.truncate(f / "checkpoint.json", 200),
        "its header cannot be read": lambda f: _overwrite(f / "weights.safetensors", 8, b"garbage"),
        "does not begin with a header": lambda f: _overwrite(f / "optimizer.safetensors", 0, b"\xff" * 8),
        "format 99": lambda f: _change(f / "checkpoint.json", format=99),
    }
    with trainer(tmp_path / "disk") as trained:
        trained.step(batches(1)[0])
        before = tensors(trained)
        for reason, damage in damages.items():
            shutil.copytree(good, tmp_path / "bad", dirs_exist_ok=True)
            damage(tmp_path / "bad")  # type: ignore[no-untyped-call]
            with pytest.raises(ExecutionError, match=reason):
                trained.load(tmp_path / "bad")
            shutil.rmtree(tmp_path / "bad")
        with pytest.raises(ExecutionError, match="is not a checkpoint"):
            trained.load(tmp_path / "nowhere")
        trained.load(good)
        assert_same(tensors(trained), before)


def _overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def _change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_checkpoints_of_other_models_and_optimizers_are_refused(tmp_path: Path) -> None:
    good = _saved(tmp_path)
    wider = net()
    wider.last = torch.nn.Linear(16, 5)
    with trainer(tmp_path / "a", wider) as trained, pytest.raises(ExecutionError, match=r"another model.*last.weight"):
        trained.load(good)
    model = net()
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(ExecutionError, match="of AdamW with 2 parameter groups, this run has SGD with 1"):
        trainer(tmp_path / "b", model, optimizer=sgd, resume=good)
    assert list((tmp_path / "b").iterdir()) == []


def test_what_a_checkpoint_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with trainer(tmp_path / "disk") as trained:
        with pytest.raises(ValueError, match=r"extra\['model'\] is a Net"):
            trained.save(tmp_path / "checkpoint", extra={"model": net()})
        assert sorted(path.name for path in tmp_path.iterdir()) == ["disk"]


def test_plain_values_come_back_the_same() -> None:
    value = {"a": (1, 2.5, [None, True]), 3: Counter({2: 1}), "t": torch.tensor([1.5]), "inf": float("inf")}
    found = decode(json.loads(json.dumps(encode(value, "value"))))
    assert torch.equal(found.pop("t"), value.pop("t"))
    assert found == value
    assert isinstance(found[3], Counter)


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"

    def write(text: str, error: BaseException | None = None) -> None:
        with whole_folder(folder, ("marker",)) as unfinished:
            (unfinished / "marker").write_text(text)
            if error:
                raise error

    write("first")
    with pytest.raises(KeyboardInterrupt):
        write("second", KeyboardInterrupt())
    assert (folder / "marker").read_text() == "first"
    write("third")
    assert (folder / "marker").read_text() == "third"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    os.rename(folder, tmp_path / ".checkpoint.previous")  # as a kill between the two renames leaves it
    (tmp_path / ".checkpoint.unfinished").mkdir()
    recover(folder)
    assert (folder / "marker").read_text() == "third"
    write("fourth")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.tex").touch()
    with pytest.raises(ExecutionError, match="holds other things"), whole_folder(tmp_path / "papers", ("marker",)):
        pass


SAVER = """
import sys, torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
from trainer.nets import batches, net, trainer
with trainer(sys.argv[2] + "/disk", net(0.3)) as trained:
    while True:
        trained.step(batches(1)[0])
        trained.save(sys.argv[2] + "/checkpoint")
        print(trained.step_count, flush=True)
"""


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    expected = []
    with trainer(tmp_path / "reference", net(0.3)) as reference:
        for _ in range(60):
            reference.step(batches(1)[0])
            expected.append(tensors(reference))
    arguments = [sys.executable, "-c", SAVER, str(Path(__file__).parents[1]), str(tmp_path)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for attempt in range(6):
            printed = int(process.stdout.readline())
            time.sleep(0.007 * attempt)
            process.send_signal(signal.SIGSTOP)  # as good as a kill: what is on disk now is what a kill leaves
            names = [tmp_path / "checkpoint", tmp_path / ".checkpoint.previous"]
            shutil.copytree(next(path for path in names if path.exists()), tmp_path / "seen")
            process.send_signal(signal.SIGCONT)
            with trainer(tmp_path / "disk2", net(0.3), resume=tmp_path / "seen") as resumed:
                assert resumed.step_count >= printed
                if resumed.step_count <= len(expected):
                    assert_same(tensors(resumed), expected[resumed.step_count - 1])
            shutil.rmtree(tmp_path / "seen")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    with trainer(tmp_path / "disk", net(0.3), resume=tmp_path / "checkpoint") as resumed:  # the killed one's folder
        resumed.step(batches(1)[0])
        resumed.save(tmp_path / "checkpoint")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "disk", "disk2", "reference"]
    assert list((tmp_path / "disk").iterdir()) == []
