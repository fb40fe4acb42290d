"""Host memory as a home before the disk: what goes where, and that both ways into it see the same bytes."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from counterpoint.core.errors import ExecutionError
from counterpoint.runtime.backend import CPU
from counterpoint.runtime.disk_extents import BLOCK_BYTES
from counterpoint.runtime.memory import Region
from counterpoint.runtime.tiers import Tiers, split
from counterpoint.trainer.tiered_home import host_folder, open_tiers

SIZES = {"a": 3 * BLOCK_BYTES, "b": 5 * BLOCK_BYTES, "c": 2 * BLOCK_BYTES}


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    """Of which "a" and "c" lie in memory, with two blocks to spare."""
    host_bytes = 7 * BLOCK_BYTES
    with contextlib.ExitStack() as stack:
        folder = host_folder(stack, host_bytes)
        found = open_tiers(stack, tmp_path, SIZES, CPU, folder, host_bytes)
        assert isinstance(found, Tiers)
        yield found


def filled(num_blocks: int, value: int) -> Region:
    region = Region(num_blocks * BLOCK_BYTES)
    region.tensor(torch.uint8, (region.num_bytes,)).fill_(value)
    return region


def test_what_fits_lies_in_memory_in_the_order_of_the_keys() -> None:
    host, disk = split(SIZES, 6 * BLOCK_BYTES)
    assert (list(host), list(disk)) == (["a", "c"], ["b"])
    assert split(SIZES, 0) == ({}, SIZES)
    assert split({"nothing": 0}, BLOCK_BYTES - 1) == ({}, {"nothing": 0})  # an extent has at least a block


def test_both_tiers_are_read_and_written_alike(tiers: Tiers) -> None:
    for number, (key, num_bytes) in enumerate(SIZES.items(), 1):
        tiers.write(key, filled(num_bytes // BLOCK_BYTES, number)).wait()
    for number, (key, num_bytes) in enumerate(SIZES.items(), 1):
        found = Region(num_bytes)
        tiers.read(key, found).wait()
        assert found.tensor(torch.uint8, (num_bytes,)).unique().tolist() == [number]
    assert [key for key in SIZES if tiers.mapped(key) is not None] == ["a", "c"]


def test_what_is_mapped_is_what_is_read(tiers: Tiers) -> None:
    tiers.write("a", filled(3, 7)).wait()
    mapped = tiers.mapped("a")
    assert mapped is not None
    content = mapped.tensor(torch.uint8, (3 * BLOCK_BYTES,))
    assert content.unique().tolist() == [7]
    content.fill_(9)
    found = Region(3 * BLOCK_BYTES)
    tiers.read("a", found).wait()
    assert found.tensor(torch.uint8, (3 * BLOCK_BYTES,)).unique().tolist() == [9]


def test_files_are_copied_to_and_from_both(tiers: Tiers, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 16)
    descriptor = os.open(path, os.O_RDWR)
    try:
        for key in ("a", "b"):
            tiers.copy_from(key, descriptor, 100, offset_bytes=7, num_bytes=1000)
            tiers.copy_to(key, descriptor, 3000, offset_bytes=7, num_bytes=1000)
            assert path.read_bytes()[3000:4000] == path.read_bytes()[100:1100]
    finally:
        os.close(descriptor)


def test_keys_that_come_later_share_what_is_left(tiers: Tiers) -> None:
    tiers.add("first", BLOCK_BYTES)
    tiers.add("large", 2 * BLOCK_BYTES)
    tiers.add("second", 1)
    assert [key in tiers.host for key in ("first", "large", "second")] == [True, False, True]
    assert tiers.spare_bytes == 0
    tiers.release("first")
    tiers.release("large")
    assert tiers.spare_bytes == BLOCK_BYTES
    tiers.add("third", BLOCK_BYTES)
    assert "third" in tiers.host


def test_the_file_in_memory_has_no_name(tiers: Tiers) -> None:
    assert list(tiers.host.folder.glob("*.bin")) == []
    assert tiers.host.folder.is_relative_to("/dev/shm")


def test_more_host_memory_than_there_is_is_refused() -> None:
    with contextlib.ExitStack() as stack, pytest.raises(ExecutionError, match="host_memory is 1024 PiB and files in"):
        host_folder(stack, 1 << 60)
