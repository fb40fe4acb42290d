"""A plan into plans like it: other policies for some packs, other ends of packs, larger packs for forwards."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

from counterpoint.core.plan import Pack, Plan
from counterpoint.core.profile import Profile


def policy_variants(
    plan: Plan, profile: Profile, policies: Sequence[str], middle: int | None, width: int
) -> Iterator[Plan]:
    """One policy for some packs and another for the rest.

    Packs come in two orders: the last first, since what they save lives shortest, and those first whose forward takes
    longest for the bytes it saves. `middle` percent of them, give or take `width`, get the first policy; None starts
    from the share that the plan has.
    """
    free = [index for index in range(len(plan.backward_packs)) if not (plan.fused and index == _last(plan))]
    seen = {plan.activations}
    for first, second in combinations(policies, 2):
        share = middle if middle is not None else _share(plan, free, first)
        for order in (sorted(free, reverse=True), sorted(free, key=_thrift(plan, profile))):
            for percent in (share, share - width, share + width):
                chosen = set(order[: len(order) * min(max(percent, 0), 100) // 100])
                activations = _assigned(plan, free, chosen, first, second)
                if activations not in seen:
                    seen.add(activations)
                    yield replace(plan, activations=activations)


def forward_variants(plan: Plan, sizes: Sequence[int]) -> Iterator[Plan]:
    """Forward packs of at least so many layers, made of whole backward packs: what they save then fits in."""
    seen = {plan.forward_packs}
    for size in sizes:
        packs = _joined(plan, size)
        if packs not in seen:
            seen.add(packs)
            yield replace(plan, forward_packs=packs)


def ended_variants(plan: Plan, profile: Profile) -> Iterator[Plan]:
    """Packs that end a layer earlier or later, where most of their recomputation is spared; not within stages."""
    packs = plan.backward_packs
    as_backward = plan.forward_packs in (packs, packs[:-1])
    if plan.stages or not as_backward or "recompute" not in plan.activations:
        return
    spared = [layer.unread_ns.at(plan.microbatch_size) for layer in profile.layers]
    ends: list[int] = []
    for pack, following in pairwise(packs):
        first, last = ends[-1] + 1 if ends else 0, following.last - 1
        near = [end for end in (pack.last, pack.last - 1, pack.last + 1) if first <= end <= last]
        ends.append(max(near, key=spared.__getitem__))  # the first of equals
    moved = tuple(map(Pack, (0, *(end + 1 for end in ends)), (*ends, packs[-1].last)))
    if moved != packs:
        yield replace(plan, backward_packs=moved, forward_packs=moved[: len(plan.forward_packs)])


def _joined(plan: Plan, size: int) -> tuple[Pack, ...]:
    packs: list[Pack] = []
    for pack in plan.backward_packs[: _last(plan)] if plan.fused else plan.backward_packs:
        if packs and packs[-1].last - packs[-1].first + 1 < size:
            packs[-1] = Pack(packs[-1].first, pack.last)
        else:
            packs.append(pack)
    return tuple(packs)


def _last(plan: Plan) -> int:
    return len(plan.backward_packs) - 1


def _share(plan: Plan, free: list[int], policy: str) -> int:
    return sum(plan.activations[index] == policy for index in free) * 100 // max(1, len(free))


def _thrift(plan: Plan, profile: Profile) -> Callable[[int], float]:
    """The bytes that a pack saves for the time of its forward."""

    def bytes_per_ns(index: int) -> float:
        pack, size = plan.backward_packs[index], plan.microbatch_size
        layers = profile.layers[pack.first : pack.last + 1]
        time = sum(layer.forward_ns.at(size) for layer in layers)
        return sum(layer.saved_bytes.at(size) for layer in layers) / max(1, time)

    return bytes_per_ns


def _assigned(plan: Plan, free: list[int], chosen: set[int], first: str, second: str) -> tuple[str, ...]:
    activations = list(plan.activations)
    for index in free:
        activations[index] = first if index in chosen else second
    return tuple(activations)
