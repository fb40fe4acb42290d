"""Plan -> Program: Harmony on one device, or Harmony-DP with one replica per device (PVLDB 2022, section 4).

A pack runs all microbatches before the device moves on, so its weights come in once; its update follows its backward.
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
