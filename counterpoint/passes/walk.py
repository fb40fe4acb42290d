"""Tasks in order into tasks with loads, evicts and drops on demand: virtual memory, and the ends of planned lists."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from counterpoint.core.costs import Costs
from counterpoint.core.errors import BudgetError
from counterpoint.core.outline import Outline
from counterpoint.core.program import renames
from counterpoint.core.task import Buffer, Drop, Evict, Load, Task
from counterpoint.core.units import format_bytes
from counterpoint.passes.lives import device_reads, device_writes, home_reads


@dataclass(slots=True)
class Walk:
    """A device's memory while its list is walked; `resident` maps buffers to whether they are dirty, oldest use first.

    `last_use` tells when a buffer may be forgotten: the index of the last task that touches it. `next_uses`, where
    given, makes eviction look ahead; without it the least recently used goes. `writes_clean` is virtual memory that
    does not know what is clean. `away` are buffers that were here and are at home now.
    """

    outline: Outline
    costs: Costs
    budget: int
    tier_of: Callable[[Buffer], str]
    is_shared: Callable[[Buffer], bool]
    last_use: dict[Buffer, int]
    next_uses: dict[Buffer, list[int]] | None = None
    writes_clean: bool = False
    resident: dict[Buffer, bool] = field(default_factory=dict)
    away: set[Buffer] = field(default_factory=set)
    out: list[Task] = field(default_factory=list)
    held: int = 0

    def enter(self, start: Iterable[tuple[Buffer, bool]]) -> None:
        """Begin with buffers that are there already, dirty or not."""
        for buffer, dirty in start:
            self.resident[buffer] = dirty
            self.held += self.costs.buffer_bytes(buffer)

    def run(self, index: int, task: Task) -> None:
        if isinstance(task, Drop):
            self._drop(task.buffer)
            return
        read, written = device_reads(task, self.outline), device_writes(task, self.outline)
        for buffer in home_reads(task, self.outline):
            if buffer in self.resident:
                self._leave(buffer, forget=False)
        replaced = {new: old for old, new in renames(task, self.outline)}
        self._bring(index, task, read, [b for b in written if b not in replaced])
        self.out.append(task)
        for buffer in (*read, *written):
            dirty = self.resident.pop(buffer, False) or buffer in written
            if buffer not in replaced.values():
                self.resident[buffer] = dirty
        for buffer in (*read, *written):
            if buffer in self.resident and self.is_shared(buffer) and buffer in written and buffer.kind != "grad":
                self._write_home(buffer)
            if buffer in self.resident and self.last_use.get(buffer, -1) <= index:
                self._leave(buffer, forget=not (self.is_shared(buffer) and self.resident[buffer]))

    def _bring(self, index: int, task: Task, read: list[Buffer], written: list[Buffer]) -> None:
        """Make room for what the task needs, then load what it reads."""
        needed = dict.fromkeys((*read, *written))
        missing = [buffer for buffer in needed if buffer not in self.resident]
        need = sum(self.costs.buffer_bytes(buffer) for buffer in missing) + self.costs.workspace_bytes(task)
        while self.held + need > self.budget:
            victim = self._victim(index, needed)
            if victim is None:
                raise BudgetError(
                    f"no placement fits: a task needs {format_bytes(self.held + need)}, the budget is "
                    f"{format_bytes(self.budget)}"
                )
            self._leave(victim, forget=self.last_use.get(victim, -1) < index)
        reading = dict.fromkeys(read)
        for buffer in missing:
            if buffer in reading or buffer in self.away:
                self.out.append(Load(buffer, self.tier_of(buffer)))
            self.resident[buffer] = False
            self.held += self.costs.buffer_bytes(buffer)

    def _victim(self, index: int, needed: dict[Buffer, None]) -> Buffer | None:
        candidates = (b for b in self.resident if b not in needed and self.costs.buffer_bytes(b))
        if self.next_uses is None:
            return next(candidates, None)
        return max(candidates, key=lambda b: (self._next_use(b, index), b), default=None)

    def _next_use(self, buffer: Buffer, index: int) -> int:
        assert self.next_uses is not None
        uses = self.next_uses.get(buffer, [])
        while uses and uses[-1] <= index:
            uses.pop()
        return uses[-1] if uses else 1 << 60

    def _write_home(self, buffer: Buffer) -> None:
        self.out.append(Evict(buffer, self.tier_of(buffer)))
        self.resident[buffer] = False

    def _leave(self, buffer: Buffer, forget: bool) -> None:
        """Drop a buffer, after bringing it home if its content is still wanted and home does not have it."""
        if not forget:
            self.away.add(buffer)
            if self.resident[buffer] or self.writes_clean:
                self._write_home(buffer)
        del self.resident[buffer]
        self.held -= self.costs.buffer_bytes(buffer)
        self.out.append(Drop(buffer))

    def _drop(self, buffer: Buffer) -> None:
        """A drop of the program's own: nobody wants the buffer again before it is written anew."""
        self.away.discard(buffer)
        if buffer in self.resident:
            self._leave(buffer, forget=True)

    def settle(self, target: dict[Buffer, bool]) -> None:
        """End with exactly `target` resident, and at home too where it says so (True)."""
        for buffer in list(self.resident):
            if buffer not in target:
                self._leave(buffer, forget=False)
        for buffer, at_home in target.items():
            if buffer not in self.resident:
                self.out.append(Load(buffer, self.tier_of(buffer)))
                self.resident[buffer] = False
                self.held += self.costs.buffer_bytes(buffer)
            elif at_home and self.resident[buffer]:
                self._write_home(buffer)

    def finish(self, persists: Callable[[Buffer], bool]) -> None:
        """Leave nothing on the device, and at home what persists."""
        for buffer in list(self.resident):
            self._leave(buffer, forget=not persists(buffer))
