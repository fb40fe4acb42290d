"""Gradients of a layer's inputs, as autograd hands them over: their layout kept, added in its order.

A leaf would lay its gradient out like itself, and kernels may round differently on another layout. So an input enters
its layer through a node that only takes down what arrives.
"""

from typing import Any

import torch
from torch import Tensor


class Entrance:
    """Where a value enters a layer; `grad` is what arrived there."""

    __slots__ = ("grad",)

    def __init__(self) -> None:
        self.grad: Tensor | None = None

    def enter(self, tensor: Tensor) -> Tensor:
        """The same memory as the beginning of a graph, which does not hold it."""
        entered: Tensor = _Enter.apply(torch.empty(0, requires_grad=True), tensor, self)  # type: ignore[no-untyped-call]
        return entered


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begin: Tensor, tensor: Tensor, entrance: Entrance) -> Tensor:
        ctx.entrance = entrance
        ctx.set_materialize_grads(False)
        alias = torch.empty(0, dtype=tensor.dtype)  # not a view, which would hold on to the tensor
        alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return alias

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.entrance.grad = grads[0]
        return None, None, None


def span(tensor: Tensor) -> int:
    """Elements from the first to the last that a tensor touches."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def copied(tensor: Tensor) -> Tensor:
    """A copy in memory of its own with the same strides."""
    content = torch.as_strided(tensor, (span(tensor),), (1,)).clone()
    return torch.as_strided(content, tensor.shape, tensor.stride(), 0)


def added(total: Tensor, share: Tensor) -> Tensor:
    """The sum, in place unless elements of the total share memory."""
    return total.add_(share) if span(total) == total.numel() else total + share


def discarding() -> torch.autograd.graph.saved_tensors_hooks:
    """Within it autograd is on but keeps nothing, for a forward that will run again.

    Without autograd torch may choose other kernels, in attention or products, whose results differ in the last bit.
    """
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)
