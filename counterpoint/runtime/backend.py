"""A kind of device -> how the runtime computes on it, what its memory is, and how lanes wait for one another.

No other module asks what kind of device it has. A lane is a thread that starts work. On the CPU, work that was started
and returned is done, so there is nothing to wait for beyond the thread itself. An accelerator queues work: there a lane
is a stream as well, a mark is an event on it, and `follow` makes the present lane's stream wait for that event, so that
threads run ahead of the device and need not be woken in between.
"""

import contextlib
import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from counterpoint.core.errors import ModelError
from counterpoint.runtime.memory import Pool, Region
from counterpoint.runtime.memory_process import resident_bytes


class Backend(ABC):
    """What the runtime needs of a device."""

    device: torch.device

    @abstractmethod
    def pool(self, budget_bytes: int) -> Pool:
        """The device's memory for weights, gradients, state and what comes back from home."""

    @abstractmethod
    def lane(self, name: str) -> contextlib.AbstractContextManager[object]:
        """Within it, what the calling thread starts belongs to the lane."""

    @abstractmethod
    def mark(self) -> object:
        """The moment when all that the calling lane has started so far is done."""

    @abstractmethod
    def follow(self, mark: object) -> None:
        """What the calling lane starts from now on comes after the mark."""

    @abstractmethod
    def copy_home(self, source: Tensor, offset_bytes: int, target: Region, target_offset: int, num_bytes: int) -> None:
        """Bytes of a tensor's memory into host memory that the disk writes from; there when it returns."""

    @abstractmethod
    def used_bytes(self) -> int:
        """Memory that a budget is held against."""

    def autocast(self, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
        if dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)

    @abstractmethod
    def seeded(self, seed: int) -> contextlib.AbstractContextManager[None]:
        """Random numbers from this seed on; those of the user go on afterwards where they were."""


class Cpu(Backend):
    """The machine's own memory and cores."""

    device = torch.device("cpu")

    def pool(self, budget_bytes: int) -> Pool:
        return Pool(budget_bytes)

    def lane(self, name: str) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def mark(self) -> object:
        return None

    def follow(self, mark: object) -> None:
        pass

    def copy_home(self, source: Tensor, offset_bytes: int, target: Region, target_offset: int, num_bytes: int) -> None:
        ctypes.memmove(target.address + target_offset, source.data_ptr() + offset_bytes, num_bytes)

    def used_bytes(self) -> int:
        return resident_bytes()

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            torch.default_generator.set_state(before)


CPU = Cpu()


def backend_of(device: torch.device | str) -> Backend:
    """The backend for a device; the meta device, where models wait for their weights, is trained on the CPU."""
    kind = torch.device(device).type
    if kind in ("cpu", "meta"):
        return CPU
    raise ModelError(
        f"there is no backend for devices of kind {kind!r} yet: build the model on the CPU or the meta device"
    )
