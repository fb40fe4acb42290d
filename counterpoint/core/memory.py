"""Tasks in list order into the device memory they take and give back: the walk that the budget is a promise about."""

from collections.abc import Callable, Collection, Iterable, Iterator
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


def footprints(
    tasks: Iterable[Task], outline: Outline, costs: Costs, bytes_of: Callable[[Buffer], int] | None = None
) -> Iterator[Footprint]:
    """What each task does to its device's memory, for tasks in list order from an empty device on.

    `bytes_of` says what a buffer takes, if not what it costs.
    """
    resident: dict[Buffer, int] = {}
    bytes_of = bytes_of or costs.buffer_bytes
    for task in tasks:
        match task:
            case Drop(buffer):
                yield Footprint(task, 0, 0, resident.pop(buffer, 0))
            case Evict() | Send() | AllReduce() | Clip() | Update(host=True):
                yield Footprint(task, 0, 0, 0)
            case _:
                for old, new in renames(task, outline):
                    resident[new] = resident.pop(old, 0) or bytes_of(new)
                allocated = 0
                for buffer in writes(task, outline):
                    if buffer not in resident:
                        resident[buffer] = bytes_of(buffer)
                        allocated += resident[buffer]
                yield Footprint(task, allocated, costs.workspace_bytes(task), 0)


def peak_bytes(program: Program, costs: Costs, device: int, steps: int = 3) -> int:
    """The most that a device holds at any position of its list; no timing can make it hold more."""
    return _peak(footprints(unroll(program, device, steps), program.outline, costs))


def peaks_apart(program: Program, costs: Costs, device: int, kinds: Collection[str], steps: int = 3) -> tuple[int, int]:
    """The most that buffers of these kinds take, and the most that all else does, each when it comes to that."""
    tasks = tuple(unroll(program, device, steps))

    def walk(inside: bool) -> Iterator[Footprint]:
        def bytes_of(buffer: Buffer) -> int:
            return costs.buffer_bytes(buffer) if (buffer.kind in kinds) is inside else 0

        return footprints(tasks, program.outline, costs, bytes_of)

    return _peak(footprint._replace(workspace=0) for footprint in walk(True)), _peak(walk(False))


def _peak(walk: Iterable[Footprint]) -> int:
    held = peak = 0
    for _, allocated, workspace, freed in walk:
        held += allocated
        peak = max(peak, held + workspace)
        held -= freed
    return peak
