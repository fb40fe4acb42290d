"""A budget in bytes -> regions of an accelerator's memory, from torch's own allocator.

Regions come from a stream on which nothing ever runs. Torch hands memory that was freed on one stream only to the same
one, so a region never lies where a computation under way still has something; and whoever frees a region has waited for
those who used it. When torch runs out of memory it gives back by itself what nobody uses.
"""

import contextlib
import math
import threading

import torch
from torch import Tensor

from counterpoint.core.errors import BudgetError
from counterpoint.core.units import format_bytes
from counterpoint.runtime.memory import PoolStatistics, round_to_pages


class ApartMemory:
    """Memory of a device that no computation has used; nothing but this is done on `stream`."""

    def __init__(self, device: torch.device, stream: contextlib.AbstractContextManager[object]) -> None:
        self.device, self._stream = device, stream
        self._lock = threading.Lock()  # a stream is entered by one thread at a time

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        with self._lock, self._stream:
            return torch.empty(count, dtype=dtype, device=self.device)


class DeviceRegion:
    """Memory of an accelerator; tensors view it, and none of them keeps it."""

    def __init__(self, content: Tensor) -> None:
        self.content = content
        self.num_bytes, self.address = content.numel(), content.data_ptr()

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset_bytes: int = 0) -> Tensor:
        """A tensor over these bytes, in a storage of its own: what lies where is known by where storages begin."""
        size, device = math.prod(shape) * dtype.itemsize, self.content.device
        if offset_bytes % dtype.itemsize or not 0 <= offset_bytes <= offset_bytes + size <= self.num_bytes:
            raise ValueError(f"{size} bytes from {offset_bytes} on are not {dtype} within {self.num_bytes} bytes")
        if not size:
            return torch.empty(shape, dtype=dtype, device=device)
        storage = torch._C._construct_storage_from_data_pointer(self.address + offset_bytes, device, size)
        return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape)  # type: ignore[call-overload,no-any-return]


class DevicePool:
    """Regions under a budget."""

    def __init__(self, budget_bytes: int, memory: ApartMemory) -> None:
        self.budget_bytes, self._memory = budget_bytes, memory
        self._lock = threading.Lock()
        self._in_use: dict[int, DeviceRegion] = {}
        self._in_use_bytes = self._peak_bytes = 0

    def allocate(self, num_bytes: int) -> DeviceRegion:
        """A region of `num_bytes` in whole pages; its contents are whatever its last user left."""
        size = round_to_pages(num_bytes)
        with self._lock:
            enough = self._in_use_bytes + size
            if enough > self.budget_bytes:
                raise BudgetError(
                    f"no room for {format_bytes(size)} on {self._memory.device}: {format_bytes(self._in_use_bytes)} in "
                    f"use of a budget of {format_bytes(self.budget_bytes)}; a budget of {format_bytes(enough)} would do"
                )
            region = DeviceRegion(self._memory.empty(size, torch.uint8))
            self._in_use[id(region)] = region
            self._in_use_bytes = enough
            self._peak_bytes = max(self._peak_bytes, enough)
            return region

    def free(self, region: DeviceRegion) -> None:
        """Take a region back; tensors over it must not be used any more."""
        with self._lock:
            if self._in_use.pop(id(region), None) is None:
                raise ValueError(f"this region of {region.num_bytes} bytes is not in use in this pool")
            self._in_use_bytes -= region.num_bytes
            del region.content

    def statistics(self) -> PoolStatistics:
        with self._lock:
            used = self._in_use_bytes
            return PoolStatistics(self.budget_bytes, used, used, self._peak_bytes, self._peak_bytes)
