"""Segments of a graph -> layers: one graph per segment, its code shared by all segments with the same graph."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import torch
from torch import Tensor, fx, nn

from counterpoint.decomposer.chain import Extent
from counterpoint.decomposer.hollow import hollowed
from counterpoint.decomposer.nodes import BATCH_SIZE, extents, written_placeholders
from counterpoint.decomposer.tracing import Trace

Code = dict[str, tuple[fx.GraphModule, fx.GraphModule | None]]


@dataclass(frozen=True, slots=True)
class GraphBody:
    """A layer's graph. Its code takes parameters, buffers, constants and inputs, in this order."""

    module: fx.GraphModule
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    mutates: tuple[str, ...]
    constants: tuple[Tensor, ...]
    digest: str

    def run(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        mutated = {name: buffers[name].clone() for name in self.mutates}
        outputs = self.module.forward(
            *[parameters[name] for name in self.parameters],
            *[mutated.get(name, buffers[name]) for name in self.buffers],
            *self.constants,
            *inputs,
        )
        return outputs, mutated


@dataclass(frozen=True, slots=True)
class Piece:
    """A segment with the duplicated nodes it needs, and what it takes from outside, by kind."""

    nodes: tuple[fx.Node, ...]
    parameters: tuple[fx.Node, ...]
    buffers: tuple[fx.Node, ...]
    constants: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    wants_batch_size: bool


def piece(
    segment: Sequence[fx.Node], duplicates: frozenset[fx.Node], trace: Trace, fallback: fx.Node, loss: fx.Node
) -> Piece:
    """`fallback` is a batch tensor to take the batch size from when no other input knows it."""
    nodes = _with_duplicates(segment, duplicates)
    inside = dict.fromkeys(nodes)
    outside = list(dict.fromkeys(s for n in nodes for s in n.all_input_nodes if s not in inside))
    wants = any(source.name == BATCH_SIZE for source in outside)
    inputs = [s for s in outside if s.name in trace.batch or s.op == "call_function"]
    if wants and not any(_batch_dimension(node) for node in inputs):
        inputs.append(fallback)
    members = set(segment)
    return Piece(
        tuple(nodes),
        tuple(s for s in outside if s.name in trace.parameters),
        tuple(s for s in outside if s.name in trace.buffers),
        tuple(s for s in outside if s.name in trace.constants),
        tuple(inputs),
        tuple(n for n in segment if n is loss or any(_is_later(user, members, duplicates) for user in n.users)),
        wants,
    )


def _is_later(user: fx.Node, members: set[fx.Node], duplicates: frozenset[fx.Node]) -> bool:
    return user not in members and user not in duplicates and user.op != "output"


def _with_duplicates(segment: Sequence[fx.Node], duplicates: frozenset[fx.Node]) -> list[fx.Node]:
    """The segment and, in the graph's order, all it needs of the duplicated nodes and of the subgraphs it calls."""
    found = dict.fromkeys(segment)
    stack = list(segment)
    while stack:
        for source in stack.pop().all_input_nodes:
            if source not in found and (source in duplicates or source.op == "get_attr"):
                found[source] = None
                stack.append(source)
    return [node for node in segment[0].graph.nodes if node in found] if len(found) > len(segment) else list(segment)


def separate_uses(part: Piece, shared: Sequence[fx.Node]) -> list[tuple[fx.Node, fx.Node | None]]:
    """The inputs, each with the one user it is for, or None for all; `shared` nodes get one per user."""
    uses: list[tuple[fx.Node, fx.Node | None]] = []
    for source in part.inputs:
        users = [node for node in part.nodes if source in node.all_input_nodes]
        if source in shared and len(users) > 1:
            uses.extend((source, user) for user in users)
        else:
            uses.append((source, None))
    return uses


def body(
    part: Piece, uses: Sequence[tuple[fx.Node, fx.Node | None]], trace: Trace, names: Mapping[str, str], code: Code
) -> tuple[GraphBody, GraphBody | None]:
    """Generate the piece's code, or find the same among that of earlier pieces; and a hollow one if that saves work."""
    graph, inner = _graph(part, uses)
    text = graph.python_code("self").src + "".join(module.code for module in inner.values())
    if text not in code:
        root = nn.Module()
        for name, module in inner.items():
            setattr(root, name, module)
        module = fx.GraphModule(root, graph)
        code[text] = module, hollowed(module)
    module, lean = code[text]
    targets = [target for node in part.nodes for target in written_placeholders(node)]
    made = GraphBody(
        module,
        tuple(names[trace.parameters[node.name]] for node in part.parameters),
        tuple(names[trace.buffers[node.name]] for node in part.buffers),
        tuple(names[trace.buffers[node.name]] for node in part.buffers if node in targets),
        tuple(trace.constants[node.name] for node in part.constants),
        blake2b(text.encode(), digest_size=16).hexdigest(),
    )
    return made, None if lean is None else replace(made, module=lean)


def _graph(part: Piece, uses: Sequence[tuple[fx.Node, fx.Node | None]]) -> tuple[fx.Graph, dict[str, fx.GraphModule]]:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for kind, sources in (("p", part.parameters), ("b", part.buffers), ("c", part.constants)):
        for position, source in enumerate(sources):
            copies[source] = graph.placeholder(f"{kind}{position}")
    private: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
    for position, (source, user) in enumerate(uses):
        taken = graph.placeholder(f"x{position}")
        copies.setdefault(source, taken)
        if user is not None:
            private[source, user] = taken
    if part.wants_batch_size:
        size = next(node for node in part.nodes[0].graph.nodes if node.name == BATCH_SIZE)
        copies[size] = _measure(graph, part, copies)
    inner: dict[str, fx.GraphModule] = {}
    for node in part.nodes:
        if node.op == "get_attr":
            name = f"inner{len(inner)}"
            inner[name] = getattr(node.graph.owning_module, str(node.target))
            copies[node] = graph.create_node("get_attr", name)
        else:
            copies[node] = _copy(graph, node, copies, private)
    graph.output(tuple(copies[node] for node in part.outputs))
    return graph, inner


def _copy(
    graph: fx.Graph,
    node: fx.Node,
    copies: Mapping[fx.Node, fx.Node],
    private: Mapping[tuple[fx.Node, fx.Node], fx.Node],
) -> fx.Node:
    """A node without its name, for equal graphs to have equal code."""

    def copied(source: fx.Node) -> fx.Node:
        return private.get((source, node), copies[source])

    args, kwargs = fx.map_arg(node.args, copied), fx.map_arg(node.kwargs, copied)
    return graph.create_node(node.op, node.target, args, kwargs)


def _measure(graph: fx.Graph, part: Piece, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """The batch size, read off the first input that knows it."""
    source = next(node for node in part.inputs if _batch_dimension(node))
    dimension, extent = _batch_dimension(source) or (0, Extent(0, 1))
    size = graph.call_function(torch.ops.aten.sym_size.int, (copies[source], dimension))
    if extent.fixed:
        size = graph.call_function(operator.sub, (size, extent.fixed))
    if extent.per_sample != 1:
        size = graph.call_function(operator.floordiv, (size, extent.per_sample))
    return size


def _batch_dimension(node: fx.Node) -> tuple[int, Extent] | None:
    for dimension, extent in enumerate(extents(node.meta.get("val")) or ()):
        if extent.per_sample:
            return dimension, extent
    return None
