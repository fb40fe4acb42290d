"""The seam between the runtime and the kind of device."""

import ast
from pathlib import Path

import pytest
import torch

import counterpoint
from counterpoint.core.errors import ModelError
from counterpoint.runtime.backend import CPU, backend_of
from counterpoint.runtime.memory import Region

RUNTIME = Path(counterpoint.__file__).parent / "runtime"
OF_A_DEVICE = {"cuda", "mps", "xpu", "accelerator", "Stream", "Event", "autocast", "default_generator"} | {
    "get_device_module"
}


def _asked_of_torch(file: Path) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "torch"}


def test_no_other_file_of_the_runtime_asks_for_the_kind_of_device() -> None:
    found = {file.name: _asked_of_torch(file) & OF_A_DEVICE for file in sorted(RUNTIME.glob("*.py"))}
    assert found.pop("backend.py") == {"autocast", "default_generator", "accelerator", "Stream", "get_device_module"}
    assert found.pop("probe.py") == {"accelerator", "get_device_module"}  # lists what a machine has
    assert {name: asked for name, asked in found.items() if asked} == {}


def test_random_numbers_of_the_user_go_on() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    first = torch.rand(2)
    with CPU.seeded(7):
        inside = torch.rand(3)
    assert torch.equal(torch.cat([first, torch.rand(2)]), expected)
    with CPU.seeded(7):
        assert torch.equal(torch.rand(3), inside)


def test_bytes_of_a_tensor_reach_the_memory_that_the_disk_writes_from() -> None:
    region, source = Region(8192), torch.arange(1000, dtype=torch.int64)
    CPU.copy_home(source, 80, region, 4096, 160)
    assert torch.equal(region.tensor(torch.int64, (20,), 4096), source[10:30])


def test_devices_without_a_backend_are_refused() -> None:
    assert backend_of("meta") is CPU
    with pytest.raises(ModelError, match=r"no device 'cuda:1': .*; choose another, or cpu"):
        backend_of("cuda:1")
