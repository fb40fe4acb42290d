"""A budget in bytes -> page-aligned regions that torch, the disk and the operating system use without a copy.

Pages come from the operating system zeroed, which costs about half a disk read. So what a freed region held goes into
the next ones, whatever their sizes: the pages are moved to where they are wanted, not the bytes.
"""

import contextlib
import ctypes
import functools
import math
import mmap
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from counterpoint.core.errors import BudgetError
from counterpoint.core.units import format_bytes

if TYPE_CHECKING:
    import torch

PAGE_BYTES = mmap.PAGESIZE
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # Python's default, MAP_SHARED, gets no huge pages
_MADV_POPULATE_WRITE = 23
_MOVE = 1 | 2 | 4  # MREMAP_MAYMOVE, MREMAP_FIXED and MREMAP_DONTUNMAP
UNIT_BYTES = 2 << 20  # a huge page, which a move of less would split


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
        self._map = mmap.mmap(-1, self.num_bytes, flags=PRIVATE)
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

    @property
    def is_viewed(self) -> bool:
        """Whether a tensor, a view or a transfer of it lives."""
        return not self.resize(self.num_bytes)

    def populate(self, offset_bytes: int = 0) -> None:
        """Fault all pages from there on in at once, so that the first use does not pay for them."""
        if offset_bytes >= self.num_bytes:
            return
        try:
            self._map.madvise(_MADV_POPULATE_WRITE, offset_bytes, self.num_bytes - offset_bytes)
        except OSError:  # a system that does not know how
            ctypes.memset(self.address + offset_bytes, 0, self.num_bytes - offset_bytes)

    def resize(self, num_bytes: int) -> bool:
        """Remap to another size, keeping the pages in common; False if a view of it lives."""
        try:
            self._map.resize(round_to_pages(num_bytes))
        except BufferError:
            return False
        self.num_bytes = len(self._map)
        self._advise()
        return True

    def give(self, other: "Region", offset_bytes: int, num_bytes: int) -> int:
        """Move whole units of memory from the end of this region into another, from there on; the bytes moved.

        Nothing moves while a view of this region lives, or where the system does not know how. What is left here is
        shorter by the bytes moved and the part of a unit behind them.
        """
        end = self.num_bytes // UNIT_BYTES * UNIT_BYTES
        size = min(end, num_bytes // UNIT_BYTES * UNIT_BYTES)
        if not size or self.is_viewed or not _moved(self.address + end - size, other.address + offset_bytes, size):
            return 0
        if end > size:
            self.resize(end - size)
        else:
            self.close()
            self.num_bytes = 0
        return size

    def close(self) -> bool:
        """Unmap; False if a view of it lives."""
        try:
            self._map.close()
        except BufferError:
            return False
        return True


def _moved(address: int, target: int, num_bytes: int) -> bool:
    """Let the pages at an address appear at another, instead of what is mapped there; whether the system did.

    Where it does not move at once what came from several places, it moves unit by unit.
    """
    call = _mremap()

    def move(offset: int, size: int) -> bool:
        return bool(call(address + offset, size, size, _MOVE, target + offset) == target + offset)

    return call is not None and (
        move(0, num_bytes) or all(move(offset, UNIT_BYTES) for offset in range(0, num_bytes, UNIT_BYTES))
    )


@functools.cache
def _mremap() -> Any:
    call = getattr(ctypes.CDLL(None), "mremap", None)
    if call is not None:
        call.restype = ctypes.c_void_p
        call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    return call


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

    A freed region is kept for the next request of its size, or as pages for others. When a request would pass the
    budget, free regions are unmapped, longest free first.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._in_use: dict[int, Region] = {}
        self._free: list[Region] = []
        self._mapped_bytes = 0
        self._in_use_bytes = 0
        self._peak_mapped_bytes = 0
        self._peak_in_use_bytes = 0

    def allocate(self, num_bytes: int) -> Region:
        """A region of `num_bytes` in whole pages, all resident; its contents are whatever its last user left."""
        size = round_to_pages(num_bytes)
        with self._lock:
            region = self._reuse(size) or self._build(size)
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

    def trim(self) -> int:
        """Unmap every free region that no tensor views; the number of bytes given back."""
        with self._lock:
            return self._unmap_beyond(0)

    def release(self, num_bytes: int) -> int:
        """Unmap free regions, longest free first, of so many bytes; the bytes given back."""
        with self._lock:
            return self._unmap_beyond(self._mapped_bytes - num_bytes)

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

    @property
    def free_bytes(self) -> int:
        """What is mapped and not in use."""
        return self._mapped_bytes - self._in_use_bytes

    def _unmap_beyond(self, mapped_bytes: int) -> int:
        before = self._mapped_bytes
        for region in tuple(self._free):
            if self._mapped_bytes <= mapped_bytes:
                break
            self._unmap(region, self._mapped_bytes - mapped_bytes)
        return before - self._mapped_bytes

    def _reuse(self, size: int) -> Region | None:
        for index in range(len(self._free) - 1, -1, -1):
            if self._free[index].num_bytes == size:
                return self._free.pop(index)
        return None

    def _build(self, size: int) -> Region:
        """A region of free pages as far as they go, those that are free for longest first, and of new ones."""
        self._refuse_beyond_budget(size)
        region, filled = Region(size), 0
        for source in tuple(self._free):
            before = source.num_bytes
            filled += source.give(region, filled, size - filled)
            self._count(source.num_bytes - before)
            if not source.num_bytes:
                self._free.remove(source)
        self._unmap_beyond(self.budget_bytes - size)
        self._count(size)
        region.populate(filled)
        return region

    def _unmap(self, region: Region, num_bytes: int) -> None:
        """So many bytes of a region, in whole units, or all of it."""
        before = region.num_bytes
        left = (before - num_bytes) // UNIT_BYTES * UNIT_BYTES
        if left > 0:
            region.resize(left)
        elif region.close():
            region.num_bytes = 0
            self._free.remove(region)
        self._count(region.num_bytes - before)

    def _count(self, growth_bytes: int) -> None:
        self._mapped_bytes += growth_bytes
        self._peak_mapped_bytes = max(self._peak_mapped_bytes, self._mapped_bytes)

    def _refuse_beyond_budget(self, size: int) -> None:
        viewed = sum(region.num_bytes for region in self._free if region.is_viewed)
        enough = self._in_use_bytes + viewed + size
        if enough <= self.budget_bytes:
            return
        text = (
            f"no room for {format_bytes(size)}: {format_bytes(self._in_use_bytes)} in use"
            f" of a budget of {format_bytes(self.budget_bytes)}"
        )
        if viewed:
            text += f", and {format_bytes(viewed)} are free but still viewed by tensors"
        raise BudgetError(f"{text}; a budget of {format_bytes(enough)} would do")
