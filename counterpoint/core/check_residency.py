"""Programs that use what is not in device memory, lose what is still needed, or hold more than was promised.

Before the residency pass (no budgets) whatever has a home copy counts as present; after it everything must be loaded.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

from counterpoint.core.costs import Costs
from counterpoint.core.examined import Examined, Failure
from counterpoint.core.memory import footprints
from counterpoint.core.notation import dump_buffer
from counterpoint.core.program import reads, renames, writes
from counterpoint.core.task import (
    Buffer,
    Drop,
    Evict,
    Load,
    Receive,
    Task,
    Update,
    begins_at_home,
    old,
    shift_buffer,
    weight,
)
from counterpoint.core.units import format_bytes

_SUMS = frozenset(("grad", "activation_grad", "norm"))


def residency_failures(examined: Examined) -> Iterator[Failure]:
    walks = [_Walk(examined, device) for device in range(len(examined.program.devices))]
    homes = _written_homes(examined)
    for walk in walks:
        yield from walk.go(homes)
    yield from _lost(examined, walks)


def budget_failures(examined: Examined, costs: Costs) -> Iterator[Failure]:
    """The position where a device exceeds its budget most."""
    run = examined.run
    for device, budget in enumerate(examined.program.budgets):
        begin, end = run.starts[device], run.starts[device + 1]
        held = peak = peak_index = 0
        walk = footprints(run.tasks[begin:end], examined.program.outline, costs)
        for index, (_, allocated, workspace, freed) in enumerate(walk, begin):
            held += allocated
            if held + workspace > peak:
                peak, peak_index = held + workspace, index
            held -= freed
        if peak > budget:
            text = f"{format_bytes(peak)} are held here, the budget is {format_bytes(budget)}"
            yield examined.failure(peak_index, text)


def _written_homes(examined: Examined) -> dict[Buffer, list[int]]:
    """Which devices bring which buffers home: by evict, by an update there; before the residency pass by any update."""
    planned, found = bool(examined.program.budgets), defaultdict(list)
    for index, task in enumerate(examined.run.tasks):
        device = examined.run.devices[index]
        match task:
            case Evict(buffer):
                found[buffer].append(device)
            case Update(host=host) if host or not planned:
                for buffer in writes(task, examined.program.outline):
                    found[buffer].append(device)
            case _:
                pass
    return found


def _lost(examined: Examined, walks: list["_Walk"]) -> Iterator[Failure]:
    """The newest weights and states must be somewhere when the run ends."""
    newest: dict[Buffer, int] = {}
    for index, task in enumerate(examined.run.tasks):
        if isinstance(task, Update) and task.step == examined.steps - 1:
            newest |= dict.fromkeys(writes(task, examined.program.outline), index)
    for buffer, index in newest.items():
        if not any(buffer in walk.resident or buffer in walk.home for walk in walks):
            yield examined.failure(index, f"{examined.name(index, buffer)} is dropped later and was never evicted")


class _Walk:
    """One device's list, task by task: what is resident, what its own tasks brought home, and how things went away."""

    def __init__(self, examined: Examined, device: int) -> None:
        self.examined, self.device = examined, device
        self.outline = examined.program.outline
        self.planned = bool(examined.program.budgets)
        self.resident: dict[Buffer, None] = {}
        self.home: dict[Buffer, None] = {}
        self.away: dict[Buffer, int] = {}
        self.last_read: dict[Buffer, int] = {}

    def go(self, homes: dict[Buffer, list[int]]) -> Iterator[Failure]:
        run = self.examined.run
        begin, end = run.starts[self.device], run.starts[self.device + 1]
        for index in range(begin, end):
            self.last_read |= dict.fromkeys(reads(run.tasks[index], self.outline), index)
        starts: list[dict[Buffer, None]] = []
        for index in range(begin, end):
            if self.examined.places[index] == (self.device, "body", 0):
                starts.append(dict(self.resident))
            for buffer, text in self._step(index, run.tasks[index], homes):
                yield self.examined.failure(index, f"{self.examined.name(index, buffer)} {text}", self._how(buffer))
        if self.planned:
            yield from self._cyclic(starts)

    def _step(self, index: int, task: Task, homes: dict[Buffer, list[int]]) -> Iterator[tuple[Buffer, str]]:
        match task:
            case Load(buffer):
                if buffer in self.resident:
                    yield buffer, "is on the device already"
                yield from self._need_home(buffer, homes)
                yield from self._add(index, buffer)
            case Evict(buffer):
                yield from self._need(index, buffer, homes)
                self.home[buffer] = None
            case Drop(buffer):
                if buffer not in self.resident:
                    yield buffer, "is not on the device"
                self._remove(index, buffer)
            case Receive(buffer):
                if buffer in self.resident and buffer.kind not in _SUMS:
                    yield buffer, "is on the device already"
                yield from self._add(index, buffer)
            case Update(host=True):
                yield from self._update_home(index, task, homes)
            case _:
                yield from self._compute(index, task, homes)

    def _compute(self, index: int, task: Task, homes: dict[Buffer, list[int]]) -> Iterator[tuple[Buffer, str]]:
        for buffer in reads(task, self.outline):
            yield from self._need(index, buffer, homes)
        for before, _ in renames(task, self.outline):
            self._remove(index, before)
        for buffer in writes(task, self.outline):
            if buffer in self.resident and buffer.kind in ("activation", "saved", "weight", "old", "state"):
                yield buffer, "is on the device already and would be written again"
            yield from self._add(index, buffer)

    def _update_home(self, index: int, task: Update, homes: dict[Buffer, list[int]]) -> Iterator[tuple[Buffer, str]]:
        for buffer in reads(task, self.outline):
            if buffer.kind == "clip" or (buffer.kind == "grad" and not self.planned):
                yield from self._need(index, buffer, homes)
            else:
                yield from self._need_home(buffer, homes)
        self.home |= dict.fromkeys(writes(task, self.outline))

    def _need(self, index: int, buffer: Buffer, homes: dict[Buffer, list[int]]) -> Iterator[tuple[Buffer, str]]:
        if buffer in self.resident:
            return
        if self.planned or buffer in self.away or not self._at_home(buffer, homes):
            yield buffer, "is not on the device"
        yield from self._add(index, buffer)

    def _need_home(self, buffer: Buffer, homes: dict[Buffer, list[int]]) -> Iterator[tuple[Buffer, str]]:
        if not self._at_home(buffer, homes):
            yield buffer, "has no home copy: nobody evicted it or updated it there before"

    def _at_home(self, buffer: Buffer, homes: dict[Buffer, list[int]]) -> bool:
        foreign = any(device != self.device for device in homes.get(buffer, ()))
        return begins_at_home(buffer) or foreign or buffer in self.home

    def _how(self, buffer: Buffer) -> str:
        if buffer not in self.away:
            return ""
        task = self.examined.run.tasks[self.away[buffer]]
        verb = "dropped" if isinstance(task, Drop) else "overwritten"
        return f"{verb} at {self.examined.where(self.away[buffer])}"

    def _add(self, index: int, buffer: Buffer) -> Iterator[tuple[Buffer, str]]:
        self.resident[buffer] = None
        self.away.pop(buffer, None)
        if buffer.kind in ("weight", "old"):
            near = (make(buffer.owner, buffer.number + i) for i in (-3, -2, -1, 1, 2, 3) for make in (weight, old))
            live = [b for b in near if b in self.resident and self.last_read.get(b, -1) > index]
            if len(live) > 1:
                yield buffer, f"would be the third version of its layer, beside {self._names(index, live)}"

    def _remove(self, index: int, buffer: Buffer) -> None:
        self.resident.pop(buffer, None)
        self.away[buffer] = index

    def _names(self, index: int, buffers: list[Buffer]) -> str:
        return " and ".join(self.examined.name(index, buffer) for buffer in buffers)

    def _cyclic(self, starts: list[dict[Buffer, None]]) -> Iterator[Failure]:
        """What is resident when a body ends, a step earlier, must be what was resident when it began."""
        m = self.examined.program.num_microbatches
        for before, after in pairwise(starts):
            earlier = dict.fromkeys(shift_buffer(buffer, -1, m) for buffer in after)
            surplus = [dump_buffer(buffer) for buffer in earlier if buffer not in before]
            lacking = [dump_buffer(buffer) for buffer in before if buffer not in earlier]
            for text, buffers in (("leaves behind", surplus), ("does not leave behind", lacking)):
                if buffers:
                    names = ", ".join(buffers[:5]) + (f" and {len(buffers) - 5} more" if len(buffers) > 5 else "")
                    yield Failure(f"device {self.device}: the body is not cyclic, it {text} {names} for the next step")
            if surplus or lacking:
                return
