"""Tensors into copies, sums and views that keep the strides: kernels may round differently on another layout."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Form:
    """How the bytes of a tensor that was elsewhere are to be seen again."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> "Form":
        return Form(tensor.dtype, tuple(tensor.shape), tensor.stride())

    @property
    def num_elements(self) -> int:
        """From the first to the last that a tensor touches."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


def spanned(tensor: Tensor) -> Tensor:
    """All elements from the first to the last that a tensor touches, in a row."""
    return torch.as_strided(tensor, (Form.of(tensor).num_elements,), (1,))


def copied(tensor: Tensor) -> Tensor:
    """A copy in memory of its own with the same strides."""
    return torch.as_strided(spanned(tensor).clone(), tensor.shape, tensor.stride(), 0)


def added(total: Tensor, share: Tensor) -> Tensor:
    """The sum, in place unless elements of the total share memory."""
    return total.add_(share) if Form.of(total).num_elements == total.numel() else total + share


def restrided(storage: Tensor, form: Form, offset: int = 0) -> Tensor:
    """A tensor over the bytes of a storage, from the element at `offset` on."""
    size = storage.numel() // form.dtype.itemsize * form.dtype.itemsize
    return torch.as_strided(storage[:size].view(form.dtype), form.shape, form.stride, offset)
