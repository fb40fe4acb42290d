"""A device's body into lives: when each buffer is touched, over and over, in a step that repeats.

In a body of n tasks, task p touches a buffer whose number lies o steps ahead. The same buffer, as one instance, is
touched at the times p - o * n of all its touches, and each step starts another instance n later. So one sorted list
of times describes every instance of a buffer, however many steps it lives.
"""

from dataclasses import dataclass, field

from counterpoint.core.costs import Costs
from counterpoint.core.outline import Outline
from counterpoint.core.program import Program, reads, renames, writes
from counterpoint.core.task import PER_MICROBATCH, Buffer, Drop, Evict, Load, Task, Update


@dataclass(slots=True)
class Touch:
    """One use of an instance, at its time; `renamed` if it takes over (first) or hands on (last) memory in place.

    `drops` if it is a drop of the program's own: the instance is gone until a later touch writes it anew.
    """

    time: int
    reads: bool = False
    writes: bool = False
    renamed: bool = False
    drops: bool = False


@dataclass(slots=True)
class Life:
    """All touches of an instance in order; `shared` if someone else reads it at home, so it must be brought there."""

    buffer: Buffer
    size: int
    touches: list[Touch] = field(default_factory=list)
    shared: bool = False

    @property
    def born_at_home(self) -> bool:
        return not self.touches[0].writes


def device_reads(task: Task, outline: Outline) -> list[Buffer]:
    """What must be on the device: everything read, unless the home copy is meant."""
    if isinstance(task, Load):
        return []
    found = reads(task, outline)
    if isinstance(task, Update) and task.host:
        return [buffer for buffer in found if buffer.kind == "clip"]
    return found


def device_writes(task: Task, outline: Outline) -> list[Buffer]:
    if isinstance(task, Evict) or (isinstance(task, Update) and task.host):
        return []
    return writes(task, outline)


def home_reads(task: Task, outline: Outline) -> list[Buffer]:
    """What a host update finds at home and a device may have to bring there: gradients."""
    if isinstance(task, Update) and task.host:
        return [buffer for buffer in reads(task, outline) if buffer.kind == "grad"]
    return []


def collect(program: Program, device: int, costs: Costs) -> dict[Buffer, Life]:
    """Lives by buffer, numbered as in the step where the number is 0 (or the microbatch one of the step's own)."""
    body = program.devices[device].body
    length, m = len(body), program.num_microbatches
    found: dict[Buffer, dict[int, Touch]] = {}
    for position, task in enumerate(body):
        for buffer in device_reads(task, program.outline):
            _touch(found, buffer, position, length, m).reads = True
        for buffer in device_writes(task, program.outline):
            _touch(found, buffer, position, length, m).writes = True
        if isinstance(task, Drop):
            _touch(found, task.buffer, position, length, m).drops = True
        for old, new in renames(task, program.outline):
            _touch(found, old, position, length, m).renamed = True
            _touch(found, new, position, length, m).renamed = True
    return {
        buffer: Life(buffer, costs.buffer_bytes(buffer), [touches[time] for time in sorted(touches)])
        for buffer, touches in found.items()
    }


def canonical(buffer: Buffer, m: int) -> tuple[Buffer, int]:
    """A buffer as its instance of step 0, and how many steps ahead of it this one is."""
    kind, owner, number = buffer
    if kind == "constant":
        return buffer, 0
    if kind in PER_MICROBATCH:
        return Buffer(kind, owner, number % m), number // m
    return Buffer(kind, owner, 0), number


def _touch(found: dict[Buffer, dict[int, Touch]], buffer: Buffer, position: int, length: int, m: int) -> Touch:
    base, ahead = canonical(buffer, m)
    touches = found.setdefault(base, {})
    time = position - ahead * length
    if time not in touches:
        touches[time] = Touch(time)
    return touches[time]


def mark_shared(program: Program, lives: list[dict[Buffer, Life]]) -> None:
    """What a device or a host update takes from home must be brought home by whoever writes it."""
    wanted = {life.buffer for part in lives for life in part.values() if life.born_at_home}
    for part in program.devices:
        for task in part.body:
            wanted.update(canonical(buffer, 1)[0] for buffer in home_reads(task, program.outline))
    for lives_of_device in lives:
        for buffer, life in lives_of_device.items():
            life.shared = buffer in wanted and any(touch.writes for touch in life.touches)
