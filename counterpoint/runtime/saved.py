"""What autograd keeps of one layer and microbatch, in a form that can leave memory and come back.

Autograd asks for its tensors through hooks. Weights are remembered by name, because they may lie elsewhere when the
backward comes; everything else by the storage it lies in, so that views are kept once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FindWeight = Callable[[Tensor], Any]


@dataclass(slots=True)
class _View:
    """A tensor as a view of a kept storage."""

    storage: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class WeightView:
    """A saved tensor that is a weight or a view of one."""

    key: Any
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class SavedTensors:
    """The storages of one layer and microbatch; `storages` are byte tensors, None while they are at home."""

    def __init__(self) -> None:
        self.storages: list[Tensor] | None = []
        self.sizes: list[int] = []
        self._known: dict[int, int] = {}

    def keep(self, tensor: Tensor, copied: bool = False) -> _View:
        """Remember a tensor; `copied` if its memory belongs to a buffer that may go before this one."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._known:
            assert self.storages is not None
            self._known[address] = len(self.storages)
            content = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.storages.append(content.clone() if copied else content)
            self.sizes.append(storage.nbytes())
        return _View(self._known[address], tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def tensor(self, view: _View) -> Tensor:
        assert self.storages is not None, "saved tensors are used while they are at home"
        return restrided(self.storages[view.storage], view.dtype, view.shape, view.stride, view.offset)

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    def drop(self) -> None:
        self.storages = None
        self._known = {}


def restrided(storage: Tensor, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
    """A tensor over the bytes of a storage."""
    size = storage.numel() // dtype.itemsize * dtype.itemsize
    return torch.as_strided(storage[:size].view(dtype), shape, stride, offset)
