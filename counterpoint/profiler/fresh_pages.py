"""The operating system -> what memory costs that it has to find first, in nanoseconds per byte.

A tensor of a huge page or more lies in huge pages (`counterpoint/__init__.py` asks torch for it), a smaller one in
ordinary ones, whose faults cost several times as much per byte.
"""

import contextlib
import ctypes
import mmap
import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from counterpoint.runtime.memory import PRIVATE, UNIT_BYTES
from counterpoint.runtime.memory_process import LEAVING_BYTES

_BYTES = 16 << 20  # begins where it begins: all but the ends lies in huge pages where they are asked for
_MADV_NOHUGEPAGE = 15
_TIMES = 5


class FreshPages(NamedTuple):
    """Nanoseconds per byte of memory that was not there before."""

    ordinary: float
    huge: float

    def ns(self, sizes: Sequence[int]) -> int:
        """For tensors of these sizes, each in memory of its own."""
        prices = (self.huge if size >= UNIT_BYTES else self.ordinary for size in sizes)
        return int(sum(size * price for size, price in zip(sizes, prices, strict=True) if size >= LEAVING_BYTES))


FREE_PAGES = FreshPages(0.0, 0.0)  # of a device whose allocator keeps what was freed


def probe_pages() -> FreshPages:
    return FreshPages(_ns_per_byte(_MADV_NOHUGEPAGE), _ns_per_byte(mmap.MADV_HUGEPAGE))


def _ns_per_byte(advice: int) -> float:
    """What a first write takes longer than a second one."""
    return max(0.0, median(_first_write_ns(advice) for _ in range(_TIMES)) / _BYTES)


def _first_write_ns(advice: int) -> int:
    with mmap.mmap(-1, _BYTES, flags=PRIVATE) as memory:
        with contextlib.suppress(OSError):
            memory.madvise(advice)
        first, second = (_write_ns(memory) for _ in range(2))
        return first - second


def _write_ns(memory: mmap.mmap) -> int:
    view = ctypes.c_char.from_buffer(memory)
    begin = time.monotonic_ns()
    ctypes.memset(ctypes.addressof(view), 1, len(memory))
    spent = time.monotonic_ns() - begin
    del view  # or the memory could not be closed
    return spent
