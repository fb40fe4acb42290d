"""Tasks in list order into the device memory they take and give back: the walk that the budget is a promise about."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from counterpoint.core.costs import Costs
from counterpoint.core.outline import Outline
from counterpoint.core.program import Program, renames, unroll, writes
from counterpoint.core.task import AllReduce, Buffer, Clip, Drop, Evict, Send, Task, Update


class Footprint(NamedTuple):
    """Bytes a task allocates for what it leaves behind, needs while it runs, and frees when it is done."""

    task: Task
    allocated: int
    workspace: int
    freed: int


def footprints(tasks: Iterable[Task], outline: Outline, costs: Costs) -> Iterator[Footprint]:
    """What each task does to its device's memory, for tasks in list order from an empty device on."""
    resident: dict[Buffer, int] = {}
    for task in tasks:
        match task:
            case Drop(buffer):
                yield Footprint(task, 0, 0, resident.pop(buffer, 0))
            case Evict() | Send() | AllReduce() | Clip() | Update(host=True):
                yield Footprint(task, 0, 0, 0)
            case _:
                for old, new in renames(task, outline):
                    resident[new] = resident.pop(old, 0) or costs.buffer_bytes(new)
                allocated = 0
                for buffer in writes(task, outline):
                    if buffer not in resident:
                        resident[buffer] = costs.buffer_bytes(buffer)
                        allocated += resident[buffer]
                yield Footprint(task, allocated, costs.workspace_bytes(task), 0)


def peak_bytes(program: Program, costs: Costs, device: int, steps: int = 3) -> int:
    """The most that a device holds at any position of its list; no timing can make it hold more."""
    held = peak = 0
    for _, allocated, workspace, freed in footprints(unroll(program, device, steps), program.outline, costs):
        held += allocated
        peak = max(peak, held + workspace)
        held -= freed
    return peak
