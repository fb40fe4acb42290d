"""Plan -> Program: GPipe, all forwards of a step, then all backwards, then a flush (NeurIPS 2019).

>>> from counterpoint.core import outline, plan, text
>>> from counterpoint.schedules import write_program
>>> stages = plan.equal_packs(4, 1)
>>> chosen = plan.Plan("gpipe", 4, 1, stages, stages, ("recompute",) * 4, num_devices=4, stages=stages)
>>> print(text.grid(write_program(chosen, outline.chain_outline(4))))
0 | F0  F1  F2  F3                          B0  B1  B2  B3*
1 |     F0  F1  F2  F3                  B0  B1  B2  B3*
2 |         F0  F1  F2  F3          B0  B1  B2  B3*
3 |             F0  F1  F2  F3  B0  B1  B2  B3*
"""

from counterpoint.core.outline import Outline
from counterpoint.core.plan import Plan
from counterpoint.core.program import Program
from counterpoint.core.task import Task
from counterpoint.schedules.finish import close, settle
from counterpoint.schedules.pieces import backwards, forwards, synchronous
from counterpoint.schedules.places import Place, stage_places


def write(plan: Plan, outline: Outline) -> Program:
    return synchronous(plan, outline, [_body(place) for place in stage_places(plan, outline)])


def _body(place: Place) -> list[Task]:
    """Backwards run in ascending order too: gradients then sum up as in a plain loop."""
    plan = place.plan
    tasks: list[Task] = []
    for unit in range(plan.num_microbatches // plan.forward_group):
        tasks += forwards(place, unit)
    units = plan.num_microbatches // plan.backward_group
    for unit in range(units):
        tasks += backwards(place, unit, settle if unit == units - 1 else None)
    return tasks + close(place, 0)
