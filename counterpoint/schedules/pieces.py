"""Places into the pieces that schedules are made of: forwards and backwards of a unit, and the whole program.

A unit is the microbatches that one task runs: a group, or a single one. Units count on from one step to the next.
"""

from collections.abc import Callable, Sequence

from counterpoint.core.outline import Outline
from counterpoint.core.plan import Plan
from counterpoint.core.program import DeviceProgram, Program
from counterpoint.core.task import Backward, Forward, Task
from counterpoint.schedules.places import Place


def forward(place: Place, pack: Forward, unit: int) -> Forward:
    """The pack's forward of a unit, on the weights that the unit's step runs on.

    A section begins when the updates before step 0 are done, and its own come after all that runs on version 0.
    """
    step, microbatch = _locate(place, unit, pack.count)
    version = step - place.delay
    return Forward(pack.first, pack.last, microbatch, version, pack.saves, pack.stashes, pack.count, old=version < 0)


def backward(place: Place, pack: Backward, unit: int) -> Backward:
    step, microbatch = _locate(place, unit, pack.count)
    version = step - place.delay
    return Backward(pack.first, pack.last, microbatch, version, step, pack.recompute, pack.count, old=version < 0)


def forwards(place: Place, unit: int) -> list[Task]:
    return [forward(place, pack, unit) for pack in place.forwards]


def backwards(place: Place, unit: int, then: Callable[[Place, Backward], list[Task]] | None = None) -> list[Task]:
    """All packs of a place, the last one first, each followed by what `then` adds."""
    tasks: list[Task] = []
    for pack in reversed(place.backwards):
        task = backward(place, pack, unit)
        tasks.append(task)
        if then is not None:
            tasks += then(place, task)
    return tasks


def common_units(plan: Plan) -> int:
    """Units of a step, for schedules that pair each forward with a backward."""
    if plan.forward_group != plan.backward_group:
        raise ValueError(
            f"{plan.schedule} pairs each forward with a backward, so forward groups of {plan.forward_group} and "
            f"backward groups of {plan.backward_group} microbatches must be equal"
        )
    return plan.num_microbatches // plan.forward_group


def synchronous(plan: Plan, outline: Outline, bodies: Sequence[Sequence[Task]]) -> Program:
    """A program whose steps leave nothing in flight; one body per device."""
    devices = tuple(DeviceProgram((), tuple(body), ()) for body in bodies)
    return Program(outline, plan.num_microbatches * plan.num_replicas, devices)


def _locate(place: Place, unit: int, count: int) -> tuple[int, int]:
    """The step of a unit and its first microbatch; replica r owns the r-th share of each step's microbatches."""
    share = place.plan.num_microbatches
    step, index = divmod(unit, share // count)
    return step, (step * place.plan.num_replicas + place.replica) * share + index * count
