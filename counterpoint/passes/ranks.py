"""Compute lists of all devices into one order that obeys every wait: who would end before whom."""

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from counterpoint.core.errors import ProgramError
from counterpoint.core.task import AllReduce, Backward, Clip, Forward, Norm, Task, Update

Spot = tuple[int, int]
"""A task by its device and its index there."""


def ranks(section: Sequence[Sequence[Task]], handovers: Iterable[tuple[Spot, Spot]]) -> list[list[int]]:
    """For each task of each device its rank by the time it would end, if every layer took the same time.

    A handover makes its second task wait for its first. Ties go to the task that was free to run first.
    """
    nodes, waits = _graph(section)
    for (device, index), (other, needed_by) in handovers:
        waits[nodes[other][needed_by]].append(nodes[device][index])
    flat = [
        (node, task) for row, tasks in zip(nodes, section, strict=True) for node, task in zip(row, tasks, strict=True)
    ]
    ends = _ends(dict(flat), waits)
    order = sorted(ends, key=lambda node: ends[node])
    places = {node: place for place, node in enumerate(order)}
    return [[places[node] for node in row] for row in nodes]


def _graph(section: Sequence[Sequence[Task]]) -> tuple[list[list[int]], defaultdict[int, list[int]]]:
    """A node per task, one for all sides of a collective; and what each node waits for on its own device."""
    waits: defaultdict[int, list[int]] = defaultdict(list)
    met: dict[Task, int] = {}
    nodes: list[list[int]] = []
    count = 0
    for tasks in section:
        row: list[int] = []
        computed: list[int] = []
        gathered: list[int] = []
        for task in tasks:
            node = met.setdefault(task, count) if isinstance(task, (AllReduce, Clip)) else count
            count += 1
            row.append(node)
            waits[node] += computed
            if isinstance(task, (AllReduce, Clip, Norm, Update)):
                waits[node] += gathered
            if isinstance(task, (AllReduce, Clip)):
                gathered = [node]
            else:
                computed = [node]
        nodes.append(row)
    return nodes, waits


def _ends(tasks: dict[int, Task], waits: dict[int, list[int]]) -> dict[int, tuple[int, int]]:
    """When each node would end, and how many nodes were free to run before it."""
    followers: defaultdict[int, list[int]] = defaultdict(list)
    missing = {node: len(waits[node]) for node in tasks}
    for node in tasks:
        for other in waits[node]:
            followers[other].append(node)
    ready = deque(node for node in tasks if not missing[node])
    starts = dict.fromkeys(tasks, 0)
    ends: dict[int, tuple[int, int]] = {}
    while ready:
        node = ready.popleft()
        end = starts[node] + _length(tasks[node])
        ends[node] = (end, len(ends))
        for follower in followers[node]:
            starts[follower] = max(starts[follower], end)
            missing[follower] -= 1
            if not missing[follower]:
                ready.append(follower)
    if len(ends) < len(tasks):
        raise ProgramError(f"{len(tasks) - len(ends)} of {len(tasks)} tasks wait for one another: the order deadlocks")
    return ends


def _length(task: Task) -> int:
    match task:
        case Forward(first, last, _, _, _, _, count):
            return (last - first + 1) * count
        case Backward(first, last, _, _, _, recompute, count):
            return (last - first + 1) * count * (3 if recompute else 2)
        case _:
            return 0
