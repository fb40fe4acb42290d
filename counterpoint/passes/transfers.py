"""A program without transfers into one with them: what one device writes and another needs is sent and received.

A send follows the task that made the value. Activations go from their producer to each device that reads them. The
gradient of a value is summed along the backward order: each consumer's device adds its part and sends the sum to the
device of the next consumer down the chain, the last one to the producer's.

A receive stands in the same section as its send, so that sections can repeat. It is posted one computation before the
one that needs it, because an allocation waits for the computations listed before it. It is posted earlier still where
the value is ready long before: before the first computation that ends after the producer in a common order of all
devices (`passes/ranks.py`). The sender's copy can then go at once without the sender waiting for the receiver, and no
device waits for another in a circle: the common order, with every transfer right after its producer, obeys every wait.
Both devices of a pair keep one order.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from counterpoint.core.outline import Outline
from counterpoint.core.program import DeviceProgram, Program, reads, writes
from counterpoint.core.task import Backward, Buffer, Drop, Forward, Norm, Receive, Send, Task, Update
from counterpoint.passes.ranks import Spot, ranks

Section = Sequence[tuple[Task, ...]]
"""The tasks of each device in a prologue, body or epilogue."""


def transfers(program: Program) -> Program:
    if len(program.devices) == 1:
        return program
    sections = [
        [device.prologue for device in program.devices],
        [device.body for device in program.devices],
        [device.epilogue for device in program.devices],
    ]
    routes = _routes(program, sections)
    moved = [_move(section, program, routes) for section in sections]
    return replace(program, devices=tuple(DeviceProgram(*parts) for parts in zip(*moved, strict=True)))


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


def _routes(program: Program, sections: Sequence[Section]) -> _Routes:
    readers: defaultdict[tuple[int, int], dict[int, None]] = defaultdict(dict)
    chains: defaultdict[tuple[int, int], dict[tuple[int, int], None]] = defaultdict(dict)
    for section in sections:
        for device, tasks in enumerate(section):
            for task in tasks:
                for buffer in _needs(task, program.outline):
                    key = (buffer.owner, buffer.number % program.num_microbatches)
                    if buffer.kind == "activation":
                        readers[key][device] = None
                    elif isinstance(task, Backward):
                        chains[key][task.first, device] = None
    return _Routes(dict(readers), {key: sorted(chain, reverse=True) for key, chain in chains.items()})


def _needs(task: Task, outline: Outline) -> Iterator[Buffer]:
    """Values a computation reads, and sums of gradients that it reads or adds to."""
    if isinstance(task, (Forward, Backward)):
        yield from (b for b in reads(task, outline) if b.kind in ("activation", "activation_grad"))
    if isinstance(task, Backward):
        yield from (b for b in writes(task, outline) if b.kind == "activation_grad")


def _move(section: Section, program: Program, routes: _Routes) -> list[tuple[Task, ...]]:
    found = list(_transfers(section, program, routes))
    sends: defaultdict[tuple[int, int], list[Task]] = defaultdict(list)
    receives: defaultdict[tuple[int, int], list[Task]] = defaultdict(list)
    for transfer in found:
        after = sends[transfer.sender, transfer.made_by]
        after.append(Send(transfer.buffer, transfer.receiver))
        if transfer.returns:
            after.append(Drop(transfer.buffer))
    for transfer, position in _posted(section, found):
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


def _transfers(section: Section, program: Program, routes: _Routes) -> Iterator[_Transfer]:
    """Every transfer that begins in a section; those of one sender in the order of its tasks."""
    touched = _touches(section, program.outline)
    for device, tasks in enumerate(section):
        for index, task in enumerate(tasks):
            if not isinstance(task, (Forward, Backward)):
                continue
            for buffer in writes(task, program.outline):
                if buffer.kind not in ("activation", "activation_grad"):
                    continue
                for receiver, first, returns in _receivers(task, device, buffer, program.num_microbatches, routes):
                    needed_by = touched.get((receiver, buffer, first), len(section[receiver]))
                    yield _Transfer(buffer, device, index, receiver, needed_by, returns)


def _receivers(
    task: Forward | Backward, device: int, buffer: Buffer, num_microbatches: int, routes: _Routes
) -> Iterator[tuple[int, int, bool]]:
    """Devices that a written buffer goes to next, with the first layer of the gradient's next user (-1: any task)."""
    key = (buffer.owner, buffer.number % num_microbatches)
    if buffer.kind == "activation":
        yield from ((reader, -1, False) for reader in sorted(routes.readers.get(key, ())) if reader != device)
        return
    chain = routes.chains[key]
    rest = chain[chain.index((task.first, device)) + 1 :]
    if rest and rest[0][1] != device:
        yield rest[0][1], rest[0][0], any(user == device for _, user in rest)


def _touches(section: Section, outline: Outline) -> dict[tuple[int, Buffer, int], int]:
    """Which task of a device first reads an activation (key -1), and which uses a gradient from its first layer on."""
    found: dict[tuple[int, Buffer, int], int] = {}
    for device, tasks in enumerate(section):
        for index, task in enumerate(tasks):
            for buffer in _needs(task, outline):
                first = task.first if buffer.kind == "activation_grad" and isinstance(task, Backward) else -1
                found.setdefault((device, buffer, first), index)
    return found


def _posted(section: Section, found: list[_Transfer]) -> list[tuple[_Transfer, int]]:
    """Where each receive stands in its device's tasks, by the order in which values are made."""
    order = ranks(section, (t.handover for t in found if t.needed_by < len(section[t.receiver])))
    computes = [[index for index, task in enumerate(tasks) if _computes(task)] for tasks in section]
    ends = [[row[index] for index in mine] for row, mine in zip(order, computes, strict=True)]
    posted: list[tuple[_Transfer, int]] = []
    limits: dict[tuple[int, int], int] = {}
    for transfer in reversed(found):
        mine, end = computes[transfer.receiver], len(section[transfer.receiver])
        ready = bisect_left(ends[transfer.receiver], order[transfer.sender][transfer.made_by])
        ahead = max(bisect_left(mine, transfer.needed_by) - 1, 0) if transfer.needed_by < end else end
        choice = min(ready, ahead)
        position = mine[choice] if choice < len(mine) else end
        pair = (transfer.sender, transfer.receiver)
        limits[pair] = min(position, limits.get(pair, position))
        posted.append((transfer, limits[pair]))
    posted.reverse()
    return sorted(posted, key=lambda item: order[item[0].sender][item[0].made_by])


def _computes(task: Task) -> bool:
    return isinstance(task, (Forward, Backward, Norm, Update))
