"""Programs whose gradients are not whole: each must be the sum of all its parts, each part once, when it is used.

The run is executed with sets in place of tensors: a weight's gradient holds which layer added to it for which
microbatch, an activation's gradient which consumers added to it.
"""

from collections import defaultdict
from collections.abc import Iterator

from counterpoint.core.examined import Examined, Failure
from counterpoint.core.outline import Outline
from counterpoint.core.task import (
    AllReduce,
    Backward,
    Buffer,
    Drop,
    Evict,
    Load,
    Norm,
    Receive,
    Send,
    Task,
    Update,
    activation_grad,
    grad,
)

Parts = frozenset[tuple[int, int]]
SUMS = frozenset(("grad", "activation_grad"))
_NOTHING: Parts = frozenset()


def gradient_failures(examined: Examined) -> Iterator[Failure]:
    """For programs without deadlock; incomplete meetings are someone else's failure."""
    sums = _Sums(examined.program.outline, examined.program.num_microbatches)
    done: set[int] = set()
    for index in examined.settled.order:
        task, meeting = examined.run.tasks[index], examined.run.meeting[index]
        members = [index] if meeting < 0 else examined.run.meetings[meeting]
        if index in done:
            continue
        done.update(members)
        sums.bodies = examined.bodies[index]
        for buffer, text in sums.run(task, [(examined.run.devices[i], examined.run.tasks[i]) for i in members]):
            yield examined.failure(index, f"{examined.name(index, buffer)} {text}")


def _users(outline: Outline) -> dict[int, tuple[int, ...]]:
    """For each layer with weights the layers that use them."""
    users: defaultdict[int, list[int]] = defaultdict(list)
    for layer in range(outline.num_layers):
        for owner in outline.weights(layer, layer):
            users[owner].append(layer)
    return {owner: tuple(layers) for owner, layers in users.items()}


class _Sums:
    """What every gradient consists of, on each device and in the home copy that each device wrote.

    `bodies` came before this task.
    """

    def __init__(self, outline: Outline, num_microbatches: int) -> None:
        self.outline, self.users, self.num_microbatches = outline, _users(outline), num_microbatches
        self.bodies = 0
        self.parts: dict[tuple[int, Buffer], Parts] = {}
        self.homes: defaultdict[Buffer, dict[int, Parts]] = defaultdict(dict)
        self.sent: set[tuple[int, Buffer]] = set()

    def run(self, task: Task, members: list[tuple[int, Task]]) -> Iterator[tuple[Buffer, str]]:
        device = members[0][0]
        match task:
            case Backward():
                yield from self._backward(task, device)
            case Update(first, last, step, host):
                for owner in range(first, last + 1):
                    if owner in self.users:
                        yield from self._whole(grad(owner, step), device, host)
            case Norm(first, last, step):
                for owner in range(first, last + 1):
                    if owner in self.users:
                        yield from self._whole(grad(owner, step), device, False)
            case AllReduce(first, last, step):
                for owner in range(first, last + 1):
                    yield from self._reduce(grad(owner, step), [d for d, _ in members])
            case Send(buffer) | Receive(buffer) if len(members) == 2 and buffer.kind in SUMS:
                sender, receiver = sorted(members, key=lambda member: isinstance(member[1], Receive))
                self.sent.add((sender[0], buffer))
                yield from self._add(receiver[0], buffer, self.parts.get((sender[0], buffer), _NOTHING))
            case Evict(buffer) if buffer.kind in SUMS:
                self.homes[buffer][device] = self.parts.get((device, buffer), _NOTHING)
            case Load(buffer) if buffer.kind in SUMS:
                self.parts[device, buffer] = self._home(device, buffer, _NOTHING)
            case Drop(buffer):
                self.parts.pop((device, buffer), None)
                self.sent.discard((device, buffer))
            case _:
                pass

    def _backward(self, task: Backward, device: int) -> Iterator[tuple[Buffer, str]]:
        layers, outline = range(task.first, task.last + 1), self.outline
        for k in range(task.microbatch, task.microbatch + task.count):
            for value in outline.outputs(task.first, task.last):
                if outline.values[value].has_grad:
                    consumers = [c for c in outline.values[value].consumers if c > task.last]
                    found = self.parts.get((device, activation_grad(value, k)), _NOTHING)
                    missing = [c for c in consumers if (c, k) not in found]
                    if missing:
                        yield activation_grad(value, k), f"lacks the part of layer {missing[0]}"
            for value in outline.inputs(task.first, task.last):
                if outline.values[value].has_grad:
                    added = frozenset((c, k) for c in outline.values[value].consumers if c in layers)
                    yield from self._add(device, activation_grad(value, k), added)
            for owner in outline.weights(task.first, task.last):
                added = frozenset((layer, k) for layer in self.users[owner] if layer in layers)
                yield from self._add(device, grad(owner, task.step), added)

    def _add(self, device: int, buffer: Buffer, added: Parts) -> Iterator[tuple[Buffer, str]]:
        before = self.parts.get((device, buffer), _NOTHING)
        if before & added:
            yield buffer, f"counts {self._name(min(before & added))} twice"
        if (device, buffer) in self.sent:
            yield buffer, "is added to after it was sent or reduced"
        self.parts[device, buffer] = before | added

    def _reduce(self, buffer: Buffer, devices: list[int]) -> Iterator[tuple[Buffer, str]]:
        if buffer.owner not in self.users:
            return
        total = _NOTHING
        for device in devices:
            parts = self.parts.get((device, buffer), _NOTHING)
            if total & parts:
                yield buffer, f"counts {self._name(min(total & parts))} on two devices"
            total |= parts
        for device in devices:
            self.parts[device, buffer] = total
            self.sent.add((device, buffer))

    def _whole(self, buffer: Buffer, device: int, host: bool) -> Iterator[tuple[Buffer, str]]:
        here = self.parts.get((device, buffer), _NOTHING)
        found = self._home(device, buffer, here) if host else here
        begin = buffer.number * self.num_microbatches
        microbatches = range(begin, begin + self.num_microbatches)
        expected = [(layer, k) for layer in self.users[buffer.owner] for k in microbatches]
        missing = [part for part in expected if part not in found]
        if missing:
            yield (
                buffer,
                (
                    f"is used before it is whole: {len(missing)} of {len(expected)} parts are missing, "
                    f"the first is {self._name(missing[0])}"
                ),
            )

    def _home(self, device: int, buffer: Buffer, default: Parts) -> Parts:
        """The device's own home copy if it has one, else another's."""
        copies = self.homes[buffer]
        return copies.get(device, next(iter(copies.values()), default))

    def _name(self, part: tuple[int, int]) -> str:
        return f"layer {part[0]} of microbatch {part[1] - self.bodies * self.num_microbatches}"
