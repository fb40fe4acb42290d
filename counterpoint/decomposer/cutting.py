"""A clean graph -> segments, cut where few bytes are live.

Every segment is built around at least one heavy node: a product with parameters, or a lookup in them. Between two
heavy nodes in a row the best place to cut is the one with the fewest live bytes, so that there is one candidate per
gap. A candidate is dropped when it lies on a hill: when a layer of moderate size could lead from a much lower candidate
before it to a much lower one after it. What remains are the valleys: the residual stream, the ends of residual units.
Where weights are many times as large as what a sample leaves on a hill, it is cut there too: what moves then is weight,
gradient and state, the smaller the better, and a pack need not end where a layer does.

Bytes are counted per sample, so that the cuts do not depend on the batch size of the example.
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

SAME_BYTES = 1.05  # places to cut that differ by less are equal
HILL = 1.2  # a candidate this many times above both sides is on a hill
SMALL_HILL = 4  # a hill is worth its cut if the weights on either side are this many times one sample of it
MAX_HEAVY = 8  # a layer that bridges a hill has at most this many products of about the same size
SAME_SIZE = 8  # products that differ by more than this factor are not counted together
MAX_SHARE = 0.5  # and at most this share of the model's parameters
TRIVIAL = 0.02  # a layer with less than this share of the median work and parameters joins its neighbour

Segment = tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """A place behind spine node `position`; the bytes per sample that are live there, by node, and the other bytes."""

    position: int
    live: dict[fx.Node, int]
    fixed_bytes: int = 0

    @property
    def sample_bytes(self) -> int:
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


def cut(graph: fx.Graph, trace: Trace, duplicates: frozenset[fx.Node]) -> list[Segment]:
    spine = _spine(graph, trace, duplicates)
    cuts = _without_trivial(_without_hills(_candidates(spine), spine), spine)
    bounds = [-1, *(cut.position for cut in cuts), len(spine.nodes) - 1]
    return [spine.nodes[first + 1 : last + 1] for first, last in pairwise(bounds)]


def _spine(graph: fx.Graph, trace: Trace, duplicates: frozenset[fx.Node]) -> Spine:
    nodes = tuple(n for n in graph.nodes if n.op == "call_function" and n not in duplicates)
    return Spine(
        nodes,
        tuple(accumulate((work(node) for node in nodes), initial=0)),
        tuple(accumulate((_parameter_bytes(node, trace) for node in nodes), initial=0)),
        _heavy(nodes, trace),
        _unbreakable(graph, nodes),
    )


def _heavy(nodes: Sequence[fx.Node], trace: Trace) -> tuple[int, ...]:
    """Positions of products and lookups that read a parameter, or what is computed from parameters alone."""
    derived: set[fx.Node] = set()
    found: list[int] = []
    for position, node in enumerate(nodes):
        weights = [source in derived or source.name in trace.parameters for source in node.all_input_nodes]
        if weights and all(weights):
            derived.add(node)
        elif any(weights) and is_heavy(node):
            found.append(position)
    return tuple(found)


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


def _candidates(spine: Spine) -> list[Cut]:
    """For each gap between heavy nodes, the last of the places with about the fewest live bytes."""
    cuts = _cuts(spine)
    best: list[Cut] = []
    for start, end in pairwise(spine.heavy):
        if is_lookup(spine.nodes[start]) and is_lookup(spine.nodes[end]):
            continue
        places = [cuts[position] for position in range(start, end) if position in cuts]
        if places:
            best.append(_lowest(places))
    return best


def _lowest(places: Sequence[Cut]) -> Cut:
    """Late rather than early: a norm or an activation belongs to what came before it, if that costs no more."""
    low = min(places, key=lambda place: (place.sample_bytes, place.fixed_bytes))
    return [
        place
        for place in places
        if place.sample_bytes <= SAME_BYTES * low.sample_bytes
        and place.fixed_bytes <= low.fixed_bytes
        and len(place.live) <= len(low.live)
    ][-1]


def _cuts(spine: Spine) -> dict[int, Cut]:
    """All places to cut: nowhere that something live is no tensor, or of a size that depends on data."""
    order = {node: position for position, node in enumerate(spine.nodes)}
    last_use = {node: max((order[u] for u in node.users if u in order), default=-1) for node in spine.nodes}
    loose = {node for node in spine.nodes if extents(node.meta.get("val")) is None}
    fixed = {node: num_bytes(node, 1) for node in spine.nodes}
    per_sample = {node: num_bytes(node, 2) - fixed[node] for node in spine.nodes}
    cuts: dict[int, Cut] = {}
    live: list[fx.Node] = []
    for position, node in enumerate(spine.nodes):
        live = [other for other in (*live, node) if last_use[other] > position]
        if position not in spine.unbreakable and loose.isdisjoint(live):
            growing = {other: per_sample[other] for other in live if per_sample[other]}
            cuts[position] = Cut(position, growing, sum(fixed[other] for other in live if not per_sample[other]))
    return cuts


def _without_hills(candidates: Sequence[Cut], spine: Spine) -> list[Cut]:
    """Drop hills, the highest first, as long as the layers that arise are moderate."""
    ends = [Cut(-1, {}), Cut(len(spine.nodes) - 1, {})]
    kept = [ends[0], *candidates, ends[1]]
    hills = [candidate for candidate in candidates if _is_hill(candidate, kept, spine)]
    for hill in sorted(hills, key=lambda hill: -hill.sample_bytes):
        here = kept.index(hill)
        before, after = kept[here - 1].position, kept[here + 1].position
        weight = min(spine.weight(before, hill.position), spine.weight(hill.position, after))
        if _is_moderate(before, after, spine) and hill.sample_bytes * SMALL_HILL > weight:
            kept.pop(here)
    return kept[1:-1]


def _is_hill(candidate: Cut, cuts: Sequence[Cut], spine: Spine) -> bool:
    here = cuts.index(candidate)
    for left in reversed(cuts[:here]):
        if not _is_moderate(left.position, candidate.position, spine):
            return False
        for right in cuts[here + 1 :]:
            if not _is_moderate(left.position, right.position, spine):
                break
            if _towers_over(candidate, left, right):
                return True
    return False


def _towers_over(candidate: Cut, left: Cut, right: Cut) -> bool:
    """Compare live bytes, without those that only pass by all three.

    Where a single tensor is live the model has a waist: that only gives way to waists.
    """
    if len(candidate.live) == 1 and not (len(left.live) == len(right.live) == 1):
        return False
    passing = sum(size for node, size in candidate.live.items() if node in left.live and node in right.live)
    return candidate.sample_bytes - passing > HILL * (max(left.sample_bytes, right.sample_bytes) - passing)


def _is_moderate(first: int, last: int, spine: Spine) -> bool:
    """Whether the nodes after `first` up to `last` could be one layer."""
    heavy = spine.heavy[bisect_right(spine.heavy, first) : bisect_right(spine.heavy, last)]
    works = [spine.work(position - 1, position) for position in heavy]
    num_large = sum(amount * SAME_SIZE >= max(works) for amount in works)
    return num_large <= MAX_HEAVY and spine.weight(first, last) <= MAX_SHARE * spine.weight_before[-1]


def _without_trivial(cuts: list[Cut], spine: Spine) -> list[Cut]:
    """Let layers that hardly cost anything join a neighbour, across the cut that more bytes would cross."""
    kept = list(cuts)
    while trivial := _first_trivial(kept, spine):
        kept.remove(max(trivial, key=lambda cut: cut.sample_bytes))
    return kept


def _first_trivial(cuts: Sequence[Cut], spine: Spine) -> list[Cut]:
    """The cuts around the first trivial segment; none if there is no such segment."""
    segments = list(pairwise([-1, *(cut.position for cut in cuts), len(spine.nodes) - 1]))
    typical_work = median(spine.work(*segment) for segment in segments)
    typical_weight = median(spine.weight(*segment) for segment in segments)
    for segment in segments:
        if spine.work(*segment) < TRIVIAL * typical_work and spine.weight(*segment) <= TRIVIAL * typical_weight:
            return [cut for cut in cuts if cut.position in segment]
    return []
