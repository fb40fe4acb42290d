"""A run into an order and into unit time: the earliest slot of each task, None where it can never start."""

from collections import defaultdict, deque
from dataclasses import dataclass

from counterpoint.core.edges import Run
from counterpoint.core.task import Backward, Forward


@dataclass(frozen=True, slots=True)
class Settled:
    """`order` lists the tasks that can run, each after all it waits for; `slots` is indexed by task."""

    order: list[int]
    slots: list[int | None]


def settle(run: Run) -> Settled:
    """Every forward and backward takes one slot, everything else none; tasks that meet start together.

    A task without a slot is part of a deadlock or waits for one. Meetings that lack a side do not wait for it.
    """
    groups, of = _groups(run)
    waiting, successors = _waits(run, groups, of)
    starts = [0] * len(groups)
    ready = deque(group for group, missing in enumerate(waiting) if not missing)
    settled = Settled([], [None] * len(run.tasks))
    while ready:
        group = ready.popleft()
        for task in groups[group]:
            settled.order.append(task)
            settled.slots[task] = starts[group]
        end = starts[group] + isinstance(run.tasks[groups[group][0]], (Forward, Backward))
        for successor in successors[group]:
            starts[successor] = max(starts[successor], end)
            waiting[successor] -= 1
            if not waiting[successor]:
                ready.append(successor)
    return settled


def _groups(run: Run) -> tuple[list[list[int]], list[int]]:
    """Tasks that start together: meetings first, then every other task on its own."""
    groups = list(run.meetings)
    of = list(run.meeting)
    for task, group in enumerate(of):
        if group < 0:
            of[task] = len(groups)
            groups.append([task])
    return groups, of


def _waits(run: Run, groups: list[list[int]], of: list[int]) -> tuple[list[int], defaultdict[int, list[int]]]:
    waiting = [0] * len(groups)
    successors: defaultdict[int, list[int]] = defaultdict(list)
    for task, predecessors in enumerate(run.predecessors):
        for predecessor in predecessors:
            waiting[of[task]] += 1
            successors[of[predecessor]].append(of[task])
    return waiting, successors
