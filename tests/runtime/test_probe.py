"""The probe on this machine: plausible integers, nothing left behind."""

import os
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from counterpoint.runtime import probe
from counterpoint.runtime.disk import Disk
from counterpoint.runtime.probe_compute import gemm_works, probe_copy, probe_gemm

SHM = Path("/dev/shm")


def test_a_machine_in_seconds(tmp_path: Path) -> None:
    start = time.perf_counter()
    found = probe.probe_machine(tmp_path / "folder")
    assert time.perf_counter() - start < 20, "about 3 s alone; the rest is for a machine shared with other tests"
    assert not list((tmp_path / "folder").iterdir())
    for field in fields(found):
        value = getattr(found, field.name)
        if field.name not in ("contention_percent", "bfloat16_flops_per_s", "accelerators", "direct"):
            assert value, field.name
    assert 1 <= found.num_cores <= (os.cpu_count() or 1)
    assert found.memory_limit_bytes <= found.physical_memory_bytes
    assert 10**6 < found.disk.read_bytes_per_s < 10**12
    assert 10**6 < found.disk.write_bytes_per_s < 10**12
    assert 10**6 < found.disk.both_bytes_per_s < 10**12
    assert 0 <= found.contention_percent < 10_000
    assert found.torch_version == torch.__version__
    assert len(found.accelerators) == (torch.accelerator.device_count() if torch.accelerator.is_available() else 0)


def test_a_disk_and_a_folder_in_use(tmp_path: Path) -> None:
    with Disk(tmp_path, {"weight": 1}):
        assert probe.probe_disk(tmp_path, 64 << 20).write_bytes_per_s > 10**6
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not SHM.is_dir(), reason="no /dev/shm here")
def test_file_systems() -> None:
    assert probe.file_system(SHM) == "tmpfs"
    assert probe.file_system(SHM / "not" / "there") == "tmpfs"
    assert probe.file_system("/proc") == "proc"


def test_the_quota_of_a_cgroup_counts(tmp_path: Path) -> None:
    for text, cores in (("max 100000\n", 8), ("150000 100000\n", 2), ("50000 100000\n", 1)):
        (tmp_path / "cpu.max").write_text(text)
        assert probe._quota(tmp_path, 8) == cores
    (tmp_path / "cpu.max").unlink()
    assert probe._quota(tmp_path, 8) == 8
    (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
    for text, cores in (("-1\n", 8), ("250000\n", 3)):
        (tmp_path / "cpu.cfs_quota_us").write_text(text)
        assert probe._quota(tmp_path, 8) == cores


def test_compute_speeds_leave_the_threads_of_torch_alone() -> None:
    before = torch.get_num_threads()
    assert probe_gemm(1) > 10**8
    assert probe_copy(1) > 10**7
    assert torch.get_num_threads() == before


def test_a_product_that_fails_is_found_out_in_a_child() -> None:
    assert gemm_works(torch.float32)
    assert not gemm_works(torch.bool)
    assert (probe_gemm(1, torch.bfloat16) > 0) == gemm_works(torch.bfloat16)
