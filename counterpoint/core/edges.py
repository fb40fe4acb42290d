"""A program unrolled over some steps, with every reason why one task waits for another."""

from collections import defaultdict
from dataclasses import dataclass

from counterpoint.core.outline import Outline
from counterpoint.core.program import Program, lane, reads, renames, unroll, writes
from counterpoint.core.task import (
    AllReduce,
    Buffer,
    Clip,
    Drop,
    Evict,
    Load,
    Receive,
    Send,
    Task,
    Update,
    begins_at_home,
)


@dataclass(frozen=True, slots=True)
class Run:
    """Tasks of all devices, those of a device in list order; `starts` are the offsets of the devices.

    `predecessors` holds for each task the tasks that end before it starts. Tasks of one `meetings` entry (a send and
    its receive, an all-reduce of all its peers) start and end together; `meeting` says which entry a task is in.
    """

    tasks: list[Task]
    starts: list[int]
    devices: list[int]
    lanes: list[str]
    predecessors: list[list[int]]
    meetings: list[list[int]]
    meeting: list[int]


def unrolled(program: Program, steps: int) -> Run:
    """Edges follow from reads, writes, lanes and the rule for allocations; see `core/program.py`."""
    run = Run([], [0], [], [], [], [], [])
    home = HomeWriters()
    for device in range(len(program.devices)):
        _add_device(run, program, device, steps, home)
        run.starts.append(len(run.tasks))
    home.connect(run)
    _connect_meetings(run)
    return run


class HomeWriters:
    """Who wrote which home copy: a load prefers its own device's last writer, else takes another's first.

    What the run began with has no writer: weights and states of version 0 and before, and constants.
    """

    def __init__(self) -> None:
        self.own: dict[Buffer, int] = {}
        self.all: defaultdict[Buffer, list[int]] = defaultdict(list)
        self.foreign: list[tuple[int, Buffer]] = []

    def read(self, task: int, buffer: Buffer, found: set[int]) -> None:
        if buffer in self.own:
            found.add(self.own[buffer])
        elif not begins_at_home(buffer):
            self.foreign.append((task, buffer))

    def write(self, task: int, buffer: Buffer) -> None:
        self.own[buffer] = task
        self.all[buffer].append(task)

    def connect(self, run: Run) -> None:
        for task, buffer in self.foreign:
            writers = [w for w in self.all.get(buffer, ()) if run.devices[w] != run.devices[task]]
            run.predecessors[task] += writers[:1]


def _add_device(run: Run, program: Program, device: int, steps: int, home: HomeWriters) -> None:
    home.own = {}
    scan = Scan(program.outline, home)
    for task in unroll(program, device, steps):
        index = len(run.tasks)
        run.tasks.append(task)
        run.devices.append(device)
        name = lane(task)
        run.lanes.append(name)
        run.predecessors.append(scan.add(index, task, name))


class Scan:
    """Walks one device's list and remembers who wrote and read each device copy last.

    `add` takes tasks in list order, with rising indices, and tells for each which ones it waits for.
    """

    def __init__(self, outline: Outline, home: HomeWriters) -> None:
        self.outline = outline
        self.home = home
        self.writer: dict[Buffer, int] = {}
        self.readers: defaultdict[Buffer, list[int]] = defaultdict(list)
        self.last: dict[str, int] = {}

    def add(self, index: int, task: Task, name: str) -> list[int]:
        found: set[int] = set()
        if name in self.last:
            found.add(self.last[name])
        match task:
            case Load(buffer, _):
                self.home.read(index, buffer, found)
                self._write(index, buffer, found)
                self._allocate(found)
            case Evict(buffer, _):
                self._read(index, buffer, found)
                self.home.write(index, buffer)
            case Drop(buffer):
                self._write(index, buffer, found)
                del self.writer[buffer]
            case Update(host=True):
                self._update_home(index, task, found)
            case _:
                for buffer in reads(task, self.outline):
                    self._read(index, buffer, found)
                for old, _ in renames(task, self.outline):
                    self._write(index, old, found)
                    del self.writer[old]
                for buffer in writes(task, self.outline):
                    self._write(index, buffer, found)
                if not isinstance(task, (Send, AllReduce, Clip)):
                    self._allocate(found)
        self.last[name] = index
        found.discard(index)
        return sorted(found)

    def _read(self, index: int, buffer: Buffer, found: set[int]) -> None:
        writer = self.writer.get(buffer)
        if writer is not None:
            found.add(writer)
        self.readers[buffer].append(index)

    def _write(self, index: int, buffer: Buffer, found: set[int]) -> None:
        writer = self.writer.get(buffer)
        if writer is not None:
            found.add(writer)
        found.update(self.readers.pop(buffer, ()))
        self.writer[buffer] = index

    def _allocate(self, found: set[int]) -> None:
        for name in ("drop", "compute"):
            if name in self.last:
                found.add(self.last[name])

    def _update_home(self, index: int, task: Task, found: set[int]) -> None:
        """Gradients that nobody evicted yet (the residency pass will) are awaited on the device."""
        for buffer in reads(task, self.outline):
            if buffer.kind == "clip" or (buffer.kind == "grad" and buffer not in self.home.own):
                self._read(index, buffer, found)
            else:
                self.home.read(index, buffer, found)
        for buffer in writes(task, self.outline):
            self.home.write(index, buffer)


def _connect_meetings(run: Run) -> None:
    """Sends meet receives by buffer and pair of devices, collectives by what they reduce, each in list order."""
    open_groups: defaultdict[tuple[object, ...], list[list[int]]] = defaultdict(list)
    counts: defaultdict[tuple[object, ...], int] = defaultdict(int)
    for index, task in enumerate(run.tasks):
        run.meeting.append(-1)
        device = run.devices[index]
        match task:
            case Send(buffer, peer):
                key: tuple[object, ...] = ("move", buffer, device, peer)
            case Receive(buffer, peer):
                key = ("move", buffer, peer, device)
            case AllReduce(first, last, step, peers):
                key = ("reduce", first, last, step, peers)
            case Clip(step, peers):
                key = ("clip", step, peers)
            case _:
                continue
        side = (key, device)
        groups, position = open_groups[key], counts[side]
        counts[side] += 1
        if position == len(groups):
            groups.append([])
        groups[position].append(index)
    for groups in open_groups.values():
        for group in groups:
            for index in group:
                run.meeting[index] = len(run.meetings)
            run.meetings.append(group)
