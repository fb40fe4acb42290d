"""What autograd finds for a layer's inputs and weights into gradients: layouts kept, sums in its order.

A leaf would lay its gradient out like itself, and kernels may round differently on another layout. So an input enters
its layer through a node that only takes down what arrives.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from counterpoint.core.task import Buffer, grad
from counterpoint.runtime.frame import Frame
from counterpoint.runtime.store import Store


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


def discarding() -> torch.autograd.graph.saved_tensors_hooks:
    """Within it autograd is on but keeps nothing, for a forward that will run again.

    Without autograd torch may choose other kernels, in attention or products, whose results differ in the last bit.
    """
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)


def collect(
    parameters: Mapping[str, Tensor], step: int, frame: Frame, store: Store, started: dict[Buffer, set[str]]
) -> list[RemovableHandle]:
    """Let autograd add to the gradient buffers; the first gradient of a step is copied, not added to zero.

    The gradient of a narrow leaf is made wide on its way, as the cast would do that the leaf makes unnecessary.
    """
    hooks: list[RemovableHandle] = []
    targets: dict[Buffer, dict[str, Tensor]] = {}
    for name, leaf in parameters.items():
        if not leaf.requires_grad:
            continue
        buffer = grad(frame.owner(name), step)
        if store.make(buffer):
            started[buffer] = set()
        if buffer not in targets:
            targets[buffer] = store.tensors(buffer)
        hooks += collect_into(targets[buffer][name], name, leaf, started[buffer])
    return hooks


def collect_into(target: Tensor, name: str, leaf: Tensor, started: set[str]) -> list[RemovableHandle]:
    """Let autograd copy a leaf's next gradient to the target, or add it to what was `started` there."""
    if name in started and leaf.dtype == target.dtype:
        leaf.grad = target
        return []
    return [leaf.register_post_accumulate_grad_hook(_taker(target, name, started))]  # type: ignore[no-untyped-call]


def before_each(roots: Iterable[GradientEdge], call: Callable[[], None]) -> list[RemovableHandle]:
    """Let autograd call something before each operation of a backward."""
    hooks: list[RemovableHandle] = []
    known: set[Node] = set()
    waiting = [root.node for root in roots]
    while waiting:
        node = waiting.pop()
        if node not in known:
            known.add(node)
            hooks.append(node.register_prehook(lambda grads: call()))
            waiting += [following for following, _ in node.next_functions if following is not None]
    return hooks


def _taker(target: Tensor, name: str, started: set[str]) -> Callable[[Tensor], None]:
    def take(leaf: Tensor) -> None:
        assert leaf.grad is not None
        if name in started:
            target.add_(leaf.grad)
        else:
            target.copy_(leaf.grad)
        started.add(name)
        leaf.grad = None

    return take
