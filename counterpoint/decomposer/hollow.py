"""A layer's graph -> the same for outputs that nobody will read: products that only they need are not made.

A recomputation wants what autograd keeps. The last layer of what is recomputed often ends in a product that is added to
what came in: no gradient needs its value, and the sum's own readers have read it long ago.
"""

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_PRODUCTS = (aten.addmm.default, aten.mm.default, aten.linear.default, aten.matmul.default)
_MADE = (aten.addmm.default, aten.mm.default)  # what these come to below autograd
_FORGETFUL = (
    aten.add.Tensor, aten.sub.Tensor, aten.view.default, aten.reshape.default, aten._unsafe_view.default,
    aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim, aten.clone.default,
    aten.contiguous.default, aten.to.dtype, aten._to_copy.default, aten.dropout.default, aten.sym_size.int,
)  # fmt: skip
"""Operations whose gradient does not depend on what they are given."""


class _Hollow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Autograd remembers products as ever; their content is zero."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MADE:
            left, right = args[-2:]
            return right.new_zeros((left.shape[0], right.shape[1]))
        return func(*args, **(kwargs or {}))


def hollow(product: Any, *args: Any, **kwargs: Any) -> Tensor:
    """A product with its place in autograd's graph and no content."""
    with _Hollow():  # type: ignore[no-untyped-call]
        result: Tensor = product(*args, **kwargs)
    return result


def hollowed(module: fx.GraphModule) -> fx.GraphModule | None:
    """None if all that the graph makes is wanted for gradients."""
    nodes = list(module.graph.nodes)
    unwanted = _unwanted(nodes)
    products = [node for node in nodes if node in unwanted and node.target in _PRODUCTS]
    if not products:
        return None
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node in products:
            copies[node].args = (node.target, *copies[node].args)
            copies[node].target = hollow
    return fx.GraphModule(module, graph)


def _unwanted(nodes: list[fx.Node]) -> set[fx.Node]:
    """Whose content nobody in the graph needs."""
    found: set[fx.Node] = set()
    for node in reversed(nodes):
        users = [user for user in node.users if user.op != "output"]
        if node.op == "call_function" and all(user in found and user.target in _FORGETFUL for user in users):
            found.add(node)
    return found
