"""Faults, each injected for real: a clear error, nothing hangs, nothing is left behind, checkpoints stay whole."""

import contextlib
import gc
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from counterpoint import BudgetError, ExecutionError, LossError, ModelError, Trainer

from .nets import adam, assert_same, batches, loss_of, net, plain_loop, tensors, trainer


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    assert [name for name in names if "counterpoint" in name or "disk" in name] == []


class Wide(nn.Module):
    """Layers of which a small budget holds one: of the default width they are 38 MB each, all that trains included."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def square(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (output - batch["y"]).square().mean()


def wide_batch(size: int = 4, width: int = 1536) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: torch.randn(size, width, generator=generator) for name in ("x", "y")}


def wide_trainer(folder: Path, memory: str | int, depth: int = 6, size: int = 4, width: int = 1536) -> Trainer:
    with torch.device("meta"):
        model = Wide(width, depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    options = {"example": wide_batch(size, width), "loss": square, "microbatch": size // 2, "activations": "evict"}
    return Trainer(model, optimizer, memory=memory, disk=folder, **options)  # type: ignore[arg-type]


def smallest_memory(folder: Path, **options: int) -> str:
    """What the error for a budget that cannot work names."""
    gc.collect()
    with pytest.raises(BudgetError, match=r"the smallest memory that works is \d+MiB") as caught:
        wide_trainer(folder, "100MiB", **options)
    assert list(folder.iterdir()) == []
    named = str(caught.value).rsplit(" ", 1)[1]
    del caught  # it holds the failed trainer's memory
    gc.collect()
    return named


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """No file may grow beyond this: the kernel refuses, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_the_smallest_memory_that_the_error_names_works(tmp_path: Path) -> None:
    named = smallest_memory(tmp_path / "a")
    with wide_trainer(tmp_path / "a", named) as small, wide_trainer(tmp_path / "b", "8GiB") as large:
        for _ in range(2):
            assert small.step(wide_batch()) == large.step(wide_batch())
        assert small.statistics().read_bytes > 0 == large.statistics().read_bytes
        small.save(tmp_path / "checkpoint")
        assert small.evaluate(wide_batch()) == large.evaluate(wide_batch())
        assert small.step(wide_batch()) == large.step(wide_batch())
        large.load(tmp_path / "checkpoint")
        assert large.step_count == 2
        large.step(wide_batch())
        assert_same(tensors(small), tensors(large))


def test_weights_that_the_user_keeps_in_memory_are_named(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"of it the model's weights: build it on the meta device"):
        trainer(tmp_path, memory="100MiB")


def test_a_bad_loss_leaves_no_trace(tmp_path: Path) -> None:
    good = batches(3)
    bad = {"x": torch.full((4, 8), float("inf")), "y": good[0]["y"]}
    with trainer(tmp_path / "a", net(0.3)) as plain:
        expected_losses = [plain.step(batch) for batch in good]
        expected = tensors(plain)
    with trainer(tmp_path / "b", net(0.3)) as trained:
        losses = []
        for batch in good:
            with pytest.raises(LossError, match=f"in step {len(losses)} is nan; no weight was changed by this step"):
                trained.step(bad)
            losses.append(trained.step(batch))
        assert losses == expected_losses
        assert_same(tensors(trained), expected)


def test_a_bad_loss_of_a_run_that_swaps_leaves_no_trace(tmp_path: Path) -> None:
    good = wide_batch()
    bad = {"x": good["x"], "y": torch.full_like(good["y"], float("nan"))}
    with wide_trainer(tmp_path, smallest_memory(tmp_path)) as trained:
        trained.step(good)
        before = tensors(trained)
        with pytest.raises(LossError):
            trained.step(bad)
        assert_same(tensors(trained), before)
        trained.step(good)
        before = tensors(trained)
        with pytest.raises(LossError):
            trained.step(bad)
        assert_same(tensors(trained), before)
        assert trained.step_count == 2
        assert trained.statistics().read_bytes > 0


def test_a_full_disk_in_the_middle_of_a_step(tmp_path: Path) -> None:
    """Activations of 4 MB each are evicted, for which the file would have to grow."""
    form = {"depth": 16, "size": 16384, "width": 128}
    batch = wide_batch(16384, 128)
    with wide_trainer(tmp_path / "disk", smallest_memory(tmp_path / "disk", **form), **form) as trained:
        start = tensors(trained)
        trained.save(tmp_path / "checkpoint")
        with largest_file(trained.disk.path.stat().st_size), pytest.raises(ExecutionError, match="file size limit"):
            trained.step(batch)
        for use in (lambda: trained.step(batch), lambda: trained.evaluate(batch), trained.settle):
            with pytest.raises(ExecutionError, match="this run failed before"):
                use()
        with pytest.raises(ExecutionError, match="load a checkpoint"):
            trained.save(tmp_path / "other")
        trained.load(tmp_path / "checkpoint")
        assert_same(tensors(trained), start)
        trained.step(batch)
        assert trained.step_count == 1
    assert list((tmp_path / "disk").iterdir()) == []
    assert not (tmp_path / "other").exists()


def test_a_full_disk_in_the_middle_of_a_checkpoint(tmp_path: Path) -> None:
    data = batches(3)
    with trainer(tmp_path / "disk") as trained:
        trained.step(data[0])
        trained.save(tmp_path / "checkpoint")
        first = {path.name: path.read_bytes() for path in (tmp_path / "checkpoint").iterdir()}
        trained.step(data[1])
        trained.settle()
        with (
            largest_file(len(first["weights.safetensors"])),
            pytest.raises(ExecutionError, match=r"cannot write .*optimizer.safetensors.*File too large"),
        ):
            trained.save(tmp_path / "checkpoint")
        assert {path.name: path.read_bytes() for path in (tmp_path / "checkpoint").iterdir()} == first
        assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "disk"]
        with largest_file(100), pytest.raises(ExecutionError, match="File too large"):
            trained.export(tmp_path / "model")
        assert not (tmp_path / "model").exists()
        trained.step(data[2])  # the run itself is unharmed
        plain = net()
        plain_loop(plain, adam(plain), data)
        assert_same(tensors(trained), plain.state_dict())


def test_a_home_file_that_was_cut(tmp_path: Path) -> None:
    with trainer(tmp_path / "disk") as trained:
        trained.step(batches(1)[0])
        trained.save(tmp_path / "checkpoint")
        expected = tensors(trained)
        os.truncate(trained.disk.path, 4096)
        with pytest.raises(ExecutionError, match=r"cannot read .*resume from the last checkpoint"):
            trained.step(batches(1)[0])
    assert list((tmp_path / "disk").iterdir()) == []
    with trainer(tmp_path / "disk", resume=tmp_path / "checkpoint") as trained:
        assert_same(tensors(trained), expected)


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with trainer(tmp_path) as first:
        with pytest.raises(ExecutionError, match=f"in use by process {os.getpid()}"):
            trainer(tmp_path)
        first.step(batches(1)[0])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ExecutionError, match="cannot use folder"):
        trainer(tmp_path / "file")


def test_a_meta_model_that_cannot_initialise_itself(tmp_path: Path) -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.last = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.scale * x)

    with torch.device("meta"):
        model = Scale()
    with pytest.raises(ModelError, match="does not say how to initialise scale"):
        trainer(tmp_path, model, loss=loss_of)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_in_a_step_ends_the_run_cleanly(tmp_path: Path) -> None:
    with trainer(tmp_path / "disk") as trained:
        trained.save(tmp_path / "checkpoint")
        trained.rule.optimizer.param_groups[0]["lr"] = _Interrupting()
        with pytest.raises(KeyboardInterrupt):
            trained.step(batches(1)[0])
        trained.load(tmp_path / "checkpoint")
        trained.step(batches(1)[0])
    assert list((tmp_path / "disk").iterdir()) == []


class _Interrupting(float):
    """A learning rate at whose use somebody presses control-C."""

    def __neg__(self) -> float:
        raise KeyboardInterrupt

    __mul__ = __rmul__ = __truediv__ = lambda self, other: self.__neg__()
