"""A choice of what stays into a body with loads, evicts and drops, and what is resident when it begins."""

from collections.abc import Iterator
from dataclasses import dataclass

from counterpoint.core.costs import Costs
from counterpoint.core.errors import ProgramError
from counterpoint.core.homes import Homes
from counterpoint.core.program import Program, lane, writes
from counterpoint.core.task import Buffer, Drop, Evict, Load, Task, Update, shift_buffer
from counterpoint.passes.body import Body, Gap
from counterpoint.passes.landing import Clock, landings
from counterpoint.passes.lives import Life, canonical

WINDOW = 256  # a load is hoisted over at most so many tasks
_LEFT = ("weight", "state")  # what every step begins with at home; the first step loads it in order to drop it
_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Placed:
    """A body with its transfers; `start` says of each buffer resident at its beginning whether home has it too."""

    tasks: tuple[Task, ...]
    start: dict[Buffer, bool]


@dataclass(slots=True)
class _Run:
    """A stretch of a life on the device, from its load or birth to its drop or its end in another buffer."""

    life: Life
    first: int
    last: int
    load_time: int | None = None  # None: born here
    earliest: int = 0
    dropped: bool = True


class Emitter:
    """Turns one device's lives and chosen gaps into tasks."""

    def __init__(self, program: Program, device: int, costs: Costs, lives: dict[Buffer, Life], body: Body) -> None:
        self.program, self.device, self.lives, self.body = program, device, lives, body
        self.tasks = program.devices[device].body
        self.workspace = [costs.workspace_bytes(task) for task in self.tasks]
        self.clock = Clock.of(costs.duration_ns(task) if lane(task) == "compute" else 0 for task in self.tasks)
        self.count = len(self.tasks)
        self.gaps: dict[tuple[Buffer, int], Gap] = {}
        self.rooms: dict[Buffer, Gap] = {}
        for gap in body.gaps:
            if gap.fixed:
                self.rooms.setdefault(gap.life.buffer, gap)
            elif not gap.kept:
                self.gaps[gap.life.buffer, gap.index] = gap
        self.home_since = _host_updates(program, device)

    def place(self, budget: int, homes: Homes) -> Placed:
        runs = [run for life in self.lives.values() for run in self._runs(life)]
        levels = self.body.occupied()
        self._let_land(runs, levels, budget, homes)
        self._hoist([run for run in runs if run.load_time is not None], levels, budget)
        start: dict[Buffer, bool] = {}
        for run in runs:
            self._note_start(run, start)
        tasks = self._write(runs, start, budget, homes)
        return Placed(tuple(tasks), start)

    def _runs(self, life: Life) -> Iterator[_Run]:
        """Cut a life at its given-up gaps and at the program's own drops."""
        times = [touch.time for touch in life.touches]
        cuts = [index for index in range(len(times)) if (life.buffer, index) in self.gaps]
        if life.buffer.kind == "constant":
            yield from self._constant_runs(life, times, cuts)
            return
        last = len(times) - 1
        cuts += [index for index, touch in enumerate(life.touches) if touch.drops and index < last]
        begin, born = 0, not life.born_at_home
        for end in (*sorted(cuts), last):
            run = _Run(life, times[begin], times[end])
            if not born:
                self._need_load(run, begin, times)
            born = life.touches[end].drops
            run.dropped = not born and (end < last or not life.touches[last].renamed)
            yield run
            begin = end + 1

    def _constant_runs(self, life: Life, times: list[int], cuts: list[int]) -> Iterator[_Run]:
        if not cuts:
            yield _Run(life, times[0], times[0] + self.count, dropped=False)
        wrapped = [*times, *(time + self.count for time in times)]
        for begin, end in zip(cuts, [*cuts[1:], cuts[0] + len(times)] if cuts else [], strict=True):
            run = _Run(life, wrapped[begin + 1], wrapped[end])
            gap = self.gaps[life.buffer, begin]
            run.load_time, run.earliest = run.first - _tail(gap), wrapped[begin] + 1
            yield run

    def _need_load(self, run: _Run, begin: int, times: list[int]) -> None:
        """A load at its latest sensible time: beside the computation before the touch."""
        if begin:
            gap = self.gaps[run.life.buffer, begin - 1]
            run.load_time, run.earliest = run.first - _tail(gap), times[begin - 1] + 1
        else:
            room = self.rooms.get(run.life.buffer)
            tail = room.span_length if room is not None and not room.tight else 0
            run.earliest = self.home_since.get(run.life.buffer, -1) + 1
            run.load_time = max(run.first - tail, run.earliest)

    def _let_land(self, runs: list[_Run], levels: list[int], budget: int, homes: Homes) -> None:
        """Count what is behind an evict until that will have ended, where there is room; loads keep out of its way."""
        speeds = homes.evict_bytes_per_s[self.device : self.device + 1]
        if not any(speeds):
            return
        leaving: list[tuple[int, int, _Run]] = []
        for run in runs:
            homeward = zip(run.life.touches, self.homeward(run.life), strict=True)
            written = [touch.time for touch, home in homeward if home and run.first <= touch.time <= run.last]
            leaving += [(time % self.count, time, run) for time in written]
        leaving.sort(key=lambda row: row[:2])
        found = landings(self.clock, [(position, run.life.size) for position, _, run in leaving], speeds[0])
        for landing, (position, time, run) in zip(found, leaving, strict=True):
            if run.dropped:
                for later in range(run.last + 1, min(landing + time - position, run.last + self.count)):
                    if levels[later % self.count] + run.life.size <= budget:
                        levels[later % self.count] += run.life.size

    def _hoist(self, runs: list[_Run], levels: list[int], budget: int) -> None:
        """Move loads to earlier positions, in the order of need, as far as memory allows.

        Those of the next step that reach back into this one come last: it needs its own first.
        """
        count = self.count
        runs.sort(key=lambda run: (run.first % count, run.life.buffer))
        previous = 0
        for run in runs:
            offset = run.first - run.first % count
            previous = self._hoist_one(run, offset, max(previous, 0), levels, budget)
        previous -= count
        for run in runs:
            offset = run.first - run.first % count
            if run.load_time is None or run.load_time > offset:
                break
            previous = self._hoist_one(run, offset, previous, levels, budget)

    def _hoist_one(self, run: _Run, offset: int, previous: int, levels: list[int], budget: int) -> int:
        """The position of its load, not before `previous`; those before the step in which it is needed are negative."""
        assert run.load_time is not None
        time = run.load_time - offset
        limit = max(run.earliest - offset, previous, run.first - offset - WINDOW)
        if limit < time:
            start = 0 if time > 0 else -self.count
            time = _hoisted(levels, max(limit, start) - start, time - start, run.life.size, budget) + start
            run.load_time = time + offset
        return time

    def _note_start(self, run: _Run, start: dict[Buffer, bool]) -> None:
        """Instances of a run that lie across the body's beginning, and whether home has their content there."""
        begin = run.first if run.load_time is None else run.load_time
        for boundary in range(begin // self.count + 1, run.last // self.count + 1):
            time = boundary * self.count
            goes_home = [
                home
                for touch, home in zip(run.life.touches, self.homeward(run.life), strict=True)
                if touch.writes and touch.time < time
            ]
            buffer = shift_buffer(run.life.buffer, -boundary, self.program.num_microbatches)
            start[buffer] = not goes_home or goes_home[-1]

    def homeward(self, life: Life) -> list[bool]:
        """Which writes are brought home: those read there by others, and those given up before the next write."""
        wanted, found = life.shared, []
        for index in range(len(life.touches) - 1, -1, -1):
            wanted = not life.touches[index].drops and (wanted or (life.buffer, index) in self.gaps)
            found.append(wanted and life.touches[index].writes)
            if life.touches[index].writes:
                wanted = False
        return found[::-1]

    def _write(self, runs: list[_Run], start: dict[Buffer, bool], budget: int, homes: Homes) -> list[Task]:
        """What is behind an evict when a step ends may go in the next one, if steps that begin with it end so too."""
        sizes = {life.buffer: life.size for life in self.lives.values()}
        m = self.program.num_microbatches
        writer = _Writer(self, homes, budget, sum(sizes[canonical(buffer, m)[0]] for buffer in start))
        writer.plan(runs)
        left: dict[Buffer, int] = {}
        for _ in range(_ROUNDS):
            tasks, found = writer.written(left)
            if found == left:
                start.update(dict.fromkeys(left, True))
                return tasks
            left = found
        return writer.written({}, leaves=False)[0]

    def instance(self, life: Life, time: int) -> tuple[int, Buffer]:
        """The position in the body at which an instance's time falls, and the instance's name there."""
        position = time % self.count
        return position, shift_buffer(life.buffer, (position - time) // self.count, self.program.num_microbatches)


class _Writer:
    """Writes the list, dropping what may go as late as possible, so that nobody waits for an evict early."""

    def __init__(self, emitter: Emitter, homes: Homes, budget: int, held: int) -> None:
        self.emitter, self.homes, self.budget, self.held_at_start = emitter, homes, budget, held
        count = emitter.count
        self.loads: list[list[tuple[int, Buffer, int]]] = [[] for _ in range(count)]
        self.evicts: list[list[Buffer]] = [[] for _ in range(count)]
        self.drops: list[list[tuple[Buffer, int]]] = [[] for _ in range(count)]
        self.births = [0] * count  # less what the program's own drops free
        self.held = 0
        self.free: dict[Buffer, int] = {}  # clean or dead
        self.leaving: dict[Buffer, int] = {}  # behind an evict

    def plan(self, runs: list[_Run]) -> None:
        at = self.emitter.instance
        for run in runs:
            life = run.life
            if run.load_time is not None:
                position, buffer = at(life, run.load_time)
                self.loads[position].append((run.first - run.load_time, buffer, life.size))
            elif life.buffer.kind != "constant" and not (life.touches[0].renamed and run.first == life.touches[0].time):
                self.births[at(life, run.first)[0]] += life.size
            position, buffer = at(life, run.last)
            if run.dropped:
                self.drops[position].append((buffer, life.size))
            elif isinstance(self.emitter.tasks[position], Drop):
                self.births[position] -= life.size
        for life in self.emitter.lives.values():
            for touch, home in zip(life.touches, self.emitter.homeward(life), strict=True):
                if home:
                    position, buffer = at(life, touch.time)
                    self.evicts[position].append(buffer)

    def written(self, left: dict[Buffer, int], leaves: bool = True) -> tuple[list[Task], dict[Buffer, int]]:
        """The list that begins with `left` behind evicts of the step before, and what it leaves so to the next."""
        self.held, self.free, self.leaving = self.held_at_start + sum(left.values()), {}, dict(left)
        tasks = list(self._tasks())
        for queue in (self.free, self.leaving):
            for buffer in list(queue):
                if not (leaves and queue is self.leaving and buffer.kind in _LEFT):
                    tasks.append(Drop(buffer))
                    del queue[buffer]
        m = self.emitter.program.num_microbatches
        return tasks, {shift_buffer(buffer, -1, m): size for buffer, size in self.leaving.items()}

    def _tasks(self) -> Iterator[Task]:
        emitter = self.emitter
        for position, task in enumerate(emitter.tasks):
            for _, buffer, size in sorted(self.loads[position]):
                yield from self._room(size, buffer)
                yield Load(buffer, self.homes.of(emitter.device, buffer))
                self.held += size
            yield from self._room(max(self.births[position], 0) + emitter.workspace[position], None)
            yield task
            self.held += self.births[position]
            leaving = self.evicts[position]
            for buffer in leaving:
                yield Evict(buffer, self.homes.of(emitter.device, buffer))
            for buffer, size in self.drops[position]:
                (self.leaving if buffer in leaving else self.free)[buffer] = size

    def _room(self, size: int, own: Buffer | None) -> Iterator[Task]:
        """Drop what may go until `size` fits, and the old copy of a buffer that is about to be loaded."""
        for queue in (self.free, self.leaving):
            while queue and (self.held + size > self.budget or own in queue):
                buffer = next(iter(queue)) if own not in queue else own
                self.held -= queue.pop(buffer)
                yield Drop(buffer)
        if self.held + size > self.budget:
            raise ProgramError(f"residency lost count: {self.held + size} bytes planned into {self.budget}")


def _hoisted(levels: list[int], first: int, last: int, size: int, budget: int) -> int:
    """The earliest position not before `first` from which on `size` fits up to `last`; takes the room."""
    room, found = levels[first:last], first
    if max(room) + size > budget:
        found = last - next(index for index, level in enumerate(reversed(room)) if level + size > budget)
        room = room[found - first :]
    levels[found:last] = [level + size for level in room]
    return found


def _tail(gap: Gap) -> int:
    """Positions reserved for the load that ends a gap."""
    return 0 if gap.tight else gap.span_length - (gap.start - gap.span_start) - gap.length


def _host_updates(program: Program, device: int) -> dict[Buffer, int]:
    """When a host update of this device makes a buffer's instance 0 at home; others make it before the step begins."""
    found: dict[Buffer, int] = {}
    body = program.devices[device].body
    for position, task in enumerate(body):
        if isinstance(task, Update) and task.host:
            for buffer in writes(task, program.outline):
                base, ahead = canonical(buffer, program.num_microbatches)
                found[base] = position - ahead * len(body)
    return found
