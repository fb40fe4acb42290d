"""Program: for each device an ordered list of tasks; and what an op means: what it reads, writes and where it runs.

The list order of a device is its contract. Each task belongs to a lane; a lane runs its tasks in list order, lanes run
beside one another. A task that allocates memory waits for every drop and every computation that stands before it in
the list. Hence memory never exceeds what a walk through the list counts, whatever the timing: at any moment, let p be
the last allocation that happened; everything freed before p in the list is free, so what is held is at most what the
walk holds at p.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import assert_never

from counterpoint.core.outline import Outline
from counterpoint.core.task import (
    PER_MICROBATCH,
    AllReduce,
    Backward,
    Buffer,
    Clip,
    Drop,
    Evict,
    Forward,
    Load,
    Norm,
    Receive,
    Send,
    Task,
    Update,
    activation,
    activation_grad,
    clip,
    constant,
    grad,
    norm,
    old,
    saved,
    shift,
    state,
    weight,
)


@dataclass(frozen=True, slots=True)
class DeviceProgram:
    """The tasks of one device."""

    prologue: tuple[Task, ...]
    body: tuple[Task, ...]
    epilogue: tuple[Task, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A run of T steps is the prologue, T - `epilogue_steps` bodies, each a step later, and the epilogue.

    `num_microbatches` counts those of a step over all replicas. `budgets` are what the residency pass promised to
    keep to, in bytes per device; none before it ran.
    """

    outline: Outline
    num_microbatches: int
    devices: tuple[DeviceProgram, ...]
    epilogue_steps: int = 0
    budgets: tuple[int, ...] = ()

    @property
    def num_tasks(self) -> int:
        return sum(len(d.prologue) + len(d.body) + len(d.epilogue) for d in self.devices)


def unroll(program: Program, device: int, steps: int) -> Iterator[Task]:
    """All tasks of one device for a run of `steps` steps, in list order, with absolute numbers."""
    part, m = program.devices[device], program.num_microbatches
    bodies = steps - program.epilogue_steps
    if bodies < 0:
        raise ValueError(f"this program runs at least {program.epilogue_steps} step, not {steps}")
    yield from part.prologue
    for step in range(bodies):
        for task in part.body:
            yield shift(task, step, m)
    for task in part.epilogue:
        yield shift(task, bodies, m)


def weights_of(task: Forward | Backward, layer: int, outline: Outline) -> Buffer:
    """Which buffer has a layer's weights for a task."""
    narrow = task.old and outline.layers[layer].narrows
    return old(layer, task.version) if narrow else weight(layer, task.version)


def _weights(task: Forward | Backward, outline: Outline) -> list[Buffer]:
    buffers = [weights_of(task, layer, outline) for layer in outline.weights(task.first, task.last)]
    buffers += [constant(layer) for layer in outline.constants(task.first, task.last)]
    return buffers


def _trained(outline: Outline, first: int, last: int) -> list[int]:
    return [layer for layer in range(first, last + 1) if outline.layers[layer].has_weights]


def reads(task: Task, outline: Outline) -> list[Buffer]:
    """What must be there before the task: on the device, or at home for a load and a host update."""
    match task:
        case Forward(first, last, microbatch, _, _, _, count):
            buffers = _weights(task, outline)
            for value in outline.inputs(first, last):
                buffers += [activation(value, k) for k in range(microbatch, microbatch + count)]
            return buffers
        case Backward(first, last, microbatch, _, _, recompute, count):
            buffers = _weights(task, outline)
            for k in range(microbatch, microbatch + count):
                if recompute:
                    buffers += [activation(value, k) for value in outline.inputs(first, last)]
                else:
                    buffers += [saved(layer, k) for layer in range(first, last + 1)]
                buffers += [
                    activation_grad(value, k)
                    for value in outline.outputs(first, last)
                    if outline.values[value].has_grad
                ]
            return buffers
        case Norm(first, last, step):
            return [grad(layer, step) for layer in _trained(outline, first, last)]
        case Clip(step, _):
            return [norm(step)]
        case Update(first, last, step, _, clipped, _):
            layers = _trained(outline, first, last)
            buffers = [make(layer, step) for layer in layers for make in (weight, grad, state)]
            return [*buffers, clip(step)] if clipped else buffers
        case Load(buffer, _) | Evict(buffer, _) | Send(buffer, _):
            return [buffer]
        case Receive() | Drop():
            return []
        case AllReduce(first, last, step, _):
            return [grad(layer, step) for layer in _trained(outline, first, last)]
        case _:
            assert_never(task)


def writes(task: Task, outline: Outline) -> list[Buffer]:
    """What is there after the task. Gradients accumulate: writing one that exists adds to it."""
    match task:
        case Forward(first, last, microbatch, _, saves, stashes, count):
            values = forward_values(outline, first, last, stashes)
            buffers = [activation(v, k) for v in values for k in range(microbatch, microbatch + count)]
            return buffers + [saved(s, k) for s in saves for k in range(microbatch, microbatch + count)]
        case Backward(first, last, microbatch, _, step, _, count):
            buffers = [grad(layer, step) for layer in outline.weights(first, last)]
            for value in outline.inputs(first, last):
                if outline.values[value].has_grad:
                    buffers += [activation_grad(value, k) for k in range(microbatch, microbatch + count)]
            return buffers
        case Norm(_, _, step):
            return [norm(step)]
        case Clip(step, _):
            return [clip(step)]
        case Update(first, last, step):
            layers = _trained(outline, first, last)
            buffers = [make(layer, step + 1) for layer in layers for make in (weight, state)]
            return buffers + [old(layer, step) for layer in layers if narrows(task, layer, outline)]
        case Load(buffer, _) | Evict(buffer, _) | Receive(buffer, _):
            return [buffer]
        case Drop() | Send():
            return []
        case AllReduce(first, last, step, _):
            return [grad(layer, step) for layer in _trained(outline, first, last)]
        case _:
            assert_never(task)


def forward_values(outline: Outline, first: int, last: int, stashes: tuple[int, ...]) -> tuple[int, ...]:
    """Values a forward leaves behind: what later layers consume, and what the stashing packs inside it need."""
    values = outline.outputs(first, last)
    for start in stashes:
        inside = (v for v in outline.inputs(start, last) if outline.values[v].producer >= first)
        values += tuple(v for v in inside if v not in values)
    return values


def lane(task: Task) -> str:
    """The in-order queue that runs the task; there is one send and one receive lane per peer.

    Values that leave are small, and computations wait for their room: they do not queue behind weights and states.
    """
    match task:
        case Forward() | Backward() | Norm():
            return "compute"
        case Update(host=host):
            return "host" if host else "compute"
        case Load():
            return "load"
        case Evict(buffer, _):
            return "evict values" if buffer.kind in PER_MICROBATCH else "evict"
        case Drop():
            return "drop"
        case Send(_, peer):
            return f"send {peer}"
        case Receive(_, peer):
            return f"receive {peer}"
        case AllReduce() | Clip():
            return "reduce"
        case _:
            assert_never(task)


def renames(task: Task, outline: Outline) -> list[tuple[Buffer, Buffer]]:
    """Buffers that a task turns into others in the same memory: an update in place."""
    if not isinstance(task, Update) or task.host:
        return []
    found: list[tuple[Buffer, Buffer]] = []
    for layer in _trained(outline, task.first, task.last):
        in_place = not task.keeps_old or narrows(task, layer, outline)
        found += [(make(layer, task.step), make(layer, task.step + 1)) for make in (weight, state)[not in_place :]]
    return found


def narrows(task: Update, layer: int, outline: Outline) -> bool:
    """Whether an update leaves a narrow copy of a layer's weights behind."""
    return task.keeps_old and outline.layers[layer].narrows
