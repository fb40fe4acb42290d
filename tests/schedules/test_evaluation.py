"""Evaluation programs: forwards alone, within any budget, and nothing of the training is written."""

from collections import Counter

import pytest

from counterpoint.core.costs import Costs
from counterpoint.core.homes import single_home
from counterpoint.core.memory import peak_bytes
from counterpoint.core.plan import Plan, equal_packs
from counterpoint.core.profile import Curve, LayerCost, Profile, ValueCost
from counterpoint.core.program import reads
from counterpoint.core.task import Buffer, Drop, Evict, Forward, Load
from counterpoint.passes.residency import place, smallest_budgets
from counterpoint.schedules import evaluation

NUM_LAYERS, NUM_MICROBATCHES = 6, 5
NOTHING, FEW = Curve.constant(0), Curve.constant(5)


def profile() -> Profile:
    """Six layers, the fourth frozen, the last tied to the first, and a value that skips four layers."""
    layers = [
        LayerCost(
            f"layer {i}", FEW, FEW, 1, 1, 0 if i == 3 else 40, 0 if i == 3 else 40, 0 if i == 3 else 80,
            40 if i == 3 else 0, FEW, FEW, FEW, (0,) if i == 5 else (),
        )
        for i in range(NUM_LAYERS)
    ]  # fmt: skip
    values = [ValueCost(i, (i + 1,), Curve.constant(10)) for i in range(NUM_LAYERS - 1)]
    return Profile("small", tuple(layers), (*values, ValueCost(0, (4,), Curve.constant(10))))


@pytest.mark.parametrize("share", [1.0, 1.3, 2.0, 10.0])
@pytest.mark.parametrize("fused", [False, True])
def test_evaluation_keeps_to_its_budget_and_writes_no_weight(share: float, fused: bool) -> None:
    packs = equal_packs(NUM_LAYERS, 2)
    plan = Plan("harmony", 2, 1, packs, packs[:-1] if fused else packs, ("recompute",) * 3)
    costs = Costs(profile(), plan)
    order = evaluation.write(plan, profile().outline(), NUM_MICROBATCHES)
    budget = int(smallest_budgets(order, costs)[0] * share)
    placed = place(order, costs, (budget,), single_home("disk", 1, NUM_LAYERS))
    part = placed.devices[0]
    tasks = [*part.prologue, *part.epilogue]
    assert part.body == ()
    assert peak_bytes(placed, costs, 0, steps=1) <= budget
    assert {task.buffer.kind for task in tasks if isinstance(task, Evict)} <= {"activation"}
    assert [task for task in tasks if isinstance(task, Forward)] == list(order.devices[0].prologue)
    _replay(placed.outline, tasks)
    loads = Counter(task.buffer for task in tasks if isinstance(task, Load) and task.buffer.kind != "activation")
    assert set(loads.values()) == {1} or share < 2, "weights come in once when there is room"


def _replay(outline, tasks) -> None:  # type: ignore[no-untyped-def]
    """Every forward finds what it reads on the device, and in the end the device is empty."""
    resident: set[Buffer] = set()
    for task in tasks:
        match task:
            case Load(buffer, _):
                resident.add(buffer)
            case Drop(buffer):
                resident.remove(buffer)
            case Forward(first, last, microbatch):
                assert set(reads(task, outline)) <= resident
                resident |= {Buffer("activation", v, microbatch) for v in outline.outputs(first, last)}
    assert resident == set()
