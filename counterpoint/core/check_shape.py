"""Programs whose tasks name layers, values or devices that do not exist: what other rules take for granted."""

from collections.abc import Iterator

from counterpoint.core.examined import Failure
from counterpoint.core.notation import dump_task
from counterpoint.core.outline import Outline
from counterpoint.core.program import Program
from counterpoint.core.task import (
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
)
from counterpoint.core.text import SECTIONS


def shape_failures(program: Program) -> Iterator[Failure]:
    if program.num_microbatches < 1 or program.epilogue_steps < 0 or not program.devices:
        yield Failure("a program needs a device, at least one microbatch and epilogue_steps >= 0")
    if program.budgets and len(program.budgets) != len(program.devices):
        yield Failure(f"{len(program.budgets)} budgets are given for {len(program.devices)} devices")
    for device, part in enumerate(program.devices):
        for section in SECTIONS:
            tasks: tuple[Task, ...] = getattr(part, section)
            for index, task in enumerate(tasks):
                for text in _problems(task, device, program):
                    place = (device, section, index)
                    yield Failure(f"device {device}, {section} {index} ({dump_task(task)}): {text}", place)


def _problems(task: Task, device: int, program: Program) -> Iterator[str]:
    outline, devices = program.outline, range(len(program.devices))
    match task:
        case Forward() | Backward() | Update() | Norm() | AllReduce():
            if not 0 <= task.first <= task.last < outline.num_layers:
                yield f"layers must lie within 0 to {outline.num_layers - 1}, the first before the last"
        case Load(buffer) | Evict(buffer) | Drop(buffer) | Send(buffer) | Receive(buffer):
            yield from _buffer_problems(buffer, outline)
        case Clip():
            pass
    match task:
        case Forward() | Backward():
            if task.count < 1:
                yield f"it runs {task.count} microbatches"
            yield from _kept_problems(task)
        case Send(_, peer) | Receive(_, peer):
            if peer == device or peer not in devices:
                yield f"device {peer} is no other device; there are {len(devices)}"
        case AllReduce(peers=peers) | Clip(peers=peers):
            if device not in peers or len(set(peers)) < len(peers) or any(peer not in devices for peer in peers):
                yield f"peers must be different devices below {len(devices)}, this one among them"
        case _:
            pass


def _kept_problems(task: Forward | Backward) -> Iterator[str]:
    if isinstance(task, Forward):
        outside = [layer for layer in (*task.saves, *task.stashes) if not task.first <= layer <= task.last]
        if outside:
            yield f"it saves or stashes layer {outside[0]}, which it does not run"


def _buffer_problems(buffer: Buffer, outline: Outline) -> Iterator[str]:
    match buffer.kind:
        case "activation" | "activation_grad":
            if not 0 <= buffer.owner < len(outline.values):
                yield f"there is no value {buffer.owner}; the chain has {len(outline.values)}"
        case "norm" | "clip":
            pass
        case _:
            if not 0 <= buffer.owner < outline.num_layers:
                yield f"there is no layer {buffer.owner}; the chain has {outline.num_layers}"
