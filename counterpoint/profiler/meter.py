"""Torch calls into the memory they hold at most: live bytes of the storages that are made while the meter is on."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages that operators return, from their making to their end; what was there before does not count.

    `made` are the sizes of all of them.
    """

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self.made: list[int] = []
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._counted: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                self._count(leaf)
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if not size or address in self._known or address in self._counted:
            return
        self._counted.add(address)
        self.made.append(size)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._release, address, size)

    def _release(self, address: int, size: int) -> None:
        if address in self._counted:
            self._counted.discard(address)
            self.live_bytes -= size


def storage_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the distinct storages of some tensors."""
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())
