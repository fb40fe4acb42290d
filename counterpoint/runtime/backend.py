"""A kind of device -> how the runtime computes on it, what its memory is, and how things get home from it.

No other module asks what kind of device it has. A lane is a thread. On an accelerator it has a stream as well, and a
task of the lane has ended when its stream has come to the end: whoever follows finds it done, memory that it used is
free, and the record says when it really ran. The price is that the device waits between two tasks.
"""

import contextlib
import ctypes
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from counterpoint.core.errors import BudgetError, ModelError
from counterpoint.core.units import format_bytes
from counterpoint.runtime.device_copies import Copies
from counterpoint.runtime.device_memory import ApartMemory, DevicePool, DeviceRegion
from counterpoint.runtime.host_memory import HostRegion, pinned_region
from counterpoint.runtime.memory import Pool, Region
from counterpoint.runtime.memory_process import (
    memory_limit_bytes,
    peak_resident_bytes,
    reset_peak_resident,
    resident_bytes,
    trim,
)
from counterpoint.runtime.tiers import Home

AnyRegion = Region | DeviceRegion
AnyPool = Pool | DevicePool
Staging = Region | HostRegion
_CPU_SHARE_PERCENT, _DEVICE_SHARE_PERCENT = 75, 90  # of the memory there is, when no budget is given


class Backend(ABC):
    """What the runtime needs of a device. Where it `is_process`, its memory is that of the process."""

    device: torch.device
    is_process: bool
    memory_name: str

    @abstractmethod
    def pool(self, budget_bytes: int) -> AnyPool:
        """The device's memory for weights, gradients, state and what comes back from home."""

    @abstractmethod
    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Room on the device for what is to arrive from elsewhere."""

    @abstractmethod
    def staging(self, num_bytes: int) -> Staging:
        """Host memory between the device and a disk."""

    @abstractmethod
    def pin(self, address: int, num_bytes: int) -> Callable[[], object]:
        """Let the device copy from and to host memory at full speed; what undoes it."""

    @abstractmethod
    def lane(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Within it, what the calling thread starts belongs to the lane."""

    @abstractmethod
    def finish(self) -> None:
        """Return when all that the calling lane has started is done."""

    @abstractmethod
    def read(self, home: Home, key: str, target: AnyRegion) -> None:
        """What lies at home under a key into a region; there when it returns."""

    @abstractmethod
    def write(self, home: Home, key: str, source: AnyRegion) -> None:
        """A region to its key at home; there when it returns."""

    @abstractmethod
    def copy_home(self, source: Tensor, offset_bytes: int, target: Staging, target_offset: int, num_bytes: int) -> None:
        """Bytes of a flat tensor of bytes into host memory; there when it returns."""

    @abstractmethod
    def default_memory_bytes(self) -> int:
        """The budget if the user gives none."""

    @abstractmethod
    def held_to(self, memory_bytes: int) -> contextlib.AbstractContextManager[None]:
        """Within it nothing of this process passes a budget, if the device knows how; refuses what is not there."""

    @abstractmethod
    def base_bytes(self) -> int:
        """Memory that is in use while nothing is trained yet."""

    @abstractmethod
    def used_bytes(self) -> int:
        """Memory that a budget is held against."""

    @abstractmethod
    def peak_bytes(self) -> int:
        """The most of it so far, or since `reset_peak`."""

    @abstractmethod
    def reset_peak(self) -> bool:
        """Let the peak begin anew from what is in use; False where that is not possible."""

    def here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def autocast(self, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)

    @abstractmethod
    def seeded(self, seed: int) -> contextlib.AbstractContextManager[None]:
        """Random numbers from this seed on; those of the user go on afterwards where they were."""


class Cpu(Backend):
    """The machine's own memory and cores. Work that was started and returned is done."""

    device = torch.device("cpu")
    is_process = True
    memory_name = "whole process"

    def pool(self, budget_bytes: int) -> AnyPool:
        return Pool(budget_bytes)

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype)

    def staging(self, num_bytes: int) -> Staging:
        return Region(num_bytes)

    def pin(self, address: int, num_bytes: int) -> Callable[[], object]:
        return lambda: None

    def lane(self, name: str) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def finish(self) -> None:
        pass

    def read(self, home: Home, key: str, target: AnyRegion) -> None:
        assert isinstance(target, Region)
        home.read(key, target).wait()

    def write(self, home: Home, key: str, source: AnyRegion) -> None:
        assert isinstance(source, Region)
        home.write(key, source).wait()

    def copy_home(self, source: Tensor, offset_bytes: int, target: Staging, target_offset: int, num_bytes: int) -> None:
        ctypes.memmove(target.address + target_offset, source.data_ptr() + offset_bytes, num_bytes)

    def default_memory_bytes(self) -> int:
        return memory_limit_bytes() * _CPU_SHARE_PERCENT // 100

    def held_to(self, memory_bytes: int) -> contextlib.AbstractContextManager[None]:
        """The operating system's limits are the user's to set."""
        return contextlib.nullcontext()

    def base_bytes(self) -> int:
        trim()
        return resident_bytes()

    def used_bytes(self) -> int:
        return resident_bytes()

    def peak_bytes(self) -> int:
        return peak_resident_bytes()

    def reset_peak(self) -> bool:
        return reset_peak_resident()

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            torch.default_generator.set_state(before)


class Accelerator(Backend):
    """A device that torch.accelerator knows: everything here is said in its terms, whoever made the device.

    The budget is for what torch allocates there; what the device's own driver takes comes on top.
    """

    is_process = False

    def __init__(self, device: torch.device) -> None:
        self.device, self.memory_name = device, str(device)
        self._module = torch.get_device_module(device)
        torch.accelerator.set_device_index(device)
        # Streams come from pools and are handed out again and again; those of another priority are no lane's.
        self._memory = ApartMemory(device, torch.Stream(device=device, priority=-1))
        self._copies = Copies(self.finish)

    def pool(self, budget_bytes: int) -> AnyPool:
        return DevicePool(budget_bytes, self._memory)

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return self._memory.empty(count, dtype)

    def staging(self, num_bytes: int) -> Staging:
        return pinned_region(num_bytes)

    def pin(self, address: int, num_bytes: int) -> Callable[[], object]:
        """Where the device knows no way to pin memory that is there already, copies are right all the same."""
        runtime = self._module.cudart() if hasattr(self._module, "cudart") else None
        if runtime is None or int(runtime.cudaHostRegister(address, num_bytes, 0)):
            return lambda: None
        return lambda: runtime.cudaHostUnregister(address)

    def lane(self, name: str) -> contextlib.AbstractContextManager[object]:
        return torch.Stream(device=self.device)

    def finish(self) -> None:
        torch.accelerator.current_stream(self.device).synchronize()

    def read(self, home: Home, key: str, target: AnyRegion) -> None:
        assert isinstance(target, DeviceRegion)
        self._copies.load(home, key, target)

    def write(self, home: Home, key: str, source: AnyRegion) -> None:
        assert isinstance(source, DeviceRegion)
        self._copies.evict(home, key, source)

    def copy_home(self, source: Tensor, offset_bytes: int, target: Staging, target_offset: int, num_bytes: int) -> None:
        part = source[offset_bytes : offset_bytes + num_bytes]
        target.tensor(torch.uint8, (num_bytes,), target_offset).copy_(part, non_blocking=True)
        self.finish()

    def default_memory_bytes(self) -> int:
        return self._free_bytes() * _DEVICE_SHARE_PERCENT // 100

    @contextlib.contextmanager
    def held_to(self, memory_bytes: int) -> Iterator[None]:
        free = self._free_bytes() + torch.accelerator.memory_reserved(self.device)
        if memory_bytes > free:
            raise BudgetError(
                f"{self.device} has {format_bytes(free)} for this process, not the {format_bytes(memory_bytes)} that "
                "it is to use; give it less memory, or end what else runs there"
            )
        limit = getattr(self._module, "set_per_process_memory_fraction", lambda fraction, device: None)
        limit(memory_bytes / self._module.mem_get_info(self.device)[1], self.device)
        try:
            yield
        finally:
            limit(1.0, self.device)

    def base_bytes(self) -> int:
        torch.accelerator.empty_cache()
        return self.used_bytes()

    def used_bytes(self) -> int:
        return int(torch.accelerator.memory_allocated(self.device))

    def peak_bytes(self) -> int:
        return int(torch.accelerator.max_memory_allocated(self.device))

    def reset_peak(self) -> bool:
        torch.accelerator.reset_peak_memory_stats(self.device)
        return True

    def _free_bytes(self) -> int:
        return int(self._module.mem_get_info(self.device)[0])

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        before = self._module.get_rng_state(self.device)
        self._module.manual_seed(seed)
        try:
            yield
        finally:
            self._module.set_rng_state(before, self.device)


CPU = Cpu()


def backend_of(device: torch.device | str | None = None) -> Backend:
    """The backend for a device; without one, an accelerator if there is any.

    Processes of one server that only say which kind they want take one each, as torchrun numbers them.
    """
    if device is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = found if found is not None and _keeps_books(found) else CPU.device
    wanted = torch.device(device)
    if wanted.type in ("cpu", "meta"):
        return CPU
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    known = torch.accelerator.current_accelerator() if count else None
    if known is None or known.type != wanted.type:
        have = f"this machine has {count} of kind {known.type!r}" if known is not None else "torch finds no accelerator"
        raise ModelError(f"there is no device {str(wanted)!r}: {have}; choose another, or cpu")
    if not _keeps_books(wanted):
        raise ModelError(f"torch.{wanted.type} does not say how much memory a device has, so no budget holds; use cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) if wanted.index is None else wanted.index
    if index >= count:
        raise ModelError(
            f"device {wanted.type}:{index} is asked for and there are {count}; start as many processes as devices"
        )
    return Accelerator(torch.device(wanted.type, index))


def _keeps_books(device: torch.device) -> bool:
    """Whether torch can tell how much memory such a device has and has left."""
    return hasattr(torch.get_device_module(device), "mem_get_info")
