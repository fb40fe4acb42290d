"""The search: no plan of its grid is faster by more than it promises, policies mix where that pays, refusals."""

from dataclasses import replace
from itertools import product

import pytest

from counterpoint.core.errors import BudgetError
from counterpoint.core.machine import Device, Home, Link, Machine, Tier
from counterpoint.core.plan import Pack, Plan
from counterpoint.core.profile import Curve, LayerCost, Profile, ValueCost
from counterpoint.planner.bounds import least_ns
from counterpoint.planner.placement import Placement
from counterpoint.planner.search import Freedom, plan_of, search
from counterpoint.planner.variants import ended_variants, forward_variants, policy_variants

MIB, MS = 2**20, 10**6


def chain(num_layers: int = 12) -> Profile:
    """Odd layers are slow and save little, even ones are fast and save much."""
    layers = tuple(
        LayerCost(
            f"layer {i}",
            Curve.proportional((8 if i % 2 else 2) * MS),
            Curve.proportional((16 if i % 2 else 4) * MS),
            MS,
            MS,
            4 * MIB,
            4 * MIB,
            8 * MIB,
            saved_bytes=Curve.proportional((2 if i % 2 else 8) * MIB),
        )
        for i in range(num_layers)
    )
    return Profile(
        "uneven", layers, tuple(ValueCost(i, (i + 1,), Curve.proportional(MIB)) for i in range(num_layers - 1))
    )


def machine(capacity_bytes: int, bytes_per_s: int = 2 * 10**9) -> Machine:
    home = Home("disk", ("read",), ("write",))
    links = (Link("read", bytes_per_s), Link("write", bytes_per_s))
    return Machine("one", (Device("cpu", capacity_bytes, (home,)),), links, (Tier("disk", 10**12),))


FREEDOM = Freedom(8, (1, 2, 4, 8), pack_sizes=(1, 2))


@pytest.mark.parametrize("mib", [64, 100, 200])
@pytest.mark.parametrize("speed", [10**9, 4 * 10**9, 10**11])
def test_no_plan_of_one_policy_is_faster(mib: int, speed: int) -> None:
    profile, where = chain(), machine(mib * MIB, speed)
    found = search(profile, where, FREEDOM)
    for size, pack, policy in product((1, 2, 4, 8), (1, 2), ("evict", "recompute")):
        plan = plan_of(len(profile.layers), "harmony", FREEDOM, size, pack, policy)
        try:
            _, timeline = Placement(profile, where, plan, quick=True).simulated()
        except BudgetError:
            continue
        assert found.timeline.step_ns <= timeline.step_ns * 1016 // 1000


def test_packs_get_policies_of_their_own_where_that_is_faster() -> None:
    profile, where = chain(), machine(200 * MIB, 5 * 10**8)
    found = search(profile, where, FREEDOM)
    alone = [search(profile, where, replace(FREEDOM, activations=(policy,))) for policy in ("evict", "recompute")]
    assert set(found.plan.activations[:-1]) == {"evict", "recompute"}
    assert found.timeline.step_ns < min(other.timeline.step_ns for other in alone)


def test_what_was_found_is_what_a_simulation_of_its_plan_says() -> None:
    profile, where = chain(), machine(100 * MIB)
    found = search(profile, where, FREEDOM)
    program, timeline = Placement(profile, where, found.plan).fastest()
    assert (found.program, found.timeline) == (program, timeline)
    assert least_ns(profile, where, found.plan) <= timeline.step_ns


def test_refusals_name_a_budget_that_works() -> None:
    profile = chain()
    with pytest.raises(BudgetError) as refused:
        search(profile, machine(MIB), FREEDOM)
    smallest = refused.value.smallest_bytes
    assert smallest is not None
    search(profile, machine(smallest), FREEDOM)
    with pytest.raises(BudgetError):
        search(profile, machine(smallest - 1), FREEDOM)


def plan(pack: int = 1) -> Plan:
    return plan_of(9, "harmony", FREEDOM, 2, pack, "evict")


def test_forward_packs_join_whole_backward_packs() -> None:
    sizes = [[p.last - p.first + 1 for p in v.forward_packs] for v in forward_variants(plan(), (1, 2, 4, 100))]
    assert sizes == [[2, 2, 2, 2], [4, 4], [8]]
    assert [len(v.forward_packs) for v in forward_variants(plan(2), (3,))] == [2]


def test_policies_by_lateness_and_by_bytes_per_time() -> None:
    found = [v.activations for v in policy_variants(plan(), chain(9), ("evict", "recompute"), 50, 25)]
    late, thrifty = ("recompute",) * 4 + ("evict",) * 4, ("recompute", "evict") * 4
    assert (*late, "recompute") in found
    assert (*thrifty, "recompute") in found
    assert len(set(found)) == len(found)
    assert all(activations[-1] == "recompute" for activations in found)


def sparing(profile: Profile, layers: range) -> Profile:
    """Recomputation of these is half as long if they are the last of their pack."""
    costs = [
        replace(c, unread_ns=Curve.proportional(4 * MS)) if i in layers else c for i, c in enumerate(profile.layers)
    ]
    return replace(profile, layers=tuple(costs))


def test_packs_may_end_where_recomputation_is_spared() -> None:
    profile = sparing(chain(), range(3, 12, 4))
    freedom = replace(FREEDOM, schedules=("harmony",))
    plan = plan_of(12, "harmony", freedom, 1, 3, "recompute")
    assert [pack.last for pack in plan.backward_packs] == [2, 5, 8, 10, 11]
    (found,) = ended_variants(plan, profile)
    assert [pack.last for pack in found.backward_packs] == [3, 5, 7, 10, 11]
    assert found.forward_packs == found.backward_packs[:-1]
    assert least_ns(profile, machine(10**12), found) < least_ns(profile, machine(10**12), plan)


def test_ends_of_packs_stay_where_nothing_is_spared_or_they_are_not_free() -> None:
    profile = sparing(chain(), range(3, 12, 4))
    plan = plan_of(12, "harmony", FREEDOM, 1, 3, "recompute")
    kept = replace(plan, activations=("keep",) * len(plan.activations))
    larger = replace(plan, forward_packs=(Pack(0, 10),))
    for other, costs in ((plan, chain()), (kept, profile), (larger, profile)):
        assert list(ended_variants(other, costs)) == []


def test_the_search_ends_packs_where_recomputation_is_spared() -> None:
    profile = sparing(chain(), range(0, 12, 2))
    found = search(profile, machine(120 * MIB), Freedom(8, (1,), pack_sizes=(2, 4), activations=("recompute",)))
    ends = [pack.last for pack in found.plan.backward_packs[:-2]]
    assert ends
    assert all(end % 2 == 0 for end in ends)
