"""The doctor's words about a machine."""

from dataclasses import replace
from pathlib import Path

import pytest

from counterpoint.job.doctor import examine, verdicts
from counterpoint.job.packages import Package, find_packages
from counterpoint.runtime.probe import Accelerator, DiskSpeed, Findings

GB = 10**9
LAPTOP = Findings(
    num_cores=8, physical_memory_bytes=16 << 30, memory_limit_bytes=16 << 30, copy_bytes_per_s=10 * GB,
    float32_flops_per_s=400 * GB, bfloat16_flops_per_s=0, file_system="ext4", direct=True, free_bytes=500 * GB,
    disk=DiskSpeed(3 * GB, 2 * GB, 3 * GB), contention_percent=30, torch_version="2.13.0",
    is_glibc=True, accelerators=(),
)  # fmt: skip


def words(findings: Findings) -> dict[str, str]:
    return {verdict.model: verdict.word for verdict in verdicts(findings)}


def test_models_are_judged_by_memory_disk_and_time() -> None:
    assert words(LAPTOP)["gpt2-medium"] == "comfortable, in memory"
    assert words(LAPTOP)["gpt2-xl"] == "comfortable, from disk"
    assert words(LAPTOP)["llama-8b"] == "slow, from disk"
    assert words(LAPTOP)["gpt2-20b"] == "needs 682 GiB of disk for its state and two checkpoints"
    weak = replace(LAPTOP, float32_flops_per_s=10 * GB)
    assert words(weak)["gpt2-xl"] == "too slow to be of use, from disk"


def test_a_busy_disk_and_a_slow_one_cost_time() -> None:
    def step_s(findings: Findings) -> float:
        return next(verdict.step_s for verdict in verdicts(findings) if verdict.model == "gpt2-xl")

    assert step_s(replace(LAPTOP, contention_percent=0)) < step_s(LAPTOP)
    slow = replace(LAPTOP, disk=DiskSpeed(GB // 20, GB // 20, GB // 20))
    assert step_s(slow) > 2 * step_s(LAPTOP)
    assert step_s(replace(slow, memory_limit_bytes=64 << 30)) == step_s(replace(LAPTOP, memory_limit_bytes=64 << 30))


def test_what_is_said() -> None:
    limited = replace(LAPTOP, memory_limit_bytes=4 << 30, file_system="tmpfs", direct=False,
                      accelerators=(Accelerator("cuda", 0, "RTX 4090", 24 << 30),))  # fmt: skip
    text = examine(limited, (Package("torch", "training", "2.13"), Package("peft", "LoRA", "")), Path("/scratch"))
    for phrase in (
        "cores         8",
        "16.0 GiB, of which a limit leaves 4.00 GiB",
        "fp32 products 400 GFLOP/s",
        "bf16 products do not run here",
        "RTX 4090 (24.0 GiB)",
        "disk at /scratch",
        "without O_DIRECT",
        "this folder lies in memory",
        "30 % longer while the disk is busy",
        "peft          missing        LoRA",
        "training in 3.00 GiB",
    ):
        assert phrase in text, phrase


def test_packages_are_found() -> None:
    found = {package.name: package for package in find_packages()}
    assert not found["torch"].missing
    assert found["torch"].purpose


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from counterpoint.job import packages

    monkeypatch.setattr(packages, "_NEEDED", ("torch", "no-such-package"))
    monkeypatch.setitem(packages._PURPOSES, "no-such-package", "nothing")
    with pytest.raises(ValueError, match="needs the packages no-such-package: pip install"):
        packages.refuse_missing()
