"""One frozen class per op, and the names of the buffers that tasks touch.

Numbers in a body are relative to its step: version 0 is the newest weight when the step begins, microbatch 0 its first.
`shift` moves a task by whole steps.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

BufferKind: TypeAlias = Literal[
    "weight", "old", "constant", "grad", "state", "activation", "activation_grad", "saved", "norm", "clip"
]
PER_LAYER = frozenset(("weight", "old", "constant", "grad", "state"))
PER_MICROBATCH = frozenset(("activation", "activation_grad", "saved"))


class Buffer(NamedTuple):
    """A tensor as the program names it; a tuple because passes hash millions of them.

    `owner` is a layer, or a value for activations; `number` is a version, a step or a microbatch.
    """

    kind: BufferKind
    owner: int
    number: int


def weight(layer: int, version: int) -> Buffer:
    """Trainable weights of a layer after `version` updates."""
    return Buffer("weight", layer, version)


def old(layer: int, version: int) -> Buffer:
    """Weights of a narrowing layer after `version` updates, once a newer version is there: only computed with."""
    return Buffer("old", layer, version)


def constant(layer: int) -> Buffer:
    """Weights of a layer that never train."""
    return Buffer("constant", layer, 0)


def grad(layer: int, step: int) -> Buffer:
    """Gradient of a layer's weights, summed over the microbatches of a step."""
    return Buffer("grad", layer, step)


def state(layer: int, version: int) -> Buffer:
    """Optimizer state of a layer after `version` updates."""
    return Buffer("state", layer, version)


def activation(value: int, microbatch: int) -> Buffer:
    """A value on its way between packs; kept until its last reader, which may be a recompute."""
    return Buffer("activation", value, microbatch)


def activation_grad(value: int, microbatch: int) -> Buffer:
    return Buffer("activation_grad", value, microbatch)


def saved(layer: int, microbatch: int) -> Buffer:
    """What autograd keeps of a layer between its forward and its backward."""
    return Buffer("saved", layer, microbatch)


def norm(step: int) -> Buffer:
    """Norms of the gradients that are finished so far on this device."""
    return Buffer("norm", 0, step)


def clip(step: int) -> Buffer:
    """The factor that global-norm clipping applies in a step."""
    return Buffer("clip", 0, step)


@dataclass(frozen=True, slots=True)
class Forward:
    """Run layers `first` to `last` on `count` microbatches at once.

    `saves` are the layers whose saved tensors are kept for a backward without recompute; `stashes` are the first
    layers of backward packs that begin here and recompute: the values they need stay. `old` if the device's update of
    `version` stands before it.
    """

    first: int
    last: int
    microbatch: int
    version: int
    saves: tuple[int, ...] = ()
    stashes: tuple[int, ...] = ()
    count: int = 1
    old: bool = False


@dataclass(frozen=True, slots=True)
class Backward:
    """Differentiate layers `first` to `last`, after running them again when `recompute`; add to the step's gradients.

    With recompute and no forward before it, it is the fused forward and backward of the last pack. `old` as in a
    forward.
    """

    first: int
    last: int
    microbatch: int
    version: int
    step: int
    recompute: bool
    count: int = 1
    old: bool = False


@dataclass(frozen=True, slots=True)
class Norm:
    """Norms of the finished gradients of layers `first` to `last`."""

    first: int
    last: int
    step: int


@dataclass(frozen=True, slots=True)
class Clip:
    """Gather the norms of all peers into the clipping factor of the step."""

    step: int
    peers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """Optimizer step `step` of layers `first` to `last`: weight version `step` becomes `step + 1`.

    It works in place, unless `keeps_old` (the old version is still read afterwards). Then it writes the new version
    beside the old one; of a narrowing layer it leaves a narrow copy and works in place. On the host it reads and writes
    the home copies.
    """

    first: int
    last: int
    step: int
    host: bool = False
    clipped: bool = False
    keeps_old: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """Home tier to device."""

    buffer: Buffer
    tier: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Device to home tier; the device copy stays, clean, until it is dropped."""

    buffer: Buffer
    tier: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget the device copy of a buffer that is clean or dead; its memory is free again."""

    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Send:
    buffer: Buffer
    peer: int


@dataclass(frozen=True, slots=True)
class Receive:
    buffer: Buffer
    peer: int


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Sum the gradients of layers `first` to `last` over the peers, this device among them."""

    first: int
    last: int
    step: int
    peers: tuple[int, ...]


Task: TypeAlias = Forward | Backward | Norm | Clip | Update | Load | Evict | Drop | Send | Receive | AllReduce


def begins_at_home(buffer: Buffer) -> bool:
    """Whether home has it before the first step: constants, and the weights and states of the start.

    Version -1 is by convention the start's too: a schedule that runs one version behind begins with it.
    """
    return (
        buffer.kind == "constant"
        or (buffer.kind in ("weight", "state") and buffer.number <= 0)
        or (buffer.kind == "old" and buffer.number < 0)
    )


def shift_buffer(buffer: Buffer, steps: int, num_microbatches: int) -> Buffer:
    kind, owner, number = buffer
    if kind == "constant":
        return buffer
    return Buffer(kind, owner, number + steps * (num_microbatches if kind in PER_MICROBATCH else 1))


def shift(task: Task, steps: int, num_microbatches: int) -> Task:
    """The same task, `steps` steps later."""
    if not steps:
        return task
    m = steps * num_microbatches
    match task:
        case Forward(first, last, microbatch, version, saves, stashes, count, is_old):
            return Forward(first, last, microbatch + m, version + steps, saves, stashes, count, is_old)
        case Backward(first, last, microbatch, version, step, recompute, count, is_old):
            return Backward(first, last, microbatch + m, version + steps, step + steps, recompute, count, is_old)
        case Norm(first, last, step):
            return Norm(first, last, step + steps)
        case Clip(step, peers):
            return Clip(step + steps, peers)
        case Update(first, last, step, host, clipped, keeps_old):
            return Update(first, last, step + steps, host, clipped, keeps_old)
        case Load(buffer, tier):
            return Load(shift_buffer(buffer, steps, num_microbatches), tier)
        case Evict(buffer, tier):
            return Evict(shift_buffer(buffer, steps, num_microbatches), tier)
        case Drop(buffer):
            return Drop(shift_buffer(buffer, steps, num_microbatches))
        case Send(buffer, peer):
            return Send(shift_buffer(buffer, steps, num_microbatches), peer)
        case Receive(buffer, peer):
            return Receive(shift_buffer(buffer, steps, num_microbatches), peer)
        case AllReduce(first, last, step, peers):
            return AllReduce(first, last, step + steps, peers)
