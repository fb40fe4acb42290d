"""A budget in bytes -> page-aligned regions that torch, the disk and the operating system use without a copy."""

import contextlib
import ctypes
import math
import mmap
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from counterpoint.core.errors import BudgetError
from counterpoint.core.units import format_bytes

if TYPE_CHECKING:
    import torch

PAGE_BYTES = mmap.PAGESIZE
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # Python's default, MAP_SHARED, gets no huge pages
_MADV_POPULATE_WRITE = 23


def round_to_pages(num_bytes: int) -> int:
    """The smallest number of whole pages that holds `num_bytes`, at least one.

    >>> round_to_pages(0) == PAGE_BYTES, round_to_pages(PAGE_BYTES + 1) == 2 * PAGE_BYTES
    (True, True)
    """
    if num_bytes < 0:
        raise ValueError(f"a size cannot be negative: {num_bytes}")
    return max(1, -(-num_bytes // PAGE_BYTES)) * PAGE_BYTES


class Region:
    """Page-aligned private memory. Tensors and transfers view it; it cannot be unmapped while one of them lives.

    A forked child does not have it.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = round_to_pages(num_bytes)
        self._map = mmap.mmap(-1, self.num_bytes, flags=_PRIVATE)
        self._advise()

    def _advise(self) -> None:
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        # Huge pages: a 2 MiB page costs one fault instead of 512, and O_DIRECT pins it at a third of the CPU time.
        # No fork: a data loader's worker would keep a copy of every page that is written after its start.
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with contextlib.suppress(OSError):
                self._map.madvise(advice)

    def view(self, offset_bytes: int = 0, num_bytes: int | None = None) -> memoryview:
        """The bytes from `offset_bytes` on, as a writable view."""
        end = self.num_bytes if num_bytes is None else offset_bytes + num_bytes
        if not 0 <= offset_bytes <= end <= self.num_bytes:
            raise ValueError(f"bytes {offset_bytes} to {end} are not within a region of {self.num_bytes} bytes")
        return memoryview(self._map)[offset_bytes:end]

    def tensor(self, dtype: "torch.dtype", shape: tuple[int, ...], offset_bytes: int = 0) -> "torch.Tensor":
        """A tensor over these bytes; it keeps the region mapped as long as it lives."""
        import torch  # here, so that the disk tier needs no torch

        if offset_bytes % dtype.itemsize:
            raise ValueError(f"offset {offset_bytes} is not a multiple of the {dtype.itemsize} bytes of a {dtype}")
        view = self.view(offset_bytes, math.prod(shape) * dtype.itemsize)
        if not view.nbytes:
            return torch.empty(shape, dtype=dtype)
        # frombuffer keeps its argument alive but no buffer export; the memoryview keeps the export.
        # set_ makes no view in autograd's sense: a leaf given other data then lets go of these bytes.
        storage = torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape)  # type: ignore[call-overload,no-any-return]

    def populate(self) -> None:
        """Fault all pages in at once, so that the first use does not pay for them."""
        with contextlib.suppress(OSError):
            self._map.madvise(_MADV_POPULATE_WRITE)

    def resize(self, num_bytes: int) -> bool:
        """Remap to another size, keeping the pages in common; False if a view of it lives."""
        try:
            self._map.resize(round_to_pages(num_bytes))
        except BufferError:
            return False
        self.num_bytes = len(self._map)
        self._advise()
        return True

    def close(self) -> bool:
        """Unmap; False if a view of it lives."""
        try:
            self._map.close()
        except BufferError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """What a pool holds, and the most it ever held."""

    budget_bytes: int
    mapped_bytes: int
    in_use_bytes: int
    peak_mapped_bytes: int
    peak_in_use_bytes: int


class Pool:
    """Regions under a budget: the device memory of a machine without an accelerator.

    A freed region is kept for the next request of its size. When a request of another size would pass the budget,
    the largest free region is remapped to that size and others are unmapped, longest free first: pages that are
    already faulted in are worth keeping, a fault and its zeroing cost about half a disk read. `shrink` lowers what may
    be mapped for the sake of free regions; regions in use count against the budget only.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._wanted_bytes = budget_bytes
        self._lock = threading.Lock()
        self._in_use: dict[int, Region] = {}
        self._free: list[Region] = []
        self._mapped_bytes = 0
        self._in_use_bytes = 0
        self._peak_mapped_bytes = 0
        self._peak_in_use_bytes = 0

    def allocate(self, num_bytes: int) -> Region:
        """A region of `num_bytes` in whole pages; its contents are whatever its last user left."""
        size = round_to_pages(num_bytes)
        with self._lock:
            region = self._reuse(size)
            for limit in (self._wanted_bytes, self.budget_bytes):
                region = region or self._map(size, limit) or self._remap(size, limit)
            if region is None:
                raise BudgetError(self._refusal(size))
            self._in_use[id(region)] = region
            self._in_use_bytes += size
            self._peak_in_use_bytes = max(self._peak_in_use_bytes, self._in_use_bytes)
            return region

    def free(self, region: Region) -> None:
        """Take a region back; views of it may live on, but read what the next user writes."""
        with self._lock:
            if self._in_use.pop(id(region), None) is None:
                raise ValueError(f"this region of {region.num_bytes} bytes is not in use in this pool")
            self._in_use_bytes -= region.num_bytes
            self._free.append(region)
            self._unmap_beyond(self._wanted_bytes)

    def trim(self) -> int:
        """Unmap every free region that no tensor views; the number of bytes given back."""
        with self._lock:
            return self._unmap_beyond(0)

    def shrink(self, mapped_bytes: int) -> int:
        """Unmap free regions, longest free first, until no more than so much is mapped; the bytes given back.

        From now on no free region is kept beyond that.
        """
        with self._lock:
            self._wanted_bytes = min(mapped_bytes, self.budget_bytes)
            return self._unmap_beyond(mapped_bytes)

    def statistics(self) -> PoolStatistics:
        with self._lock:
            return PoolStatistics(
                self.budget_bytes,
                self._mapped_bytes,
                self._in_use_bytes,
                self._peak_mapped_bytes,
                self._peak_in_use_bytes,
            )

    @property
    def mapped_bytes(self) -> int:
        return self._mapped_bytes

    def _unmap_beyond(self, mapped_bytes: int) -> int:
        before = self._mapped_bytes
        for region in tuple(self._free):
            if self._mapped_bytes <= mapped_bytes:
                break
            self._unmap(region)
        return before - self._mapped_bytes

    def _reuse(self, size: int) -> Region | None:
        for index in range(len(self._free) - 1, -1, -1):
            if self._free[index].num_bytes == size:
                return self._free.pop(index)
        return None

    def _map(self, size: int, limit: int) -> Region | None:
        if self._mapped_bytes + size > limit:
            return None
        region = Region(size)
        self._count(size)
        return region

    def _remap(self, size: int, limit: int) -> Region | None:
        """Turn a free region into one of `size`, after unmapping others as far as the limit asks."""
        for region in sorted(self._free, key=lambda region: region.num_bytes, reverse=True):
            if region not in self._free:  # unmapped for the sake of a larger one that a tensor still views
                continue
            growth = size - region.num_bytes
            self._unmap_others(region, self._mapped_bytes + growth - limit)
            if self._mapped_bytes + growth <= limit and region.resize(size):
                self._free.remove(region)
                self._count(growth)
                return region
        return self._map(size, limit)

    def _unmap_others(self, kept: Region, excess_bytes: int) -> None:
        for region in tuple(self._free):
            if excess_bytes <= 0:
                return
            if region is not kept:
                excess_bytes -= self._unmap(region)

    def _unmap(self, region: Region) -> int:
        if not region.close():
            return 0
        self._free.remove(region)
        self._count(-region.num_bytes)
        return region.num_bytes

    def _count(self, growth_bytes: int) -> None:
        self._mapped_bytes += growth_bytes
        self._peak_mapped_bytes = max(self._peak_mapped_bytes, self._mapped_bytes)

    def _refusal(self, size: int) -> str:
        viewed = sum(region.num_bytes for region in self._free)
        text = (
            f"no room for {format_bytes(size)}: {format_bytes(self._in_use_bytes)} in use"
            f" of a budget of {format_bytes(self.budget_bytes)}"
        )
        if viewed:
            text += f", and {format_bytes(viewed)} are free but still viewed by tensors"
        return text + f"; a budget of {format_bytes(self._in_use_bytes + viewed + size)} would do"
