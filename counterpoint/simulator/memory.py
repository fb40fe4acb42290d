"""Starts and ends of tasks into the bytes that each tier holds over time."""

from collections import defaultdict
from collections.abc import Iterator

from counterpoint.core.costs import Costs
from counterpoint.core.edges import Run
from counterpoint.core.machine import Machine
from counterpoint.core.memory import footprints
from counterpoint.core.program import Program
from counterpoint.core.task import Evict, Load
from counterpoint.core.timeline import MemoryPoint

Change = tuple[int, int]  # time, bytes
_RETURNING = frozenset(("activation", "activation_grad", "saved", "grad"))


def tier_memory(
    program: Program, run: Run, costs: Costs, machine: Machine, starts: list[int], ends: list[int]
) -> tuple[MemoryPoint, ...]:
    points: list[MemoryPoint] = []
    for device in range(len(program.devices)):
        changes = _device_changes(program, run, costs, device, starts, ends)
        points += _curve(f"device {device}", 0, sorted(changes))
    homes = _Homes(run, costs, starts, ends)
    for tier in machine.tiers:
        points += _curve(tier.name, homes.permanent_bytes(tier.name), sorted(homes.changes[tier.name]))
    return tuple(points)


def _device_changes(
    program: Program, run: Run, costs: Costs, device: int, starts: list[int], ends: list[int]
) -> Iterator[Change]:
    begin, stop = run.starts[device], run.starts[device + 1]
    walk = footprints(run.tasks[begin:stop], program.outline, costs)
    for index, (_, allocated, workspace, freed) in enumerate(walk, begin):
        if allocated or workspace:
            yield starts[index], allocated + workspace
        if workspace or freed:
            yield ends[index], -workspace - freed


class _Homes:
    """What comes home for a while (activations and gradients, from evict to load), and what lives there, by tier."""

    def __init__(self, run: Run, costs: Costs, starts: list[int], ends: list[int]) -> None:
        self.changes: defaultdict[str, list[Change]] = defaultdict(list)
        self.permanent: defaultdict[str, dict[tuple[str, int], int]] = defaultdict(dict)
        for index, task in enumerate(run.tasks):
            if isinstance(task, (Load, Evict)):
                size, kind = costs.buffer_bytes(task.buffer), task.buffer.kind
                if kind not in _RETURNING:
                    self.permanent[task.tier][kind, task.buffer.owner] = size
                elif isinstance(task, Evict):
                    self.changes[task.tier].append((starts[index], size))
                else:
                    self.changes[task.tier].append((ends[index], -size))

    def permanent_bytes(self, tier: str) -> int:
        """Weights, states and constants, each counted once."""
        return sum(self.permanent[tier].values())


def _curve(tier: str, held: int, changes: list[Change]) -> Iterator[MemoryPoint]:
    yield MemoryPoint(tier, 0, held)
    position = 0
    while position < len(changes):
        now = changes[position][0]
        peak = held
        while position < len(changes) and changes[position][0] == now:
            held += changes[position][1]
            peak = max(peak, held)
            position += 1
        if peak > held:
            yield MemoryPoint(tier, now, peak)
        yield MemoryPoint(tier, now, held)
