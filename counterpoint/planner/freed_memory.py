"""A placed plan -> what becomes of freed tensors, and the plan placed with room for those that wait for the next ones.

A tensor whose pages must come from the operating system may cost a transformer's layer more than half its time again;
the profile has measured it. Whether memory to spare is better spent on pages that wait or on bytes that are not moved,
the simulation tells.
"""

from contextlib import suppress
from dataclasses import replace
from typing import Literal

from counterpoint.core.costs import Costs
from counterpoint.core.errors import BudgetError
from counterpoint.core.machine import Machine
from counterpoint.core.memory import peaks_apart
from counterpoint.core.plan import Plan
from counterpoint.core.profile import Curve, LayerCost, Profile
from counterpoint.core.program import Program
from counterpoint.core.task import PER_LAYER, Backward, Forward, Task, saved
from counterpoint.core.timeline import Timeline
from counterpoint.passes.residency import task_needs
from counterpoint.planner.placement import STEPS, Placement
from counterpoint.simulator import simulate

Freed = Literal["leave", "wait", "stay"]  # at once; in the heap, if they are small enough for it; all of them
UNDECIDED_FRESH_PERCENT = 50
_GAPS_PERCENT = 25  # of what the largest computation has in hand, where no other microbatch lies in the gaps it leaves
_ROOMS = {False: ((350, 20), (150, 40)), True: ((200, 10), (120, 25))}
"""Room in percent of what most computations have in hand, and what percentage of it still comes from the system then;
for heaps that are not `tidy`, and those that are. A heap was seen to settle at the first; at the second it is cut back
every now and then."""


def beside_freed(
    profile: Profile, machine: Machine, plan: Plan, program: Program, steps: int = STEPS
) -> tuple[Profile, Program, Timeline, Freed]:
    """What the plan is placed by then; freed tensors leave if there is no room, or it costs more than it saves."""
    if _has_plenty(profile, machine, plan, program):
        return _as_it_is(profile, machine, plan, program, "stay", steps)
    found = [_as_it_is(profile, machine, plan, program, "leave", steps)]
    if not profile.has_fresh:  # an accelerator's allocator keeps what was freed, and gives it back where it is wanted
        return found[0]
    for room_percent, fresh_percent in _ROOMS[profile.tidy_heap] if plan.residency == "planned" else ():
        roomier = _with_room(profile.with_fresh(fresh_percent), machine, plan, program, room_percent)
        with suppress(BudgetError):
            found.append((roomier, *Placement(roomier, machine, plan).fastest(steps), "wait"))
    return min(reversed(found), key=lambda row: row[2].step_ns)


def _as_it_is(
    profile: Profile, machine: Machine, plan: Plan, program: Program, freed: Freed, steps: int
) -> tuple[Profile, Program, Timeline, Freed]:
    same = profile.with_fresh(100 if freed == "leave" else 0)
    return same, program, simulate(program, Costs(same, plan), machine, steps), freed


def settled_bytes(profile: Profile, plan: Plan, program: Program, device: int, freed: Freed) -> int:
    """What a device's regions and tensors come to while nothing makes them give back what is free.

    What regions held does not go to tensors, nor the other way: their peaks add up. Where freed tensors stay or wait,
    not every gap that one left suits the next; least of all where microbatches live side by side, and tensors of one
    come to lie where another's largest computation was.
    """
    kinds = PER_LAYER | {"saved"} if freed == "wait" else PER_LAYER
    costs = Costs(profile, plan)
    settled = sum(peaks_apart(program, costs, device, kinds))
    if freed == "leave":
        return settled
    largest = max((_in_hand(task, costs) for task in program.devices[device].body), default=0)
    side_by_side = freed == "stay" and program.num_microbatches > 1
    return settled + (largest if side_by_side else largest * _GAPS_PERCENT // 100)


def _in_hand(task: Task, costs: Costs) -> int:
    """What a computation makes for itself, and the most that autograd has saved of one of its layers."""
    if not isinstance(task, (Forward, Backward)):
        return 0
    layers = range(task.first, task.last + 1)
    return costs.workspace_bytes(task) + max(costs.buffer_bytes(saved(layer, 0)) for layer in layers)


def _has_plenty(profile: Profile, machine: Machine, plan: Plan, program: Program) -> bool:
    """Whether every device has room for all that comes together if freed tensors stay."""
    devices = enumerate(machine.devices[: len(program.devices)])
    return all(settled_bytes(profile, plan, program, i, "stay") <= device.capacity_bytes for i, device in devices)


def _with_room(profile: Profile, machine: Machine, plan: Plan, program: Program, percent: int) -> Profile:
    """Room for a few times what most computations have in hand, or for as much as there is."""
    costs = Costs(profile, plan)
    room: dict[int, int] = {}
    for device in range(len(program.devices)):
        needs = [(t, need) for t, need in task_needs(program, costs, device) if isinstance(t, (Forward, Backward))]
        sizes = sorted(_in_hand(task, costs) for task, _ in needs)
        most = sizes[len(sizes) * 9 // 10] * percent // 100 if sizes else 0
        for task, need in needs:
            spare = max(0, min(most - costs.workspace_bytes(task), machine.devices[device].capacity_bytes - need))
            for layer in range(task.first, task.last + 1):
                room[layer] = min(room.get(layer, spare), spare)
    layers = (_with_workspace(cost, room.get(index, 0)) for index, cost in enumerate(profile.layers))
    return replace(profile, layers=tuple(layers))


def _with_workspace(cost: LayerCost, more_bytes: int) -> LayerCost:
    def raised(curve: Curve) -> Curve:
        return Curve(tuple((size, num_bytes + more_bytes) for size, num_bytes in curve.points))

    forward, backward = cost.forward_workspace_bytes, cost.backward_workspace_bytes
    return replace(cost, forward_workspace_bytes=raised(forward), backward_workspace_bytes=raised(backward))
