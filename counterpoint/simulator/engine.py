"""The event loop: tasks start when all they wait for has ended, and end after their time or their transfer."""

import heapq

from counterpoint.core.collector import collector_paused
from counterpoint.core.costs import Costs
from counterpoint.core.edges import Run, unrolled
from counterpoint.core.errors import ProgramError
from counterpoint.core.machine import Machine
from counterpoint.core.program import Program
from counterpoint.core.task import AllReduce, Clip, Drop, Evict, Load, Receive, Send, Task
from counterpoint.core.timeline import Span, Timeline
from counterpoint.simulator.memory import tier_memory
from counterpoint.simulator.network import Network


def simulate(program: Program, costs: Costs, machine: Machine, steps: int = 4) -> Timeline:
    """Forecast a run of `steps` steps; raises ProgramError if tasks wait for one another in a circle."""
    if len(machine.devices) < len(program.devices):
        raise ValueError(
            f"the program needs {len(program.devices)} devices, {machine.name!r} has {len(machine.devices)}"
        )
    with collector_paused():
        return _simulate(program, costs, machine, steps)


def _simulate(program: Program, costs: Costs, machine: Machine, steps: int) -> Timeline:
    run = unrolled(program, steps)
    engine = _Engine(run, costs, machine)
    engine.go()
    step_of = _steps(program, steps)
    steady = max(0, steps - program.epilogue_steps - 1)
    return Timeline(
        num_devices=len(program.devices),
        spans=engine.spans(step_of),
        step_ends_ns=_step_ends(run, engine.ends, step_of),
        memory=tier_memory(program, run, costs, machine, engine.starts, engine.ends),
        link_bytes=_link_bytes(machine, engine.moves),
        steady_link_bytes=_link_bytes(machine, engine.moves, [step == steady for step in step_of]),
    )


class _Engine:
    """State of one simulation; arrays are indexed by task."""

    def __init__(self, run: Run, costs: Costs, machine: Machine) -> None:
        self.run, self.costs, self.machine = run, costs, machine
        self.network = Network(machine)
        count = len(run.tasks)
        self.starts, self.ends, self.blockers = [-1] * count, [-1] * count, [-1] * count
        self.missing = [len(p) for p in run.predecessors]
        self.successors: list[list[int]] = [[] for _ in range(count)]
        for index, before in enumerate(run.predecessors):
            for other in before:
                self.successors[other].append(index)
        self.absent = [len(group) for group in run.meetings]
        self.flows_left: dict[int, tuple[int, int]] = {}
        self.events: list[tuple[int, int]] = []
        self.moves: list[tuple[int, tuple[str, ...], int]] = []
        self.home_paths: dict[tuple[int, str, bool], tuple[str, ...]] = {}
        self.peer_paths: dict[tuple[int, int], tuple[str, ...]] = {}
        self.done = 0

    def go(self) -> None:
        for index, missing in enumerate(self.missing):
            if not missing:
                self._ready(index, 0)
        now = 0
        while True:
            flow_end = self.network.next_end_ns(now) if not self.events or self.events[0][0] > now else None
            if self.events and (flow_end is None or self.events[0][0] <= flow_end):
                now, index = heapq.heappop(self.events)
                self._end(index, now)
            elif flow_end is not None:
                now = flow_end
                self._arrive(self.moves[self.network.finish()][0], now)
            else:
                break
        if self.done < len(self.run.tasks):
            stuck = next(i for i, end in enumerate(self.ends) if end < 0)
            raise ProgramError(
                f"deadlock: {len(self.run.tasks) - self.done} of {len(self.run.tasks)} tasks never start, the first is "
                f"{self.run.tasks[stuck]} on device {self.run.devices[stuck]}; core/check.py explains why"
            )

    def _ready(self, index: int, now: int) -> None:
        group = self.run.meeting[index]
        if group < 0:
            self._start(index, now)
            return
        self.absent[group] -= 1
        members = self.run.meetings[group]
        if not self.absent[group] and self._complete(members):
            for member in members:
                self.blockers[member] = self.blockers[index]
            self._meet(members, now)

    def _complete(self, members: list[int]) -> bool:
        task = self.run.tasks[members[0]]
        return len(members) == (len(task.peers) if isinstance(task, (AllReduce, Clip)) else 2)

    def _start(self, index: int, now: int) -> None:
        self.starts[index] = now
        task, device = self.run.tasks[index], self.run.devices[index]
        match task:
            case Load(buffer, tier) | Evict(buffer, tier):
                path = self._home_path(device, tier, isinstance(task, Load))
                self._move(index, [path], self.costs.buffer_bytes(buffer), self.network.latency_ns(path), now)
            case Drop():
                heapq.heappush(self.events, (now, index))
            case _:
                speed = self.machine.devices[device].speed_percent
                heapq.heappush(self.events, (now + self.costs.duration_ns(task, speed), index))

    def _meet(self, members: list[int], now: int) -> None:
        """All sides are there: move the bytes; a collective is a ring around its peers, twice."""
        for index in members:
            self.starts[index] = now
        first, devices = members[0], self.run.devices
        task = self.run.tasks[first]
        match task:
            case Send(buffer, peer):
                path = self._peer_path(devices[first], peer)
                self._move(first, [path], self.costs.buffer_bytes(buffer), self.network.latency_ns(path), now)
            case Receive(buffer, peer):
                path = self._peer_path(peer, devices[first])
                self._move(first, [path], self.costs.buffer_bytes(buffer), self.network.latency_ns(path), now)
            case AllReduce(peers=peers) | Clip(peers=peers):
                rounds = 2 * (len(peers) - 1)
                ring = [self._peer_path(a, b) for a, b in zip(peers, peers[1:] + peers[:1], strict=True) if a != b]
                size = -(-rounds * self.costs.reduced_bytes(task) // len(peers))
                latency = rounds * max(map(self.network.latency_ns, ring), default=0)
                self._move(first, ring or [()], size, latency, now)

    def _home_path(self, device: int, tier: str, loads: bool) -> tuple[str, ...]:
        key = (device, tier, loads)
        if key not in self.home_paths:
            home = self.machine.home(device, tier)
            self.home_paths[key] = home.load if loads else home.evict
        return self.home_paths[key]

    def _peer_path(self, sender: int, receiver: int) -> tuple[str, ...]:
        key = (sender, receiver)
        if key not in self.peer_paths:
            self.peer_paths[key] = self.machine.path(sender, receiver)
        return self.peer_paths[key]

    def _move(self, owner: int, paths: list[tuple[str, ...]], size: int, latency: int, now: int) -> None:
        """So many bytes over each path at once; the task ends when the last has arrived."""
        self.flows_left[owner] = (len(paths), latency)
        for path in paths:
            self.moves.append((owner, path, size))
            if path and size:
                self.network.add(len(self.moves) - 1, path, size, now)
            else:
                self._arrive(owner, now)

    def _arrive(self, owner: int, now: int) -> None:
        left, latency = self.flows_left[owner]
        self.flows_left[owner] = (left - 1, latency)
        if left == 1:
            heapq.heappush(self.events, (now + latency, owner))

    def _end(self, index: int, now: int) -> None:
        group = self.run.meeting[index]
        for member in (index,) if group < 0 else self.run.meetings[group]:
            self.ends[member] = now
            self.done += 1
            for other in self.successors[member]:
                self.missing[other] -= 1
                if not self.missing[other]:
                    self.blockers[other] = member
                    self._ready(other, now)

    def spans(self, step_of: list[int]) -> tuple[Span, ...]:
        run = self.run
        found = [
            Span(run.devices[i], run.lanes[i], task, self.starts[i], self.ends[i], step_of[i], self._blocker(i))
            for i, task in enumerate(run.tasks)
        ]
        found.sort(key=lambda span: (span.start_ns, span.device, span.lane, span.end_ns))
        return tuple(found)

    def _blocker(self, index: int) -> Task | None:
        """The task that was waited for. A drop passes on what it waited for itself, and so does a transfer that
        began only after the better part of the wait."""
        blocker, run = self.blockers[index], self.run
        if blocker < 0 or run.lanes[blocker] == run.lanes[index]:
            return None
        begin = -1
        while (before := self.blockers[blocker]) >= 0:
            name = run.lanes[blocker]
            if name != "drop":
                if name == "compute" or run.lanes[before] == name:
                    break
                begin = begin if begin >= 0 else self._lane_free(index)
                if self.starts[blocker] - begin <= self.ends[blocker] - self.starts[blocker]:
                    break
            blocker = before
        return run.tasks[blocker]

    def _lane_free(self, index: int) -> int:
        """When the lane of a task had nothing left to do before it."""
        run = self.run
        return max((self.ends[p] for p in run.predecessors[index] if run.lanes[p] == run.lanes[index]), default=0)


def _steps(program: Program, steps: int) -> list[int]:
    """The step each task belongs to: its body's, the first for the prologue, the last for the epilogue."""
    found: list[int] = []
    for part in program.devices:
        bodies = steps - program.epilogue_steps
        found += [-1] * len(part.prologue)
        for step in range(bodies):
            found += [step] * len(part.body)
        found += [bodies] * len(part.epilogue)
    return found


def _step_ends(run: Run, ends: list[int], step_of: list[int]) -> tuple[int, ...]:
    last: dict[int, int] = {}
    for index, name in enumerate(run.lanes):
        if name == "compute" and step_of[index] >= 0:
            last[step_of[index]] = max(last.get(step_of[index], 0), ends[index])
    return tuple(last[step] for step in sorted(last))


def _link_bytes(
    machine: Machine, moves: list[tuple[int, tuple[str, ...], int]], chosen: list[bool] | None = None
) -> tuple[tuple[str, int], ...]:
    """Bytes over each link, of all tasks or of the chosen ones."""
    totals = {link.name: 0 for link in machine.links}
    for owner, path, size in moves:
        if chosen is None or chosen[owner]:
            for name in path:
                totals[name] += size
    return tuple(totals.items())
