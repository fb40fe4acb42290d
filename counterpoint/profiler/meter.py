"""Torch calls into the memory they hold at most: live bytes of the storages that are made while the meter is on."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from counterpoint.runtime.backend import CPU, Backend
from counterpoint.runtime.memory_process import HEAP_BYTES


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages that operators return, from their making to their end; what was there before does not count.

    `made` are the sizes of all of them; `peak_large_bytes` counts only those that are too large for the heap. What
    kernels take for themselves, no operator returns: an accelerator's own books know of it.
    """

    def __init__(self, known: list[Tensor], backend: Backend = CPU) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.backend, self._begin_bytes = backend, 0
        self.live_bytes = self.peak_bytes = 0
        self.live_large_bytes = self.peak_large_bytes = 0
        self.made: list[int] = []
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._counted: set[int] = set()

    def __enter__(self) -> "Meter":
        if not self.backend.is_process:
            self.backend.finish()
            self.backend.reset_peak()
            self._begin_bytes = self.backend.used_bytes()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if not self.backend.is_process:
            self.backend.finish()
            self.peak_bytes = max(self.peak_bytes, self.backend.peak_bytes() - self._begin_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device == self.backend.device:
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if not size or address in self._known or address in self._counted:
            return
        self._counted.add(address)
        self.made.append(size)
        self._grow(size)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.peak_large_bytes = max(self.peak_large_bytes, self.live_large_bytes)
        weakref.finalize(storage, self._release, address, size)

    def _release(self, address: int, size: int) -> None:
        if address in self._counted:
            self._counted.discard(address)
            self._grow(-size)

    def _grow(self, size: int) -> None:
        self.live_bytes += size
        self.live_large_bytes += size if is_large(abs(size)) else 0


def is_large(num_bytes: int) -> bool:
    """Whether a tensor of so many bytes is too large for the heap."""
    return num_bytes >= HEAP_BYTES


def storage_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the distinct storages of some tensors."""
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())
