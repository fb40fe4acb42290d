"""Programs in which someone waits for ever: unmatched or crossed transfers, incomplete collectives, deadlocks."""

from collections import defaultdict
from collections.abc import Iterator

from counterpoint.core.examined import Examined, Failure
from counterpoint.core.notation import dump_numbers
from counterpoint.core.task import AllReduce, Buffer, Clip, Receive, Send


def meeting_failures(examined: Examined) -> Iterator[Failure]:
    yield from _incomplete(examined)
    yield from _crossed(examined)
    yield from _deadlock(examined)


def _incomplete(examined: Examined) -> Iterator[Failure]:
    run = examined.run
    for group in run.meetings:
        devices = [run.devices[index] for index in group]
        match run.tasks[group[0]]:
            case Send(_, peer) if len(group) == 1:
                yield examined.failure(group[0], f"device {peer} never receives it")
            case Receive(_, peer) if len(group) == 1:
                yield examined.failure(group[0], f"device {peer} never sends it")
            case AllReduce(peers=peers) | Clip(peers=peers) if len(group) < len(peers):
                absent = [peer for peer in peers if peer not in devices]
                yield examined.failure(group[0], f"device {dump_numbers(absent)} does not take part")
            case _:
                pass


def _crossed(examined: Examined) -> Iterator[Failure]:
    """What two devices exchange must be sent and received in the same order: lanes do not overtake."""
    run = examined.run
    sent: defaultdict[tuple[int, int], list[tuple[Buffer, int]]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[tuple[Buffer, int]]] = defaultdict(list)
    for index, task in enumerate(run.tasks):
        device = run.devices[index]
        if isinstance(task, Send):
            sent[device, task.peer].append((task.buffer, index))
        elif isinstance(task, Receive):
            received[task.peer, device].append((task.buffer, index))
    for pair, sends in sent.items():
        receives = received[pair]
        if sorted(b for b, _ in sends) != sorted(b for b, _ in receives):
            continue
        for (buffer, index), (other, place) in zip(sends, receives, strict=True):
            if buffer != other:
                yield examined.failure(index, f"device {pair[1]} expects another buffer next, {examined.where(place)}")
                break


def _deadlock(examined: Examined) -> Iterator[Failure]:
    """For each device that stops, its first task that can never start and whom that waits for."""
    run, slots = examined.run, examined.settled.slots
    for device in range(len(examined.program.devices)):
        stuck = next((i for i in range(run.starts[device], run.starts[device + 1]) if slots[i] is None), None)
        if stuck is None:
            continue
        others = [i for i in run.meetings[run.meeting[stuck]] if i != stuck] if run.meeting[stuck] >= 0 else []
        others += [i for i in run.predecessors[stuck] if slots[i] is None]
        awaited = ", ".join(examined.where(i) for i in others)
        yield examined.failure(stuck, f"deadlock, it waits for ever for {awaited}")
