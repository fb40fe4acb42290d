"""Lives of a device's body into the needs and gaps that `passes/ladder.py` chooses among."""

from itertools import pairwise

from counterpoint.core.costs import Costs
from counterpoint.core.program import Program, lane
from counterpoint.core.task import Buffer
from counterpoint.passes.body import Body, Gap
from counterpoint.passes.lives import Life


def body_of(
    program: Program, device: int, costs: Costs, lives: dict[Buffer, Life], pinned: frozenset[int], ahead: int
) -> Body:
    """`pinned` layers keep their saved tensors; loads and evicts get room beside `ahead` computations."""
    tasks = program.devices[device].body
    needs = [costs.workspace_bytes(task) for task in tasks]
    free = _Builder(len(tasks), _computations(program, device), ahead)
    held = _Builder(len(tasks), [], 0)
    for life in lives.values():
        for number, touch in enumerate(life.touches):
            if not (touch.renamed and number == 0):
                needs[touch.time % len(tasks)] += life.size
        if life.size:
            (held if life.buffer.kind == "saved" and life.buffer.owner in pinned else free).add(life)
    return Body(Body(needs, held.gaps).occupied(), free.gaps)


def _computations(program: Program, device: int) -> list[int]:
    return [p for p, task in enumerate(program.devices[device].body) if lane(task) == "compute"]


class _Builder:
    def __init__(self, count: int, computations: list[int], ahead: int) -> None:
        self.count = count
        self.gaps: list[Gap] = []
        self.groups = 0
        self.before = _distances(count, computations, ahead, -1)
        self.after = _distances(count, computations, ahead, +1)

    def add(self, life: Life) -> None:
        touches = life.touches
        if life.buffer.kind == "constant":
            self._add_constant(life)
            return
        if life.born_at_home:
            self._reserve(life, touches[0].time - self.before[touches[0].time % self.count], touches[0].time)
        dirty, last_write = False, max((i for i, touch in enumerate(touches) if touch.writes), default=-1)
        for index, (touch, following) in enumerate(pairwise(touches)):
            if touch.writes:
                self.groups += 1
                dirty = not (life.shared and index == last_write)
            if not touch.drops:
                self._gap(life, index, touch.time, following.time, dirty, touch.writes)
        last = touches[-1]
        if life.shared and last.writes:
            self._reserve(life, last.time + 1, last.time + 1 + self.after[last.time % self.count])

    def _add_constant(self, life: Life) -> None:
        times = [touch.time for touch in life.touches]
        for index, (time, following) in enumerate(zip(times, [*times[1:], times[0] + self.count], strict=True)):
            self._gap(life, index, time, following, False, False)

    def _gap(self, life: Life, index: int, time: int, following: int, dirty: bool, writes_out: bool) -> None:
        span = following - time - 1
        if span <= 0:
            return
        head = min(span, self.after[time % self.count] if writes_out else 0)
        tail = min(span - head, self.before[following % self.count])
        start = (time + 1) % self.count
        inner = span - head - tail
        self.gaps.append(Gap(life, index, self.groups, dirty, life.size, start, span, start + head, inner))

    def _reserve(self, life: Life, start: int, stop: int) -> None:
        if stop > start:
            begin = start % self.count
            self.gaps.append(Gap(life, -1, -1, False, life.size, begin, stop - start, begin, 0, fixed=True, kept=False))


def _distances(count: int, computations: list[int], ahead: int, direction: int) -> list[int]:
    """How many positions lie between each position and the `ahead`-th computation in a direction, that included."""
    if not computations or not ahead:
        return [0] * count
    found = [0] * count
    marks = set(computations)
    window: list[int] = []
    order = range(2 * count) if direction < 0 else range(2 * count - 1, -1, -1)
    for time in order:
        if len(window) >= ahead:
            found[time % count] = min(abs(time - window[-ahead]), count - 1)
        if time % count in marks:
            window.append(time)
    return found
