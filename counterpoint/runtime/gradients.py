"""What autograd finds for a layer's inputs and weights into gradients: layouts kept, sums in its order.

A leaf would lay its gradient out like itself, and kernels may round differently on another layout. So an input enters
its layer through a node that only takes down what arrives.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.hooks import RemovableHandle

from counterpoint.core.task import Buffer, grad
from counterpoint.runtime.frame import Frame
from counterpoint.runtime.products import Product, find_products, nodes_behind
from counterpoint.runtime.store import Store


class Entrance:
    """Where a value enters a layer, `leaf` the beginning of the graph there; `grad` is what arrived."""

    __slots__ = ("grad", "leaf")

    def __init__(self) -> None:
        self.grad: Tensor | None = None
        self.leaf: Tensor | None = None  # None: it wants no gradient

    def enter(self, tensor: Tensor) -> Tensor:
        """The same memory as the beginning of a graph, which does not hold it."""
        self.leaf = torch.empty(0, requires_grad=True)
        entered: Tensor = _Enter.apply(self.leaf, tensor, self)  # type: ignore[no-untyped-call]
        return entered


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begin: Tensor, tensor: Tensor, entrance: Entrance) -> Tensor:
        ctx.entrance = entrance
        ctx.set_materialize_grads(False)
        alias = tensor.new_empty(0)  # not a view, which would hold on to the tensor
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


@dataclass(frozen=True, slots=True)
class Target:
    """Where a weight's gradient is kept; `started` has the names of those that this step has given a content."""

    tensor: Tensor
    started: set[str]


def targets_of(
    parameters: Mapping[str, Tensor], step: int, frame: Frame, store: Store, started: dict[Buffer, set[str]]
) -> dict[str, Target]:
    """Of all parameters that train; gradient buffers are made where there are none yet."""
    found: dict[str, Target] = {}
    buffers: dict[Buffer, dict[str, Tensor]] = {}
    for name, leaf in parameters.items():
        if not leaf.requires_grad:
            continue
        buffer = grad(frame.owner(name), step)
        if store.make(buffer):
            started[buffer] = set()
        if buffer not in buffers:
            buffers[buffer] = store.tensors(buffer)
        found[name] = Target(buffers[buffer][name], started[buffer])
    return found


def differentiate(
    roots: Sequence[GradientEdge],
    seeds: Sequence[Tensor],
    parameters: Mapping[str, Tensor],
    targets: Mapping[str, Target],
    entered: Sequence[Tensor],
    making: str,
    before: Callable[[], None] | None = None,
) -> None:
    """Let autograd find the gradients of what has `entered` and of parameters, whose own go to their targets.

    The first gradient of a step is copied, not added to zero. `making` says how those of products are made. `before` is
    called before each operation.
    """
    hooks = before_each(roots, before) if before is not None else []
    weights = {n: parameters[n] for n, target in targets.items() if parameters[n].dtype == target.tensor.dtype}
    products = find_products(roots, weights) if making != "whole" else {}
    for name, product in products.items():
        hooks.append(product.node.register_prehook(_maker(product, name, targets[name], making)))
    rest = [name for name in targets if name not in products]
    for name in rest:
        hooks += collect_into(targets[name], name, parameters[name])
    # What is not named as an input, autograd does not make.
    inputs = [*(parameters[name] for name in rest), *entered] if products else None
    torch.autograd.backward(roots, seeds, inputs=inputs)
    for hook in hooks:
        hook.remove()


def collect_into(target: Target, name: str, leaf: Tensor) -> list[RemovableHandle]:
    """Let autograd copy a leaf's next gradient to the target, or add it to what was started there.

    The gradient of a narrow leaf is made wide on its way, as the cast would do that the leaf makes unnecessary.
    """
    if name in target.started and leaf.dtype == target.tensor.dtype:
        leaf.grad = target.tensor
        return []
    return [leaf.register_post_accumulate_grad_hook(_taker(target, name))]  # type: ignore[no-untyped-call]


def before_each(roots: Iterable[GradientEdge], call: Callable[[], None]) -> list[RemovableHandle]:
    """Let autograd call something before each operation of a backward."""
    return [node.register_prehook(lambda grads: call()) for node in nodes_behind(roots)]


def _maker(product: Product, name: str, target: Target, making: str) -> Callable[[tuple[Tensor, ...]], None]:
    def make(grads: tuple[Tensor, ...]) -> None:
        if grads[0] is None:
            return
        if name in target.started:
            product.add(grads[0], target.tensor, making)
        else:
            product.put(grads[0], target.tensor)
        target.started.add(name)

    return make


def _taker(target: Target, name: str) -> Callable[[Tensor], None]:
    def take(leaf: Tensor) -> None:
        assert leaf.grad is not None
        if name in target.started:
            target.tensor.add_(leaf.grad)
        else:
            target.tensor.copy_(leaf.grad)
        target.started.add(name)
        leaf.grad = None

    return take
