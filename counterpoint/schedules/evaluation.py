"""Plan -> Program: a forward pass alone, pack by pack on all microbatches; nothing is kept and nothing is updated.

It is all prologue: a run of it leaves everything at home, and the next one begins there.

>>> from counterpoint.core import outline, plan
>>> packs = plan.equal_packs(4, 2)
>>> chosen = plan.Plan("harmony", 2, 1, packs, packs[:-1], ("recompute",) * 2)
>>> [(t.first, t.last, t.microbatch) for t in write(chosen, outline.chain_outline(4), 2).devices[0].prologue]
[(0, 1, 0), (0, 1, 1), (2, 3, 0), (2, 3, 1)]
"""

from counterpoint.core.outline import Outline
from counterpoint.core.plan import Plan
from counterpoint.core.program import DeviceProgram, Program
from counterpoint.core.task import Forward, Task
from counterpoint.passes.transfers import transfers
from counterpoint.schedules import harmony_pp
from counterpoint.schedules.places import Place, replica_places, stage_places


def write(plan: Plan, outline: Outline, num_microbatches: int) -> Program:
    """The plan's forward packs where they run, and the last backward pack where it is fused."""
    if plan.schedule == "harmony_pp":
        places = harmony_pp.places(plan, outline)
    else:
        places = stage_places(plan, outline) if plan.stages else replica_places(plan, outline)
    devices = tuple(DeviceProgram(_forwards(place, num_microbatches), (), ()) for place in places)
    return transfers(Program(outline, num_microbatches, devices))


def _forwards(place: Place, num_microbatches: int) -> tuple[Task, ...]:
    """Replicas take turns."""
    packs = [(pack.first, pack.last) for pack in place.forwards]
    if place.plan.fused:
        packs += [(pack.first, pack.last) for pack in place.backwards if pack.last == place.plan.num_layers - 1]
    turns = range(place.replica, num_microbatches, place.plan.num_replicas)
    return tuple(Forward(first, last, k, 0) for first, last in packs for k in turns)
