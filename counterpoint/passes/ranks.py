"""Compute lists of all devices into one order that obeys every wait: who would end before whom."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

from counterpoint.core.errors import ProgramError
from counterpoint.core.task import AllReduce, Backward, Clip, Forward, Task

Spot = tuple[int, int]
"""A task by its device and its index there."""


def ranks(
    section: Sequence[Sequence[Task]], handovers: Iterable[tuple[Spot, Spot]], duration: Callable[[Task], int]
) -> list[list[int]]:
    """For each task of each device its rank by the time it would end.

    A handover makes its second task wait for its first and a moment more, because transfers take time: what would be
    a tie between devices in step with one another is then decided as in a real run.
    """
    nodes, waits = _graph(section)
    tasks: dict[int, Task] = {}
    for row, listed in zip(nodes, section, strict=True):
        tasks |= zip(row, listed, strict=True)
    for (device, index), (other, needed_by) in handovers:
        waits[nodes[other][needed_by]].append((nodes[device][index], 1))
    ends = _ends(tasks, waits, duration)
    places = {node: place for place, node in enumerate(sorted(ends, key=lambda node: ends[node]))}
    return [[places[node] for node in row] for row in nodes]


def equal_layers(task: Task) -> int:
    """A guess at how long a task takes, for want of a profile."""
    match task:
        case Forward(first, last, _, _, _, _, count):
            return (last - first + 1) * count * 10
        case Backward(first, last, _, _, _, recompute, count):
            return (last - first + 1) * count * (30 if recompute else 20)
        case _:
            return 0


_Waits = defaultdict[int, list[tuple[int, int]]]
"""For each node the nodes it waits for, and how long after their end it may start."""


def _graph(section: Sequence[Sequence[Task]]) -> tuple[list[list[int]], _Waits]:
    """A node per task, one for all sides of a collective, waiting for the node before it on each of its devices.

    Lanes would let a computation overtake a collective, but what waits for memory may have to wait for it too.
    """
    waits: _Waits = defaultdict(list)
    met: dict[Task, int] = {}
    nodes: list[list[int]] = []
    count = 0
    for tasks in section:
        row: list[int] = []
        before: list[tuple[int, int]] = []
        for task in tasks:
            node = met.setdefault(task, count) if isinstance(task, (AllReduce, Clip)) else count
            count += 1
            row.append(node)
            waits[node] += before
            before = [(node, 0)]
        nodes.append(row)
    return nodes, waits


def _ends(tasks: dict[int, Task], waits: _Waits, duration: Callable[[Task], int]) -> dict[int, tuple[int, int]]:
    """When each node would end, and how many nodes were free to run before it."""
    followers: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    missing = {node: len(waits[node]) for node in tasks}
    for node in tasks:
        for other, delay in waits[node]:
            followers[other].append((node, delay))
    ready = deque(node for node in tasks if not missing[node])
    starts = dict.fromkeys(tasks, 0)
    ends: dict[int, tuple[int, int]] = {}
    while ready:
        node = ready.popleft()
        end = starts[node] + duration(tasks[node])
        ends[node] = (end, len(ends))
        for follower, delay in followers[node]:
            starts[follower] = max(starts[follower], end + delay)
            missing[follower] -= 1
            if not missing[follower]:
                ready.append(follower)
    if len(ends) < len(tasks):
        raise ProgramError(f"{len(tasks) - len(ends)} of {len(tasks)} tasks wait for one another: the order deadlocks")
    return ends
