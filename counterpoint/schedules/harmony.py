"""Plan -> Program: Harmony on one device, or Harmony-DP with one replica per device (PVLDB 2022, section 4).

A pack runs all microbatches before the device moves on, so its weights come in once; its update follows its backward.

>>> from counterpoint.core import outline, plan, text
>>> from counterpoint.schedules import write_program
>>> packs = plan.equal_packs(4, 1)
>>> chosen = plan.Plan("harmony", 2, 1, packs, packs[:-1], ("recompute",) * 4)
>>> print(text.grid(write_program(chosen, outline.chain_outline(4))))
0 | 0F0  0F1  1F0  1F1  2F0  2F1  3B0  3B1* 2B0  2B1* 1B0  1B1* 0B0  0B1*
"""

from counterpoint.core.outline import Outline
from counterpoint.core.plan import Plan
from counterpoint.core.program import Program
from counterpoint.core.task import Task
from counterpoint.schedules.finish import close, settle
from counterpoint.schedules.pieces import backward, forward, synchronous
from counterpoint.schedules.places import Place, replica_places


def write(plan: Plan, outline: Outline) -> Program:
    return synchronous(plan, outline, [grouped_body(place) for place in replica_places(plan, outline)])


def grouped_body(place: Place) -> list[Task]:
    """Pack by pack, each on all its microbatches: forwards up the chain, backwards down."""
    share = place.plan.num_microbatches
    tasks: list[Task] = []
    for pack in place.forwards:
        tasks += [forward(place, pack, unit) for unit in range(share // pack.count)]
    for later in reversed(place.backwards):
        runs = [backward(place, later, unit) for unit in range(share // later.count)]
        tasks += [*runs, *settle(place, runs[-1])]
    return tasks + close(place, 0)
