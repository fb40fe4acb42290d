"""Training on an accelerator, played by the CPU: budgets that hold, homes in memory and on disk, wishes refused."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from counterpoint import BudgetError, ModelError, Trainer
from counterpoint.runtime.backend import Accelerator, backend_of
from tests.played import compiler
from tests.played.child import in_child

pytestmark = pytest.mark.skipif(compiler() is None, reason="the played accelerator needs a C++ compiler")

WIDTH, DEPTH = 256, 12
MEMORY = 96 << 20  # the margin for what nobody foresees takes half of it


class Stack(nn.Module):
    """Some 25 MB of weights, so 100 MB of training state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(DEPTH))
        self.back = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer, back in zip(self.layers, self.back, strict=True):
            x = x + 0.1 * back(torch.relu(layer(x)))
        return x.square().mean()


def built() -> nn.Module:
    torch.manual_seed(3)
    return Stack().train()


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [{"x": torch.randn(8, WIDTH, generator=generator)} for _ in range(3)]


def plain(device: str) -> dict[str, Tensor]:
    model = built().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches():
        for part in batch["x"].to(device).split(4):
            (model(part) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def exported(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def train(folder: Path, **options: object) -> Trainer:
    """Three steps and an export; the trainer is closed then."""
    model = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    chosen = {"memory": MEMORY, "microbatch": 4, "max_grad_norm": 1.0, "device": "played", "disk": folder / "disk"}
    with Trainer(model, optimizer, example=batches()[0], **(chosen | options)) as trainer:
        trainer.compute.backend.reset_peak()
        for batch in batches():
            trainer.step(batch)
        trainer.found, trainer.host = trainer.statistics(), getattr(trainer.disk, "host", None)
        assert trainer.host is None or not trainer.host.path.exists()  # nobody can leave it behind
        trainer.export(folder / "model")
    return trainer


def assert_same(folder: Path, expected: dict[str, Tensor]) -> None:
    found = exported(folder / "model")
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


def in_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@in_child
def test_a_budget_smaller_than_the_state_holds_and_changes_no_bit() -> None:
    """Under a capacity of the budget itself, beyond which the device has nothing; home is memory, the disk, or both."""
    expected = plain("played:0")
    for host_memory in ("1GiB", "40MiB", "0B"):
        with in_folder() as folder:
            torch.get_device_module("played").set_capacity(MEMORY)
            trainer = train(Path(folder), host_memory=host_memory)
            torch.get_device_module("played").set_capacity(1 << 30)
            assert trainer.found.peak_bytes <= trainer.peak_bytes <= MEMORY
            assert trainer.found.read_bytes > 0
            assert trainer.found.written_bytes > 0
            tiers = {tier.name for tier in trainer.forecast.tiers if tier.peak_bytes}
            assert tiers == {"1GiB": {"device 0", "host"}, "0B": {"device 0", "disk"}}.get(
                host_memory, {"device 0", "host", "disk"}
            )
            assert_same(Path(folder), expected)


@in_child
def test_a_checkpoint_of_the_accelerator_goes_on_on_the_processor() -> None:
    with in_folder() as name:
        folder = Path(name)
        options = {"microbatch": 4, "max_grad_norm": 1.0, "disk": folder / "disk"}
        first, rest = batches()[:2], batches()[2:]
        model = built()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with Trainer(model, optimizer, example=first[0], memory=MEMORY, device="played", **options) as trainer:
            for batch in first:
                trainer.step(batch)
            trainer.save(folder / "checkpoint")
        model = built()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with Trainer(
            model, optimizer, example=first[0], device="cpu", resume=folder / "checkpoint", **options
        ) as trainer:
            for batch in rest:
                trainer.step(batch)
            trainer.export(folder / "model")
        assert_same(folder, plain("cpu"))


@in_child
def test_nothing_is_left_in_host_memory() -> None:
    with in_folder() as folder:
        host = train(Path(folder)).host
        assert host.folder.parent == Path("/dev/shm")
        assert not host.folder.exists()


@in_child
def test_wishes_that_cannot_be() -> None:
    model, example = built(), batches()[0]
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(BudgetError, match=r"played:0 has .* for this process, not the 64\.0 GiB"):
        Trainer(model, optimizer, example=example, memory="64GiB", device="played")
    with pytest.raises(BudgetError, match="the smallest memory that works is"):
        Trainer(model, optimizer, example=example, memory="48MiB", device="played")
    with pytest.raises(ModelError, match="device played:8 is asked for and there are 8"):
        Trainer(model, optimizer, example=example, device="played:8")
    with pytest.raises(ModelError, match="this machine has 8 of kind 'played'"):
        Trainer(model, optimizer, example=example, device="cuda")
    with pytest.raises(ValueError, match="host_memory is for accelerators"):
        Trainer(model, optimizer, example=example, device="cpu", host_memory="1GiB")
    there = built().to("played")
    with pytest.raises(ModelError, match="the model lies on played:0, whose memory its training needs"):
        Trainer(there, torch.optim.AdamW(there.parameters()), example=example)


@in_child
def test_an_accelerator_is_chosen_by_itself() -> None:
    assert isinstance(backend_of(), Accelerator)
    assert backend_of("cpu").is_process
    assert str(backend_of("played:3").device) == "played:3"
    assert backend_of().default_memory_bytes() == (1 << 30) * 90 // 100


@in_child
def test_a_device_that_keeps_no_books_is_not_chosen() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(torch.get_device_module("played"), "mem_get_info")
        assert backend_of().is_process
        with pytest.raises(ModelError, match=r"torch\.played does not say how much memory a device has"):
            backend_of("played")


@in_child
def test_the_command_line_trains_on_it() -> None:
    from counterpoint.cli import main

    with in_folder() as name:
        run = str(Path(name) / "run")
        command = [
            "train",
            "--run",
            run,
            "--model",
            "llama-tiny",
            "--steps",
            "2",
            "--minibatch",
            "2",
            "--device",
            "played",
        ]
        command += ["--sequence-length", "16", "--memory", "256MiB", "--host-memory", "256MiB"]
        assert main(command) == 0
        rows = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [1, 2]
        assert 0 < rows[-1]["peak_bytes"] <= 256 << 20
