"""Host memory -> regions that an accelerator copies from and to at full speed."""

import ctypes
import math
import mmap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from counterpoint.runtime.disk_extents import BLOCK_BYTES

Pin = Callable[[int, int], Callable[[], object]]


class HostRegion:
    """Host memory from a whole block on. `memory` keeps it alive; tensors and views of it do too."""

    def __init__(self, memory: Any, offset_bytes: int, num_bytes: int) -> None:
        self._bytes = memoryview(memory).cast("B")[offset_bytes : offset_bytes + num_bytes]
        self.num_bytes = num_bytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))

    def view(self, offset_bytes: int = 0, num_bytes: int | None = None) -> memoryview:
        return self._bytes[offset_bytes : self.num_bytes if num_bytes is None else offset_bytes + num_bytes]

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset_bytes: int = 0) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.view(offset_bytes, size), dtype=dtype).view(shape)


def pinned_region(num_bytes: int) -> HostRegion:
    """From torch's own pinned memory."""
    content = torch.empty(num_bytes + BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
    return HostRegion(content.numpy(), -content.data_ptr() % BLOCK_BYTES, num_bytes)


class MappedFile:
    """Extents of a file that lies in memory, as regions. Processes that map the same file see the same bytes.

    `pin` is told of each address and size, once, and returns what undoes it.
    """

    def __init__(self, descriptor: int, pin: Pin) -> None:
        self._descriptor, self._pin = descriptor, pin
        self._regions: dict[tuple[int, int], tuple[HostRegion, Callable[[], object]]] = {}

    def region(self, offset_bytes: int, num_bytes: int) -> HostRegion:
        place = (offset_bytes, num_bytes)
        if place not in self._regions:
            region = HostRegion(mmap.mmap(self._descriptor, num_bytes, offset=offset_bytes), 0, num_bytes)
            self._regions[place] = region, self._pin(region.address, num_bytes)
        return self._regions[place][0]

    def forget(self, offset_bytes: int, num_bytes: int) -> None:
        found = self._regions.pop((offset_bytes, num_bytes), None)
        if found is not None:
            found[1]()

    def close(self) -> None:
        for place in list(self._regions):
            self.forget(*place)
