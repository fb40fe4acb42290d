"""A clean graph -> the nodes that every layer computes for itself instead of being sent their results.

Positions, masks and rotary tables follow from the batch and from buffers alone. Where computing them is cheap, each
layer that needs them does, and nothing of them is carried from layer to layer.
"""

from collections.abc import Iterable

from torch import Tensor, fx

from counterpoint.decomposer.nodes import NOMINAL_BATCH_SIZE, aliased, is_random, num_bytes, work, written
from counterpoint.decomposer.tracing import Trace

MAX_WORK_SHARE = 0.05  # of the whole model's work, summed over all uses
MAX_SOURCE_RATIO = 8  # do not hand a layer an image because it needs its mean


def duplicated(graph: fx.Graph, trace: Trace) -> frozenset[fx.Node]:
    """Nodes without parameters, randomness or writes, whose results are cheaper to compute than to carry."""
    pure = _pure_nodes(graph, trace)
    total = sum(work(node) for node in graph.nodes if node.op == "call_function")
    chosen: dict[fx.Node, None] = {}
    for node in pure:
        uses = [user for user in node.users if user not in pure]
        if uses and _is_worth_it(node, len(uses), pure, trace, total):
            chosen.update(dict.fromkeys(_closure(node, pure)))
    return frozenset(chosen)


def written_families(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Each node that shares memory with one that is written to, with all the nodes it shares memory with."""
    leader: dict[fx.Node, fx.Node] = {}
    family: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        leader[node], family[node] = node, [node]
        for source in aliased(node):
            _join(leader[source], leader[node], leader, family)
    targets = dict.fromkeys(leader[target] for node in graph.nodes for target in written(node))
    return {member: family[target] for target in targets for member in family[target]}


def _join(kept: fx.Node, gone: fx.Node, leader: dict[fx.Node, fx.Node], family: dict[fx.Node, list[fx.Node]]) -> None:
    if kept is not gone:
        for member in family.pop(gone):
            leader[member] = kept
            family[kept].append(member)


def _pure_nodes(graph: fx.Graph, trace: Trace) -> dict[fx.Node, None]:
    shared = written_families(graph)
    pure: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            fits = node.name not in trace.parameters
        else:
            fits = all(source in pure for source in node.all_input_nodes) and not is_random(node)
        if fits and node not in shared and node.op != "output":
            pure[node] = None
    return {node: None for node in pure if node.op != "placeholder"}


def _is_worth_it(node: fx.Node, num_uses: int, pure: Iterable[fx.Node], trace: Trace, total: float) -> bool:
    if not isinstance(node.meta.get("val"), Tensor):
        return True
    closure = _closure(node, pure)
    sources = dict.fromkeys(s for n in closure for s in n.all_input_nodes if s.name in trace.batch)
    is_cheap = num_uses * sum(work(n) for n in closure) <= MAX_WORK_SHARE * total
    source_bytes = sum(num_bytes(source, NOMINAL_BATCH_SIZE) for source in sources)
    return is_cheap and source_bytes <= MAX_SOURCE_RATIO * num_bytes(node, NOMINAL_BATCH_SIZE)


def _closure(node: fx.Node, pure: Iterable[fx.Node]) -> list[fx.Node]:
    """The node and all pure nodes it is computed from."""
    found = {node: None}
    stack = [node]
    while stack:
        for source in stack.pop().all_input_nodes:
            if source in pure and source not in found:
                found[source] = None
                stack.append(source)
    return list(found)
