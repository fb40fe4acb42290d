"""A clean graph -> segments, cut where few bytes are live.

Every segment is built around at least one heavy node (a product or a lookup). Between two heavy nodes in a row the best
place to cut is the one with the fewest live bytes, so that there is one candidate per gap. A candidate is dropped when
it lies on a hill: when a layer of moderate size could lead from a much lower candidate before it to a much lower one
after it. What remains are the valleys: the residual stream of a transformer, the ends of residual units.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median

from torch import fx

from counterpoint.decomposer.duplication import written_families
from counterpoint.decomposer.nodes import extents, is_heavy, is_lookup, num_bytes, work, written
from counterpoint.decomposer.tracing import Trace

HILL = 1.2  # a candidate this many times above both sides is a hill
MAX_HEAVY = 10  # a layer that bridges a hill has at most this many products of about the same size
SAME_SIZE = 8  # products that differ by more than this factor are not counted together
MAX_SHARE = 0.5  # and at most this share of the model's parameters
TRIVIAL = 0.02  # a layer with less than this share of the median work and parameters joins its neighbour

Segment = tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """A place behind spine node `position`, and what is live there: bytes by node."""

    position: int
    live: dict[fx.Node, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.live.values())


@dataclass(frozen=True, slots=True)
class Spine:
    """The nodes to be cut, in order, with what they cost and where they must not be parted.

    `work_before` and `weight_before` are sums over all the nodes before a position: work, and bytes of parameters.
    """

    nodes: tuple[fx.Node, ...]
    work_before: tuple[float, ...]
    weight_before: tuple[float, ...]
    heavy: tuple[int, ...]
    unbreakable: frozenset[int]

    def work(self, first: int, last: int) -> float:
        """Of the nodes after `first` up to `last`."""
        return self.work_before[last + 1] - self.work_before[first + 1]

    def weight(self, first: int, last: int) -> float:
        return self.weight_before[last + 1] - self.weight_before[first + 1]


def cut(graph: fx.Graph, trace: Trace, duplicates: frozenset[fx.Node], batch_size: int) -> list[Segment]:
    spine = _spine(graph, trace, duplicates, batch_size)
    candidates = _candidates(spine, batch_size)
    valleys = [c for c in candidates if not _is_hill(c, candidates, spine)]
    positions = _without_trivial([c.position for c in valleys], {c.position: c.num_bytes for c in valleys}, spine)
    bounds = [-1, *positions, len(spine.nodes) - 1]
    return [spine.nodes[first + 1 : last + 1] for first, last in pairwise(bounds)]


def _spine(graph: fx.Graph, trace: Trace, duplicates: frozenset[fx.Node], batch_size: int) -> Spine:
    nodes = tuple(n for n in graph.nodes if n.op == "call_function" and n not in duplicates)
    return Spine(
        nodes,
        tuple(accumulate((work(node, batch_size) for node in nodes), initial=0)),
        tuple(accumulate((_parameter_bytes(node, trace) for node in nodes), initial=0)),
        tuple(position for position, node in enumerate(nodes) if is_heavy(node)),
        _unbreakable(graph, nodes),
    )


def _parameter_bytes(node: fx.Node, trace: Trace) -> int:
    return sum(num_bytes(source, 1) for source in node.all_input_nodes if source.name in trace.parameters)


def _unbreakable(graph: fx.Graph, nodes: Sequence[fx.Node]) -> frozenset[int]:
    """Positions between a tensor's making and the last write to it: no layer may write to another's result."""
    order = {node: position for position, node in enumerate(nodes)}
    found: set[int] = set()
    for family in {id(f): f for f in written_families(graph).values()}.values():
        members = set(family)
        writes = [order[n] for n in nodes if any(target in members for target in written(n))]
        made = [order[member] for member in family if member in order and member.users]
        if made and writes:
            found.update(range(min(made), max(writes)))
    return frozenset(found)


def _candidates(spine: Spine, batch_size: int) -> list[Cut]:
    """For each gap between heavy nodes, the last of the places with the fewest live bytes."""
    cuts = _cuts(spine, batch_size)
    best: list[Cut] = []
    for start, end in pairwise(spine.heavy):
        if is_lookup(spine.nodes[start]) and is_lookup(spine.nodes[end]):
            continue
        places = [cuts[position] for position in range(start, end) if position in cuts]
        if places:
            best.append(min(reversed(places), key=lambda place: place.num_bytes))
    return best


def _cuts(spine: Spine, batch_size: int) -> dict[int, Cut]:
    """All places to cut: nowhere that something live is no tensor, or of a size that depends on data."""
    order = {node: position for position, node in enumerate(spine.nodes)}
    last_use = {node: max((order[u] for u in node.users if u in order), default=-1) for node in spine.nodes}
    cuts: dict[int, Cut] = {}
    live: dict[fx.Node, int] = {}
    for position, node in enumerate(spine.nodes):
        known = {**live, node: num_bytes(node, batch_size)}
        live = {other: size for other, size in known.items() if last_use[other] > position}
        if position not in spine.unbreakable and all(extents(n.meta.get("val")) is not None for n in live):
            cuts[position] = Cut(position, live)
    return cuts


def _is_hill(candidate: Cut, candidates: Sequence[Cut], spine: Spine) -> bool:
    here = candidates.index(candidate)
    for left in reversed(candidates[:here]):
        if not _is_moderate(left.position, candidate.position, spine):
            return False
        for right in candidates[here + 1 :]:
            if not _is_moderate(left.position, right.position, spine):
                break
            if _towers_over(candidate, left, right):
                return True
    return False


def _towers_over(candidate: Cut, left: Cut, right: Cut) -> bool:
    """Compare live bytes, without those that only pass by all three."""
    passing = sum(size for node, size in candidate.live.items() if node in left.live and node in right.live)
    return candidate.num_bytes - passing > HILL * (max(left.num_bytes, right.num_bytes) - passing)


def _is_moderate(first: int, last: int, spine: Spine) -> bool:
    """Whether the nodes after `first` up to `last` could be one layer."""
    heavy = spine.heavy[bisect_right(spine.heavy, first) : bisect_right(spine.heavy, last)]
    works = [spine.work(position - 1, position) for position in heavy]
    num_large = sum(amount * SAME_SIZE >= max(works) for amount in works)
    return num_large <= MAX_HEAVY and spine.weight(first, last) <= MAX_SHARE * spine.weight_before[-1]


def _without_trivial(positions: list[int], live_bytes: dict[int, int], spine: Spine) -> list[int]:
    """Let layers that hardly cost anything join a neighbour, across the cut that more bytes would cross."""
    kept = list(positions)
    while trivial := _first_trivial(kept, spine):
        kept.remove(max(trivial, key=lambda position: live_bytes[position]))
    return kept


def _first_trivial(positions: list[int], spine: Spine) -> list[int]:
    """The inner bounds of the first trivial segment; none if there is no such segment."""
    bounds = [-1, *positions, len(spine.nodes) - 1]
    segments = list(pairwise(bounds))
    typical_work = median(spine.work(*segment) for segment in segments)
    typical_weight = median(spine.weight(*segment) for segment in segments)
    for first, last in segments:
        if spine.work(first, last) < TRIVIAL * typical_work and spine.weight(first, last) <= TRIVIAL * typical_weight:
            return [position for position in (first, last) if position in positions]
    return []
