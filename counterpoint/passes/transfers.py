"""A program without transfers into one with them: what one device writes and another needs is sent and received.

A send follows the task that made the value. Activations go from their producer to each device that reads them. The
gradient of a value is summed along the backward order: each consumer's device adds its part and sends the sum to the
device of the next consumer down the chain, the last one to the producer's.

A receive stands in the same section as its send, so that sections can repeat, and there between the tasks that end
before its producer and those that end after it, in one common order of all devices (`passes/ranks.py`). It comes
no earlier: what is listed after it may have to wait for it, and must not be what its producer waits for. It comes no
later: an allocation waits for the computations listed before it, and the sender may have to wait for the receiver. So
whatever waits for memory are added later, the common order, with every transfer right after its producer, obeys them,
and no device waits for another in a circle. Both devices of a pair keep one order.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from counterpoint.core.outline import Outline
from counterpoint.core.program import DeviceProgram, Program, reads, writes
from counterpoint.core.task import Backward, Buffer, Drop, Forward, Receive, Send, Task
from counterpoint.passes.ranks import Spot, equal_layers, ranks

Section = Sequence[tuple[Task, ...]]
"""The tasks of each device in a prologue, body or epilogue."""


def transfers(program: Program, duration: Callable[[Task], int] = equal_layers) -> Program:
    """`duration` says how long a computation takes: the better it knows, the better transfers overlap with them."""
    if _independent(program):
        return program
    sections = [
        [device.prologue for device in program.devices],
        [device.body for device in program.devices],
        [device.epilogue for device in program.devices],
    ]
    flow = _Flow(program.outline)
    routes = _routes(program, sections, flow)
    moved = [_move(section, program, routes, flow, duration) for section in sections]
    return replace(program, devices=tuple(DeviceProgram(*parts) for parts in zip(*moved, strict=True)))


def _independent(program: Program) -> bool:
    """Whether no two devices run the same microbatch, as with data parallelism alone."""
    owners: dict[int, int] = {}
    for device, part in enumerate(program.devices):
        for task in (*part.prologue, *part.body, *part.epilogue):
            if isinstance(task, (Forward, Backward)):
                first = task.microbatch % program.num_microbatches
                if any(owners.setdefault(k, device) != device for k in range(first, first + task.count)):
                    return False
    return True


class _Flow:
    """What computations need and make, remembered per pack: it differs between microbatches by the number only."""

    def __init__(self, outline: Outline) -> None:
        self.outline = outline
        self.known: dict[tuple[int, int, bool | tuple[int, ...]], tuple[list[Buffer], list[Buffer]]] = {}

    def needs(self, task: Task) -> Iterator[Buffer]:
        """Values that the task reads, and sums of gradients that it reads or adds to."""
        return self._numbered(task, 0)

    def makes(self, task: Task) -> Iterator[Buffer]:
        return self._numbered(task, 1)

    def _numbered(self, task: Task, side: int) -> Iterator[Buffer]:
        if not isinstance(task, (Forward, Backward)):
            return
        key = (task.first, task.last, task.stashes if isinstance(task, Forward) else task.recompute)
        if key not in self.known:
            self.known[key] = _needed_and_made(replace(task, count=1), self.outline)
        for kind, owner, _ in self.known[key][side]:
            for microbatch in range(task.microbatch, task.microbatch + task.count):
                yield Buffer(kind, owner, microbatch)


def _needed_and_made(task: Forward | Backward, outline: Outline) -> tuple[list[Buffer], list[Buffer]]:
    kinds = ("activation", "activation_grad")
    needed = [buffer for buffer in reads(task, outline) if buffer.kind in kinds]
    made = [buffer for buffer in writes(task, outline) if buffer.kind in kinds]
    return needed + [buffer for buffer in made if buffer.kind == "activation_grad"], made


@dataclass(frozen=True, slots=True)
class _Routes:
    """Who reads an activation, and who adds to or reads its gradient, in descending order of layers.

    Keys are a value and a microbatch of the step: every step takes the same way.
    """

    readers: dict[tuple[int, int], dict[int, None]]
    chains: dict[tuple[int, int], list[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class _Transfer:
    """`made_by` and `needed_by` are indices in the sender's and the receiver's tasks of one section.

    `needed_by` is the number of tasks there when a later section needs the value. `returns` if the sender gets the
    grown sum back later.
    """

    buffer: Buffer
    sender: int
    made_by: int
    receiver: int
    needed_by: int
    returns: bool

    @property
    def handover(self) -> tuple[Spot, Spot]:
        return (self.sender, self.made_by), (self.receiver, self.needed_by)


def _routes(program: Program, sections: Sequence[Section], flow: _Flow) -> _Routes:
    readers: defaultdict[tuple[int, int], dict[int, None]] = defaultdict(dict)
    chains: defaultdict[tuple[int, int], dict[tuple[int, int], None]] = defaultdict(dict)
    for section in sections:
        for device, tasks in enumerate(section):
            for task in tasks:
                for buffer in flow.needs(task):
                    key = (buffer.owner, buffer.number % program.num_microbatches)
                    if buffer.kind == "activation":
                        readers[key][device] = None
                    elif isinstance(task, Backward):
                        chains[key][task.first, device] = None
    return _Routes(dict(readers), {key: sorted(chain, reverse=True) for key, chain in chains.items()})


def _move(
    section: Section, program: Program, routes: _Routes, flow: _Flow, duration: Callable[[Task], int]
) -> list[tuple[Task, ...]]:
    found = list(_transfers(section, program, routes, flow))
    sends: defaultdict[tuple[int, int], list[Task]] = defaultdict(list)
    receives: defaultdict[tuple[int, int], list[Task]] = defaultdict(list)
    for transfer in found:
        after = sends[transfer.sender, transfer.made_by]
        after.append(Send(transfer.buffer, transfer.receiver))
        if transfer.returns:
            after.append(Drop(transfer.buffer))
    for transfer, position in _posted(section, found, duration):
        receives[transfer.receiver, position].append(Receive(transfer.buffer, transfer.sender))
    return [_interleaved(device, tasks, receives, sends) for device, tasks in enumerate(section)]


def _interleaved(
    device: int,
    tasks: tuple[Task, ...],
    before: dict[tuple[int, int], list[Task]],
    after: dict[tuple[int, int], list[Task]],
) -> tuple[Task, ...]:
    result: list[Task] = []
    for index, task in enumerate(tasks):
        result += before.get((device, index), ())
        result.append(task)
        result += after.get((device, index), ())
    return (*result, *before.get((device, len(tasks)), ()))


def _transfers(section: Section, program: Program, routes: _Routes, flow: _Flow) -> Iterator[_Transfer]:
    """Every transfer that begins in a section; those of one sender in the order of its tasks."""
    touched = _touches(section, flow)
    for device, tasks in enumerate(section):
        for index, task in enumerate(tasks):
            for buffer in flow.makes(task):
                for receiver, first, returns in _receivers(task, device, buffer, program.num_microbatches, routes):
                    needed_by = touched.get((receiver, buffer, first), len(section[receiver]))
                    yield _Transfer(buffer, device, index, receiver, needed_by, returns)


def _receivers(
    task: Task, device: int, buffer: Buffer, num_microbatches: int, routes: _Routes
) -> Iterator[tuple[int, int, bool]]:
    """Devices that a written buffer goes to next, with the first layer of the gradient's next user (-1: any task)."""
    key = (buffer.owner, buffer.number % num_microbatches)
    if buffer.kind == "activation":
        yield from ((reader, -1, False) for reader in sorted(routes.readers.get(key, ())) if reader != device)
        return
    assert isinstance(task, Backward)
    chain = routes.chains[key]
    rest = chain[chain.index((task.first, device)) + 1 :]
    if rest and rest[0][1] != device:
        yield rest[0][1], rest[0][0], any(user == device for _, user in rest)


def _touches(section: Section, flow: _Flow) -> dict[tuple[int, Buffer, int], int]:
    """Which task of a device first reads an activation (key -1), and which uses a gradient from its first layer on."""
    found: dict[tuple[int, Buffer, int], int] = {}
    for device, tasks in enumerate(section):
        for index, task in enumerate(tasks):
            for buffer in flow.needs(task):
                first = task.first if buffer.kind == "activation_grad" and isinstance(task, Backward) else -1
                found.setdefault((device, buffer, first), index)
    return found


def _posted(section: Section, found: list[_Transfer], duration: Callable[[Task], int]) -> list[tuple[_Transfer, int]]:
    """Where each receive stands in its device's tasks, by the order in which values are made."""
    order = ranks(section, (t.handover for t in found if t.needed_by < len(section[t.receiver])), duration)
    posted: list[tuple[_Transfer, int]] = []
    for transfer in sorted(found, key=lambda t: order[t.sender][t.made_by]):
        made = order[transfer.sender][transfer.made_by]
        posted.append((transfer, bisect_left(order[transfer.receiver], made)))
    return posted
