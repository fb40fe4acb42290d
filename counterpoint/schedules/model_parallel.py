"""Plan -> Program: inter-layer model parallelism, one microbatch at a time through all stages and back.

>>> from counterpoint.core import outline, plan, text
>>> from counterpoint.schedules import write_program
>>> stages = plan.equal_packs(3, 1)
>>> chosen = plan.Plan("model_parallel", 2, 1, stages, stages, ("keep",) * 3, num_devices=3, stages=stages)
>>> print(text.grid(write_program(chosen, outline.chain_outline(3))))
0 | F0                  B0  F1                  B1*
1 |     F0          B0          F1          B1*
2 |         F0  B0                  F1  B1*
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
    return synchronous(plan, outline, [_body(place, units) for place in stage_places(plan, outline)])


def _body(place: Place, units: int) -> list[Task]:
    tasks: list[Task] = []
    for unit in range(units):
        tasks += forwards(place, unit)
        tasks += backwards(place, unit, settle if unit == units - 1 else None)
    return tasks + close(place, 0)
