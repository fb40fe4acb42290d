"""Plan -> Program: Harmony-PP, the wrap-around pipeline (PVLDB 2022, section 4).

Forward packs in ascending, then backward packs in descending order go round-robin over the devices; each runs all its
microbatches. The fill is one pack, not one stage.

>>> from counterpoint.core import outline, plan, text
>>> from counterpoint.schedules import write_program
>>> packs = plan.equal_packs(6, 1)
>>> chosen = plan.Plan("harmony_pp", 3, 1, packs, packs[:-1], ("recompute",) * 6, num_devices=3)
>>> print(text.grid(write_program(chosen, outline.chain_outline(6))))
0 | 0F0  0F1  0F2  3F0  3F1  3F2  4B0  4B1  4B2* 1B0  1B1  1B2*
1 |      1F0  1F1  1F2  4F0  4F1  4F2  3B0  3B1  3B2* 0B0  0B1  0B2*
2 |           2F0  2F1  2F2  5B0  5B1  5B2* 2B0  2B1  2B2*
"""

from counterpoint.core.outline import Outline
from counterpoint.core.plan import Pack, Plan
from counterpoint.core.program import Program
from counterpoint.schedules.harmony import grouped_body
from counterpoint.schedules.pieces import synchronous
from counterpoint.schedules.places import (
    Place,
    backward_tasks,
    forward_tasks,
    refuse_other_chain,
    shared_layers,
    updating_positions,
)


def write(plan: Plan, outline: Outline) -> Program:
    return synchronous(plan, outline, [grouped_body(place) for place in places(plan, outline)])


def places(plan: Plan, outline: Outline) -> list[Place]:
    """A layer is updated where its backward runs; whoever else needs the new weights loads them from home."""
    refuse_other_chain(plan, outline)
    if plan.num_replicas != 1:
        raise ValueError(f"harmony_pp has no replicas, not {plan.num_replicas}; use harmony for data parallelism")
    forwards, owned = _dealt(plan)
    _refuse_kept_elsewhere(plan, forwards, owned)
    pipeline = tuple(updating_positions(plan, outline, owned, everywhere=False))
    return [
        Place(
            plan,
            outline,
            device,
            0,
            forward_tasks(plan, forwards[device]),
            backward_tasks(plan, owned[device]),
            (device,),
            pipeline,
            shared_layers(plan, outline, owned, device, 0, everywhere=False),
        )
        for device in range(plan.num_devices)
    ]


def _dealt(plan: Plan) -> tuple[list[tuple[Pack, ...]], list[tuple[Pack, ...]]]:
    """The forward and the backward packs of each device, both in ascending order."""
    devices, first = range(plan.num_devices), len(plan.forward_packs)
    descending = plan.backward_packs[::-1]
    owned = [descending[(device - first) % plan.num_devices :: plan.num_devices] for device in devices]
    return [plan.forward_packs[device :: plan.num_devices] for device in devices], [packs[::-1] for packs in owned]


def _refuse_kept_elsewhere(plan: Plan, forwards: list[tuple[Pack, ...]], owned: list[tuple[Pack, ...]]) -> None:
    """What autograd saves cannot travel."""
    for home, packs in enumerate(owned):
        for pack in packs:
            runs = [d for d, others in enumerate(forwards) if any(o.first <= pack.first <= o.last for o in others)]
            if plan.policy(pack) != "recompute" and runs and runs != [home]:
                raise ValueError(
                    f"pack {pack.first}-{pack.last} keeps what autograd saves, but its forward runs on device "
                    f"{runs[0]} and its backward on device {home}; let it recompute"
                )
