"""Plan -> Program: PipeDream-Flush, one forward one backward (1F1B) with a flush per step (ICML 2021, section 3.2).

>>> from counterpoint.core import outline, plan, text
>>> from counterpoint.schedules import write_program
>>> stages = plan.equal_packs(4, 1)
>>> chosen = plan.Plan("flush", 4, 1, stages, stages, ("recompute",) * 4, num_devices=4, stages=stages)
>>> print(text.grid(write_program(chosen, outline.chain_outline(4))))
0 | F0  F1  F2  F3              B0      B1      B2      B3*
1 |     F0  F1  F2          B0  F3  B1      B2      B3*
2 |         F0  F1      B0  F2  B1  F3  B2      B3*
3 |             F0  B0  F1  B1  F2  B2  F3  B3*
"""

from counterpoint.core.outline import Outline
from counterpoint.core.plan import Plan
from counterpoint.core.program import Program
from counterpoint.core.task import Task
from counterpoint.schedules.finish import close, settle
from counterpoint.schedules.pieces import backwards, common_units, forwards, synchronous
from counterpoint.schedules.places import Place, stage_places


def write(plan: Plan, outline: Outline) -> Program:
    units = common_units(plan)
    last = len(plan.stages) - 1
    places = stage_places(plan, outline)
    return synchronous(plan, outline, [_body(place, units, last - place.position) for place in places])


def _body(place: Place, units: int, later: int) -> list[Task]:
    """A stage runs ahead by one forward for each of the `later` stages."""
    ahead = min(later, units)
    tasks = [task for unit in range(ahead) for task in forwards(place, unit)]
    for unit in range(units):
        if unit + ahead < units:
            tasks += forwards(place, unit + ahead)
        tasks += backwards(place, unit, settle if unit == units - 1 else None)
    return tasks + close(place, 0)
