"""Plan -> Program: a plain training loop, one microbatch after the other; with replicas, plain data parallelism.

Updates come when all gradients are there, as `optimizer.step()` does: the baseline that the others are held against.

>>> from counterpoint.core import outline, plan, text
>>> from counterpoint.schedules import write_program
>>> packs = plan.equal_packs(2, 1)
>>> chosen = plan.Plan("plain", 3, 1, packs, packs, ("keep",) * 2)
>>> print(text.grid(write_program(chosen, outline.chain_outline(2))))
0 | 0F0  1F0  1B0  0B0  0F1  1F1  1B1  0B1  0F2  1F2  1B2  0B2*
"""

from counterpoint.core.outline import Outline
from counterpoint.core.plan import Plan
from counterpoint.core.program import Program
from counterpoint.core.task import Task
from counterpoint.schedules.finish import norm_all, reduce_pack, update_all
from counterpoint.schedules.pieces import backwards, common_units, forwards, synchronous
from counterpoint.schedules.places import Place, replica_places


def write(plan: Plan, outline: Outline) -> Program:
    units = common_units(plan)
    return synchronous(plan, outline, [_body(place, units) for place in replica_places(plan, outline)])


def _body(place: Place, units: int) -> list[Task]:
    tasks: list[Task] = []
    for unit in range(units):
        tasks += forwards(place, unit)
        tasks += backwards(place, unit, reduce_pack if unit == units - 1 else None)
    return tasks + norm_all(place, 0) + update_all(place, 0)
