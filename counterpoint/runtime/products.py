"""Products in a layer's graph -> gradients of their weights, made some rows at a time where they are kept.

Autograd makes such a gradient whole and adds it to what is there: for the head of a language model that is once more as
much memory as its weights, for every microbatch. The rows of a product can be made apart from one another, and each
panel of them is added while it is still in the cache; or the product adds to what is there by itself. Whether the bits
are the same depends on the kernels and on the number of samples, so it is tried out beforehand.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

PANEL_BYTES = 4 << 20
_WHOLE_ROWS = 64  # panels begin where the kernels' own blocks of rows may begin
_KINDS = {"AddmmBackward0": ("_saved_mat1", 2), "MmBackward0": ("_saved_self", 1)}  # its values, and the weight's place


@dataclass(frozen=True, slots=True)
class Product:
    """Values times a weight that nothing else in the graph uses: x W, or x Wᵀ if it is `turned`."""

    node: Node
    turned: bool

    def put(self, grad: Tensor, target: Tensor) -> None:
        """The weight's gradient, for this gradient of the product."""
        left, right = self._factors(grad)
        torch.mm(left.t(), right, out=target)

    def add(self, grad: Tensor, target: Tensor, making: str) -> None:
        left, right = self._factors(grad)
        room = None if making == "added" else _room(left, right)
        for rows in _panels(left, right):
            if room is None:
                target[rows].addmm_(left[:, rows].t(), right)
            else:
                target[rows].add_(torch.mm(left[:, rows].t(), right, out=room[: rows.stop - rows.start]))

    def try_out(self, grad: Tensor) -> str:
        """The best making that has the bits of the whole, which this makes to compare."""
        left, right = self._factors(grad)
        whole, found = left.t() @ right, "added"
        for rows in _panels(left, right):
            panel = left[:, rows].t() @ right
            if not torch.equal(panel, whole[rows]):
                return "whole"
            before = torch.randn_like(panel) * panel.std()
            if not torch.equal(before + panel, torch.addmm(before, left[:, rows].t(), right)):
                found = "panels"
        return found

    def _factors(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """What autograd multiplies here: the first is transposed."""
        values: Tensor = getattr(self.node, _KINDS[self.node.name()][0])
        return (grad, values) if self.turned else (values, grad)


def find_products(roots: Iterable[GradientEdge], weights: Mapping[str, Tensor]) -> dict[str, Product]:
    """By the name of the weight. Something else than the weight must want a gradient, or autograd would not come by."""
    names = {id(weight): name for name, weight in weights.items() if _is_matrix(weight)}
    found: dict[str, Product] = {}
    uses: Counter[Node] = Counter()
    candidates: list[Node] = []
    for node in nodes_behind(roots):
        uses.update(following for following, _ in node.next_functions if following is not None)
        if node.name() in _KINDS and getattr(node, "_saved_alpha", 1) == 1:
            candidates.append(node)
    for node in candidates:
        place = _KINDS[node.name()][1]
        path = _path(node.next_functions[place][0])
        name = names.get(id(getattr(path[-1], "variable", None))) if path else None
        others = any(following is not None for i, (following, _) in enumerate(node.next_functions) if i != place)
        if name is not None and others and all(uses[step] == 1 for step in path):
            found[name] = Product(node, turned=len(path) == 2)
    return found


def nodes_behind(roots: Iterable[GradientEdge]) -> tuple[Node, ...]:
    """All nodes of a graph, each once."""
    known: dict[Node, None] = {}
    waiting = [root.node for root in roots]
    while waiting:
        node = waiting.pop()
        if node not in known:
            known[node] = None
            waiting += [following for following, _ in node.next_functions if following is not None]
    return tuple(known)


def _path(node: Node | None) -> list[Node]:
    """From a product to a leaf: at once, or through a transposition."""
    if node is None:
        return []
    if node.name() == "TBackward0":
        return [node, *(following for following, _ in node.next_functions if following is not None)]
    return [node]


def _is_matrix(weight: Tensor) -> bool:
    return weight.dim() == 2 and min(weight.shape) > 1 and weight.is_contiguous() and weight.is_floating_point()


def _panels(left: Tensor, right: Tensor) -> Iterator[slice]:
    """The rows of leftᵀ right, some at a time."""
    num_rows, rows = left.shape[1], _panel_rows(right)
    return (slice(begin, min(begin + rows, num_rows)) for begin in range(0, num_rows, rows))


def _room(left: Tensor, right: Tensor) -> Tensor:
    return right.new_empty((min(_panel_rows(right), left.shape[1]), right.shape[1]))


def _panel_rows(right: Tensor) -> int:
    return max(1, PANEL_BYTES // (right.shape[1] * right.element_size() * _WHOLE_ROWS)) * _WHOLE_ROWS
