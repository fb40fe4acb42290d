"""What moves between device and home: nothing where all fits, ever less as memory grows; the least memory."""

import importlib.util
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.core.check import check
from counterpoint.core.costs import Costs
from counterpoint.core.errors import BudgetError
from counterpoint.core.homes import single_home
from counterpoint.core.plan import POLICIES, SCHEDULES, Plan, equal_packs
from counterpoint.core.profile import Curve, LayerCost, Profile, ValueCost
from counterpoint.core.program import Program
from counterpoint.core.task import Evict, Load, weight
from counterpoint.passes.residency import place, smallest_budgets
from counterpoint.schedules import write_program

PIPELINES = ("model_parallel", "gpipe", "flush", "2bw")
ENOUGH = 2**40
CASES = [
    (schedule, policy)
    for schedule in SCHEDULES
    for policy in POLICIES
    if policy == "recompute" or schedule != "harmony_pp"
]


def _benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "residency_optimality.py"
    spec = importlib.util.spec_from_file_location("residency_optimality", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


benchmark = _benchmark()


def chain(num_layers: int) -> Profile:
    layers = tuple(
        LayerCost(
            f"layer {i}", Curve.constant(10), Curve.constant(20), 1, 1, 100 + i, 100 + i, 200 + i,
            saved_bytes=Curve.constant(50 + i), backward_workspace_bytes=Curve.constant(7),
        )
        for i in range(num_layers)
    )  # fmt: skip
    return Profile(
        "chain", layers, tuple(ValueCost(i, (i + 1,), Curve.constant(30 + i)) for i in range(num_layers - 1))
    )


def plan_of(schedule: str, policy: str, num_layers: int = 6, m: int = 4, num_devices: int = 2) -> Plan:
    packs = equal_packs(num_layers, 1)
    stages = equal_packs(num_layers, num_layers // num_devices) if schedule in PIPELINES else ()
    alone = not stages and schedule != "harmony_pp"
    policies = (policy,) * num_layers
    return Plan(schedule, m, 1, packs, packs, policies, 1 if alone else num_devices, stages=stages)


def kept(plan: Plan) -> frozenset[int]:
    return frozenset(range(plan.num_layers)) if "keep" in plan.activations else frozenset()


def placed(profile: Profile, plan: Plan, budgets: Sequence[int], policy: str = "planned") -> Program:
    program, costs = write_program(plan, profile.outline()), Costs(profile, plan)
    homes = single_home("host", plan.num_devices, plan.num_layers)
    return place(program, costs, budgets, homes, policy, kept(plan))


def moved_bytes(program: Program, costs: Costs) -> list[int]:
    """Bytes to and from home in the body of each device."""
    return [
        sum(costs.buffer_bytes(task.buffer) for task in part.body if isinstance(task, (Load, Evict)))
        for part in program.devices
    ]


@pytest.mark.parametrize("residency", ["planned", "lru"])
@pytest.mark.parametrize(("schedule", "policy"), [case for case in CASES if case[0] != "harmony_pp"])
def test_where_everything_fits_nothing_moves(schedule: str, policy: str, residency: str) -> None:
    profile, plan = chain(6), plan_of(schedule, policy)
    program = placed(profile, plan, (ENOUGH,) * plan.num_devices, residency)
    assert moved_bytes(program, Costs(profile, plan)) == [0] * plan.num_devices


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_the_wrap_around_pipeline_moves_only_weights_that_are_updated_elsewhere(num_devices: int) -> None:
    """A layer's backward may run on another device than its forward: the new weights go there through home."""
    profile, plan = chain(6), plan_of("harmony_pp", "recompute", num_devices=num_devices)
    program = placed(profile, plan, (ENOUGH,) * num_devices)
    elsewhere = [layer for layer in range(6) if (6 + 5 - layer - layer) % num_devices]
    tasks = [task for part in program.devices for task in part.body]
    assert sorted(t.buffer.owner for t in tasks if isinstance(t, Evict)) == elsewhere
    assert sorted(t.buffer.owner for t in tasks if isinstance(t, Load)) == elsewhere
    assert all(t.buffer == weight(t.buffer.owner, 1) for t in tasks if isinstance(t, Evict))


@pytest.mark.parametrize("residency", ["planned", "lru"])
@pytest.mark.parametrize(("schedule", "policy"), CASES)
def test_the_smallest_budget_is_exactly_that(schedule: str, policy: str, residency: str) -> None:
    profile, plan = chain(6), plan_of(schedule, policy)
    with pytest.raises(BudgetError) as refused:
        placed(profile, plan, (1,) * plan.num_devices, residency)
    smallest = refused.value.smallest_bytes
    assert smallest is not None
    assert f"smallest budget that fits: {smallest} bytes" in str(refused.value)
    program = placed(profile, plan, (smallest,) * plan.num_devices, residency)
    assert check(program, Costs(profile, plan)) == ()
    with pytest.raises(BudgetError) as again:
        placed(profile, plan, (smallest - 1,) * plan.num_devices, residency)
    assert again.value.smallest_bytes == smallest


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_room_for_overlap_never_needs_more_memory(schedule: str, ahead: int) -> None:
    profile, plan = chain(6), plan_of(schedule, "recompute")
    program, costs = write_program(plan, profile.outline()), Costs(profile, plan)
    homes = single_home("host", plan.num_devices, plan.num_layers)
    least = smallest_budgets(program, costs)
    assert check(place(program, costs, least, homes, ahead=ahead), costs) == ()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.sampled_from(SCHEDULES), st.integers(2, 8))
def test_traffic_falls_as_the_budget_grows(seed: int, schedule: str, num_layers: int) -> None:
    rng = random.Random(seed)
    profile = benchmark.random_profile(rng, num_layers)
    plan = benchmark.random_plan(rng, schedule, num_layers)
    program, costs = write_program(plan, profile.outline()), Costs(profile, plan)
    homes = single_home("host", plan.num_devices, num_layers)
    least = max(smallest_budgets(program, costs))
    most = least + sum(3 * layer.weight_bytes + layer.saved_bytes.at(1) for layer in profile.layers)
    budgets = sorted(rng.randint(least, most) for _ in range(5))
    moved = [moved_bytes(place(program, costs, (b,) * plan.num_devices, homes), costs) for b in (least, *budgets)]
    for device in range(plan.num_devices):
        column = [row[device] for row in moved]
        assert column == sorted(column, reverse=True)


def test_traffic_falls_for_a_large_body_too() -> None:
    """Byte by byte around one budget, and then in steps up to everything: bodies beyond the fine ladder."""
    profile, plan = chain(12), plan_of("harmony", "recompute", 12, 8)
    program, costs, homes = write_program(plan, profile.outline()), Costs(profile, plan), single_home("host", 1, 12)
    least = max(smallest_budgets(program, costs))
    budgets = [*range(least + 500, least + 520), *range(least + 600, least + 9000, 400)]
    moved = [moved_bytes(place(program, costs, (budget,), homes), costs)[0] for budget in budgets]
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] == 0 < moved[0]


def test_a_narrow_old_version_takes_its_own_bytes() -> None:
    """In the update, where both versions and all else of a layer are there; and where nothing has to move."""
    wide, plan = chain(6), plan_of("2bw", "recompute")
    narrow = replace(wide, layers=tuple(replace(c, old_bytes=c.weight_bytes // 2) for c in wide.layers))
    assert _least(wide, plan) == (102 + 102 + 102 + 202, 105 + 105 + 105 + 205)
    assert _least(narrow, plan) == (102 + 51 + 102 + 202, 105 + 52 + 105 + 205)
    saved = [sum(c.weight_bytes - c.old_bytes for c in narrow.layers[first : first + 3]) for first in (0, 3)]
    for device in (0, 1):
        assert _still(wide, plan, device) - _still(narrow, plan, device) == saved[device]


def _least(profile: Profile, plan: Plan) -> tuple[int, ...]:
    return smallest_budgets(write_program(plan, profile.outline()), Costs(profile, plan))


def _still(profile: Profile, plan: Plan, device: int) -> int:
    """The least memory with which a device moves nothing."""
    low, high = max(_least(profile, plan)), 10**4
    while low < high:
        middle = (low + high) // 2
        moves = moved_bytes(placed(profile, plan, (middle,) * plan.num_devices), Costs(profile, plan))[device]
        low, high = (middle + 1, high) if moves else (low, middle)
    return low
