"""Room for freed tensors: as much as most computations can use, less where there is less, none if it costs too much."""

from dataclasses import replace

import pytest

from counterpoint.core.costs import Costs
from counterpoint.core.machine import Device, Home, Link, Machine, Tier
from counterpoint.core.plan import Pack, Plan
from counterpoint.core.profile import Curve, LayerCost, Profile, ValueCost
from counterpoint.core.task import Backward, Forward
from counterpoint.passes.residency import smallest_budgets, task_needs
from counterpoint.planner.freed_memory import beside_freed, settled_bytes
from counterpoint.planner.placement import Placement

MIB, MS = 2**20, 10**6
NUM_LAYERS, WORKSPACE = 12, 4 * MIB


def chain() -> Profile:
    """Small layers, and a last one that needs far more than they do."""
    layers = []
    for index in range(NUM_LAYERS):
        factor = 8 if index == NUM_LAYERS - 1 else 1
        sizes = (4 * factor * MIB, 4 * factor * MIB, 8 * MIB)
        cost = LayerCost(f"layer {index}", Curve.proportional(8 * MS), Curve.proportional(16 * MS), MS, MS, *sizes)
        work, fresh = Curve(((1, WORKSPACE * factor),)), Curve.proportional(20 * MS)
        layers.append(
            replace(
                cost, forward_workspace_bytes=work, backward_workspace_bytes=work, forward_fresh_ns=fresh,
                backward_fresh_ns=fresh,
            )
        )  # fmt: skip
    values = tuple(ValueCost(i, (i + 1,), Curve.proportional(MIB)) for i in range(NUM_LAYERS - 1))
    return Profile("small and large", tuple(layers), values)


def one_device(capacity_bytes: int, bytes_per_s: int) -> Machine:
    home = Home("disk", ("read",), ("write",))
    links = (Link("read", bytes_per_s), Link("write", bytes_per_s))
    return Machine("one", (Device("cpu", capacity_bytes, (home,)),), links, (Tier("disk", 10**12),))


PACKS = tuple(Pack(i, i) for i in range(NUM_LAYERS))
PLAN = Plan("harmony", 4, 1, PACKS, PACKS, ("recompute",) * NUM_LAYERS)


@pytest.mark.parametrize("spare", [0, WORKSPACE, 100 * MIB])
def test_computations_get_the_room_there_is(spare: int) -> None:
    profile = chain()
    least = smallest_budgets(Placement(profile, one_device(1, 1), PLAN).order, Costs(profile, PLAN))[0]
    machine = one_device(least + spare, 10**9)
    program, _ = Placement(profile, machine, PLAN).fastest()
    roomier, placed, _, freed = beside_freed(profile, machine, PLAN, program)
    assert freed == "wait"
    costs, before = Costs(roomier, PLAN), Costs(profile, PLAN)
    for task, need in task_needs(placed, costs, 0):
        assert need <= least + spare
        if isinstance(task, (Forward, Backward)) and task.last < NUM_LAYERS - 1:
            assert costs.workspace_bytes(task) == WORKSPACE * 7 // 2
        elif isinstance(task, (Forward, Backward)):
            assert costs.workspace_bytes(task) == before.workspace_bytes(task)  # more than enough already


def test_room_is_refused_where_it_costs_more_than_it_saves() -> None:
    """All but the room fits: with it, a slow disk would have to move what could have stayed."""
    profile = chain()
    everything = sum(cost.weight_bytes + cost.grad_bytes + cost.state_bytes for cost in profile.layers)
    machine = one_device(everything + 40 * MIB, 10**6)
    program, _ = Placement(profile, machine, PLAN).fastest()
    wide = replace(profile, layers=tuple(_wide(cost) for cost in profile.layers))
    _, same, _, freed = beside_freed(wide, machine, PLAN, program)
    assert freed == "leave"
    assert same is program


def test_freed_tensors_stay_where_there_is_plenty() -> None:
    profile, machine = chain(), one_device(2**40, 10**9)
    program, timeline = Placement(profile.with_fresh(0), machine, PLAN).fastest()
    assert beside_freed(profile, machine, PLAN, program) == (profile.with_fresh(0), program, timeline, "stay")
    settled = settled_bytes(profile, PLAN, program, 0, "stay")
    for spare, expected in ((0, "stay"), (-1, "wait")):
        machine = one_device(settled + spare, 10**9)
        assert beside_freed(profile, machine, PLAN, program)[3] == expected


def test_freed_tensors_leave_only_where_fresh_memory_is_cheap() -> None:
    """Room for them makes a slow disk move more: worth while if fresh memory takes longer than that."""
    profile = chain()
    everything = sum(cost.weight_bytes + cost.grad_bytes + cost.state_bytes for cost in profile.layers)
    machine = one_device(everything + 40 * MIB, 10**7)
    program, _ = Placement(profile, machine, PLAN).fastest()
    found = []
    for fresh_ns in (0, 1000 * MS):
        fresh = Curve.proportional(fresh_ns)
        layers = (replace(_wide(c), forward_fresh_ns=fresh, backward_fresh_ns=fresh) for c in profile.layers)
        found.append(beside_freed(replace(profile, layers=tuple(layers)), machine, PLAN, program))
    assert [freed for _, _, _, freed in found] == ["leave", "wait"]
    assert found[0][2].step_ns < found[1][2].step_ns


def test_what_stays_lies_beside_the_largest_computation() -> None:
    profile, largest = chain(), 8 * WORKSPACE
    program, timeline = Placement(profile, one_device(2**40, 10**9), PLAN).fastest()
    parts = settled_bytes(profile, PLAN, program, 0, "leave")
    assert parts >= timeline.peak_bytes()["device 0"]
    assert settled_bytes(profile, PLAN, program, 0, "stay") == parts + largest
    assert settled_bytes(profile, PLAN, program, 0, "wait") == parts + largest // 4


def _wide(cost: LayerCost) -> LayerCost:
    work = Curve(((1, 32 * MIB),))
    return replace(cost, forward_workspace_bytes=work, backward_workspace_bytes=work)
