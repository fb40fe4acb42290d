"""Starts and ends of tasks into the bytes that each tier holds over time."""

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
    for tier in machine.tiers:
        changes = _home_changes(run, costs, tier.name, starts, ends)
        points += _curve(tier.name, _permanent_bytes(run, costs, tier.name), sorted(changes))
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


def _home_changes(run: Run, costs: Costs, tier: str, starts: list[int], ends: list[int]) -> Iterator[Change]:
    """What comes home only for a while: activations and gradients, from their evict to their load."""
    for index, task in enumerate(run.tasks):
        match task:
            case Evict(buffer, name) if name == tier and buffer.kind in _RETURNING:
                yield starts[index], costs.buffer_bytes(buffer)
            case Load(buffer, name) if name == tier and buffer.kind in _RETURNING:
                yield ends[index], -costs.buffer_bytes(buffer)
            case _:
                pass


def _permanent_bytes(run: Run, costs: Costs, tier: str) -> int:
    """Weights, states and constants that live in this tier, each counted once."""
    owners: dict[tuple[str, int], int] = {}
    for task in run.tasks:
        if isinstance(task, (Load, Evict)) and task.tier == tier and task.buffer.kind not in _RETURNING:
            owners[task.buffer.kind, task.buffer.owner] = costs.buffer_bytes(task.buffer)
    return sum(owners.values())


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
