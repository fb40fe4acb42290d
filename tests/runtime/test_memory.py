"""Regions and their pool under a budget, and what the operating system says about this process."""

import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from counterpoint.core.errors import BudgetError
from counterpoint.runtime import memory
from counterpoint.runtime.memory import PAGE_BYTES, Pool, Region
from counterpoint.runtime.memory_process import (
    cgroup_folders,
    memory_limit_bytes,
    peak_resident_bytes,
    physical_memory_bytes,
    reset_peak_resident,
    resident_bytes,
)

MIB = 1 << 20
CGROUP = Path("/sys/fs/cgroup/memory")


def test_a_region_is_whole_aligned_pages() -> None:
    for asked, got in ((0, 1), (1, 1), (PAGE_BYTES, 1), (PAGE_BYTES + 1, 2)):
        region = Region(asked)
        assert region.num_bytes == len(region.view()) == got * PAGE_BYTES
        assert region.address % PAGE_BYTES == 0
    with pytest.raises(ValueError, match="cannot be negative"):
        Region(-1)


def test_tensors_share_the_bytes_of_a_region() -> None:
    region = Region(PAGE_BYTES)
    whole = region.tensor(torch.int16, (4, 8))
    part = region.tensor(torch.int16, (8,), offset_bytes=16)
    assert part.data_ptr() == region.address + 16
    whole[1] = torch.arange(8, dtype=torch.int16)
    assert part.tolist() == list(range(8))
    assert bytes(region.view(16, 4)) == bytes([0, 0, 1, 0])
    part.requires_grad_(False).fill_(-1)
    assert whole[1].eq(-1).all()
    assert region.tensor(torch.float32, ()).numel() == 1
    assert region.tensor(torch.float32, (0, 3), offset_bytes=PAGE_BYTES).shape == (0, 3)


def test_a_tensor_outside_a_region_is_refused() -> None:
    region = Region(PAGE_BYTES)
    with pytest.raises(ValueError, match=f"bytes 8 to {PAGE_BYTES + 8} are not within a region of {PAGE_BYTES}"):
        region.tensor(torch.float32, (PAGE_BYTES // 4,), offset_bytes=8)
    with pytest.raises(ValueError, match="not a multiple of the 4 bytes"):
        region.tensor(torch.float32, (1,), offset_bytes=2)


def test_a_viewed_region_cannot_be_unmapped_or_moved() -> None:
    region = Region(PAGE_BYTES)
    tensor = region.tensor(torch.float32, (8,))[2:4]
    assert not region.close()
    assert not region.resize(2 * PAGE_BYTES)
    tensor.fill_(7)
    del tensor
    assert region.resize(2 * PAGE_BYTES)
    assert region.tensor(torch.float32, (8,)).tolist() == [0, 0, 7, 7, 0, 0, 0, 0]
    assert region.close()


def test_a_tensor_outlives_its_region() -> None:
    tensor = Region(MIB).tensor(torch.float32, (1000,)).fill_(2)
    assert tensor.sum().item() == 2000


def test_a_freed_region_is_reused_by_its_size() -> None:
    pool = Pool(10 * MIB)
    first, second = pool.allocate(4 * MIB), pool.allocate(3 * MIB - 5)
    pool.free(first)
    pool.free(second)
    assert pool.allocate(3 * MIB) is second
    assert pool.allocate(4 * MIB - 1) is first
    statistics = pool.statistics()
    assert statistics.mapped_bytes == statistics.in_use_bytes == statistics.peak_mapped_bytes == 7 * MIB


def test_pages_of_one_region_become_those_of_another() -> None:
    source, target = Region(7 * MIB), Region(9 * MIB)
    source.tensor(torch.uint8, (7 * MIB,)).copy_(torch.arange(7).repeat_interleave(MIB))
    view = source.view()
    assert source.give(target, 2 * MIB, 5 * MIB) == 0
    del view
    assert source.give(target, 2 * MIB, 5 * MIB) == 4 * MIB
    assert source.num_bytes == 2 * MIB
    assert target.tensor(torch.uint8, (9,)).tolist() == [0] * 9
    assert [target.view()[mib * MIB] for mib in range(9)] == [0, 0, 2, 3, 4, 5, 0, 0, 0]
    assert source.give(target, 6 * MIB, 3 * MIB) == 2 * MIB
    assert [target.view()[mib * MIB] for mib in range(9)] == [0, 0, 2, 3, 4, 5, 0, 1, 0]
    assert source.num_bytes == 0


def test_another_size_is_built_of_free_pages() -> None:
    pool = Pool(20 * MIB)
    first, second, small = pool.allocate(6 * MIB), pool.allocate(4 * MIB), pool.allocate(MIB)
    for region in (first, second, small):
        region.view()[::PAGE_BYTES] = b"x" * (region.num_bytes // PAGE_BYTES)
        pool.free(region)
    before = resident_bytes()
    built = pool.allocate(9 * MIB)
    assert bytes(built.view()[::PAGE_BYTES]).count(b"x") == 8 * MIB // PAGE_BYTES
    assert abs(resident_bytes() - before - MIB) < MIB // 2  # the one that is new is there at once
    assert pool.statistics().mapped_bytes == (9 + 2 + 1) * MIB


def test_pages_that_do_not_fit_beside_a_request_go() -> None:
    pool = Pool(8 * MIB)
    large, small = pool.allocate(6 * MIB), pool.allocate(MIB)
    pool.free(small)
    pool.free(large)
    built = pool.allocate(8 * MIB)
    assert pool.statistics().mapped_bytes == 8 * MIB
    pool.free(built)
    assert pool.release(3 * MIB) == 4 * MIB
    assert pool.free_bytes == pool.mapped_bytes == 4 * MIB
    assert pool.release(9 * MIB) == 4 * MIB
    assert pool.mapped_bytes == 0


def test_a_system_that_moves_no_pages_maps_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_moved", lambda address, target, num_bytes: False)
    pool = Pool(20 * MIB)
    pool.free(pool.allocate(6 * MIB))
    pool.allocate(8 * MIB)
    assert pool.statistics().mapped_bytes == 14 * MIB
    pool.allocate(7 * MIB)
    assert pool.statistics().mapped_bytes == (8 + 7 + 4) * MIB


def test_the_budget_is_a_contract() -> None:
    pool = Pool(8 * MIB)
    held = pool.allocate(6 * MIB)
    with pytest.raises(
        BudgetError, match=r"no room for 3.00 MiB: 6.00 MiB in use of a budget of 8.00 MiB; a budget of"
    ):
        pool.allocate(3 * MIB)
    pool.free(held)
    tensor = held.tensor(torch.uint8, (1,))
    with pytest.raises(BudgetError, match=r"and 6.00 MiB are free but still viewed by tensors"):
        pool.allocate(3 * MIB)
    del tensor
    assert pool.allocate(3 * MIB).num_bytes == 3 * MIB
    with pytest.raises(ValueError, match="not in use in this pool"):
        pool.free(Region(1))


def test_a_region_is_freed_once() -> None:
    pool = Pool(MIB)
    region = pool.allocate(1)
    pool.free(region)
    with pytest.raises(ValueError, match="not in use in this pool"):
        pool.free(region)


def test_trim_gives_back_what_nobody_views() -> None:
    pool = Pool(8 * MIB)
    first, second = pool.allocate(2 * MIB), pool.allocate(3 * MIB)
    tensor = first.tensor(torch.uint8, (10,))
    pool.free(first)
    pool.free(second)
    assert pool.trim() == 3 * MIB
    assert pool.statistics().mapped_bytes == 2 * MIB
    del tensor
    assert pool.trim() == 2 * MIB
    assert pool.statistics().peak_in_use_bytes == 5 * MIB


def test_a_pool_under_many_threads_and_sizes() -> None:
    pool, errors = Pool(108 * MIB), []

    def churn(seed: int) -> None:
        draw = random.Random(seed)
        try:
            held: list[tuple[Region, int]] = []
            for turn in range(300):
                if held and (len(held) == 3 or draw.random() < 0.5):
                    region, mark = held.pop(draw.randrange(len(held)))
                    assert region.tensor(torch.int64, (2,)).tolist() == [mark, seed]
                    pool.free(region)
                else:
                    region = pool.allocate(draw.choice([1, 2, 3, 4, 6, 9]) * MIB)
                    region.tensor(torch.int64, (2,)).copy_(torch.tensor([turn, seed]))
                    held.append((region, turn))
                assert pool.statistics().mapped_bytes <= 108 * MIB
            for region, _ in held:
                pool.free(region)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors
    assert pool.statistics().in_use_bytes == 0
    assert pool.trim() <= 108 * MIB
    assert pool.statistics().mapped_bytes == 0


def test_resident_memory_follows_regions() -> None:
    before = resident_bytes()
    region = Region(64 * MIB)
    assert resident_bytes() - before < 32 * MIB
    region.populate()
    assert resident_bytes() - before > 48 * MIB
    assert reset_peak_resident()
    assert region.close()
    assert resident_bytes() - before < 32 * MIB
    assert peak_resident_bytes() - before > 48 * MIB
    assert reset_peak_resident()
    assert peak_resident_bytes() - before < 48 * MIB


FORK = """
import os
from counterpoint.runtime.memory import Region
from counterpoint.runtime.memory_process import resident_bytes
region = Region(64 << 20)
region.populate()
parent = resident_bytes()
child = os.fork()
if child == 0:
    os._exit(0 if parent - resident_bytes() > 48 << 20 else 1)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_child_keeps_no_copy() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60)


LIMIT = """
import os, sys
from pathlib import Path
from counterpoint.runtime.memory_process import memory_limit_bytes
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
print(memory_limit_bytes())
"""


def test_the_limit_is_at_most_physical_memory() -> None:
    assert 0 < memory_limit_bytes() <= physical_memory_bytes()


@pytest.mark.skipif(os.geteuid() != 0 or not CGROUP.is_dir(), reason="needs root and a memory cgroup of version 1")
def test_the_limit_of_a_cgroup_above_counts() -> None:
    group = CGROUP / f"counterpoint-limit-{os.getpid()}"
    (group / "below").mkdir(parents=True)
    try:
        (group / "memory.limit_in_bytes").write_text(str(512 * MIB))
        run = [sys.executable, "-c", LIMIT, str(group / "below")]
        assert int(subprocess.run(run, check=True, capture_output=True, timeout=60).stdout) == 512 * MIB
    finally:
        (group / "below").rmdir()
        group.rmdir()


def test_cgroup_folders_of_version_2_and_of_a_container(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/user.slice/job\n")
    mount = "31 24 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
    (tmp_path / "mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/sda rw\n" + mount)
    root = Path("/sys/fs/cgroup")
    assert cgroup_folders("memory", tmp_path) == (root / "user.slice/job", root / "user.slice", root)
    (tmp_path / "cgroup").write_text("4:cpu,cpuacct:/docker/x\n3:memory:/docker/x\n")
    (tmp_path / "mountinfo").write_text("40 31 0:30 /docker/x /sys/fs/cgroup/memory ro - cgroup cgroup ro,memory\n")
    assert cgroup_folders("memory", tmp_path) == (root / "memory",)


KEPT = """
import torch
from counterpoint.core.task import saved
from counterpoint.runtime.headroom import Headroom
from counterpoint.runtime.memory import Pool
from counterpoint.runtime.memory_process import keep_freed_memory, resident_bytes
assert keep_freed_memory()
torch.ones(1 << 20)  # faults in the code of torch
before = resident_bytes()
tensors = [torch.ones(1 << 20) for _ in range(16)] + [torch.ones(1 << 14) for _ in range(512)]
held = resident_bytes() - before
del tensors[:-1]  # the last one keeps the heap from being cut back
headroom = Headroom(Pool(0), before, before + (170 << 20), lambda task: 0)
headroom.compute(60 << 20, 0, 0, 0)  # also beside what is free
kept = resident_bytes() - before
headroom.load(saved(0, 0), 90 << 20)
left = resident_bytes() - before
assert held > 90 << 20 and kept > 90 << 20 and left < 8 << 20, (held, kept, left)
"""

GIVEN_BACK = """
import torch
from counterpoint.runtime.memory_process import give_back_freed_memory, resident_bytes
assert give_back_freed_memory()
torch.ones(1 << 20)
before = resident_bytes()
large = [torch.ones(1 << 20) for _ in range(16)]
held = resident_bytes() - before
del large
left = resident_bytes() - before
assert held > 60 << 20 and left < 8 << 20, (held, left)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sets the thresholds of glibc")
@pytest.mark.parametrize("script", [KEPT, GIVEN_BACK], ids=["kept", "given back"])
def test_freed_tensors_leave_the_resident_set(script: str) -> None:
    """At once, or when room is needed."""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
