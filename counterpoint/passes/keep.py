"""Lives into the choice of what stays on the device between two touches: the residency pass's one decision.

Between two touches of a buffer lies a gap. Kept, the buffer occupies memory for the length of the gap; given up, it
costs a load, and before that an evict if home does not have its content yet. The choice is a sweep over the cyclic
body: where memory is short, give up the gap that is needed last (Belady 1966), cheaper ones first; then take back
what fits after all.
"""

import heapq
from dataclasses import dataclass

from counterpoint.passes.lives import Life


@dataclass(slots=True)
class Gap:
    """Between touches `index` and `index + 1` of a life; giving it up frees positions `start` to `start + length`.

    `span_start` and `span_length` are all positions between the touches; the difference is room reserved for writing
    the buffer out beside the next computation and for reading it in beside the previous one. A `fixed` gap is such
    room alone, before a first or after a last touch. `tight` gives the reserved room up too.
    """

    life: Life
    index: int
    group: int
    dirty: bool
    span_start: int
    span_length: int
    start: int
    length: int
    fixed: bool = False
    kept: bool = True
    tight: bool = False


@dataclass(slots=True)
class Body:
    """A cyclic body as the choice sees it: what each position needs in any case, and the gaps."""

    needs: list[int]
    gaps: list[Gap]

    @property
    def num_positions(self) -> int:
        return len(self.needs)


def choose(body: Body, budget: int) -> None:
    """Sets `kept` of every gap so that no position exceeds the budget; needs alone must fit."""
    for gap in body.gaps:
        gap.kept, gap.tight = not gap.fixed, False
    _Sweep(body, budget).go()
    _take_back(body, budget)


def traffic(body: Body) -> int:
    """Bytes that the gaps given up cost per step."""
    total = 0
    written: set[int] = set()
    for gap in body.gaps:
        if not gap.kept:
            total += gap.life.size
            if gap.dirty and gap.group not in written:
                written.add(gap.group)
                total += gap.life.size
    return total


def occupied(body: Body) -> list[int]:
    """Bytes at each position under the current choice."""
    difference = [0] * (body.num_positions + 1)
    everywhere = 0
    for gap in body.gaps:
        size = gap.life.size
        everywhere += _add(difference, gap.span_start, gap.span_length, size)
        if not gap.kept:
            everywhere += _add(difference, *_freed(gap), -size)
    held, result = everywhere, []
    for position, need in enumerate(body.needs):
        held += difference[position]
        result.append(held + need)
    return result


def _freed(gap: Gap) -> tuple[int, int]:
    return (gap.span_start, gap.span_length) if gap.tight else (gap.start, gap.length)


def _add(difference: list[int], start: int, length: int, size: int) -> int:
    """Adds to a cyclic range; returns what whole rounds add everywhere."""
    count = len(difference) - 1
    rounds, rest = divmod(length, count)
    if rest:
        start %= count
        difference[start] += size
        if start + rest < count:
            difference[start + rest] -= size
        elif start + rest > count:
            difference[0] += size
            difference[start + rest - count] -= size
    return rounds * size


class _Sweep:
    """Goes through the positions once; what covers a position and may be given up waits in two heaps."""

    def __init__(self, body: Body, budget: int) -> None:
        self.body, self.budget = body, budget
        self.count = body.num_positions
        self.change = [0] * (self.count + 1)
        self.held = 0
        self.written: set[int] = set()
        self.heaps: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        self.entering: list[list[tuple[int, int]]] = [[] for _ in range(self.count)]
        self.reserved: list[list[int]] = [[] for _ in range(self.count)]
        levels = occupied(body)
        for position, level in enumerate(levels):
            self.change[position] = level - (levels[position - 1] if position else 0)
        for number, gap in enumerate(body.gaps):
            self._enter(number, gap)

    def _enter(self, number: int, gap: Gap) -> None:
        for piece_start, piece_end, last in self._pieces(gap.start, gap.length):
            if piece_end > piece_start:
                self.entering[piece_start].append((-last, number))
        inner = gap.start - gap.span_start
        for offset in (*range(inner), *range(inner + gap.length, gap.span_length)):
            self.reserved[(gap.span_start + offset) % self.count].append(number)

    def _pieces(self, start: int, length: int) -> list[tuple[int, int, int]]:
        """(start, stop, last position counted on) of a cyclic range cut at the body's end."""
        count = self.count
        start %= count
        if length >= count:
            return [(0, count, start + length)]
        if start + length <= count:
            return [(start, start + length, start + length)]
        return [(0, start + length - count, start + length - count), (start, count, start + length)]

    def go(self) -> None:
        for position in range(self.count):
            self.held += self.change[position]
            for last, number in self.entering[position]:
                gap = self.body.gaps[number]
                heapq.heappush(self.heaps[self._is_dirty(gap)], (last, number))
            while self.held > self.budget:
                number = self._victim(position)
                if number < 0:
                    number = self._tight_victim(position)
                if number < 0:
                    break
                self._give_up(number, position)

    def _is_dirty(self, gap: Gap) -> bool:
        return gap.dirty and gap.group not in self.written

    def _top(self, dirty: bool, position: int) -> tuple[int, int] | None:
        heap = self.heaps[dirty]
        while heap:
            last, number = heap[0]
            gap = self.body.gaps[number]
            if not gap.kept or -last <= position:
                heapq.heappop(heap)
            elif self._is_dirty(gap) != dirty:
                heapq.heappush(self.heaps[not dirty], heapq.heappop(heap))
            else:
                return -last, number
        return None

    def _victim(self, position: int) -> int:
        """The furthest next use, a buffer that must be written first counting half."""
        dirty = self._top(True, position)
        clean = self._top(False, position)
        if clean and (not dirty or 2 * (clean[0] - position) >= dirty[0] - position):
            return clean[1]
        return dirty[1] if dirty else -1

    def _tight_victim(self, position: int) -> int:
        """Last resort: give up room that was reserved for overlapping transfers, largest first."""
        gaps = self.body.gaps
        candidates = [n for n in self.reserved[position] if not gaps[n].tight]
        return max(candidates, key=lambda n: (gaps[n].life.size, -n), default=-1)

    def _give_up(self, number: int, position: int) -> None:
        gap = self.body.gaps[number]
        tight = not self._covers(gap, position)
        size = gap.life.size
        if gap.kept and not tight:
            self._free(gap.start, gap.length, size, position)
        else:
            if not gap.kept:
                self._free(gap.start, gap.length, -size, position)
            self._free(gap.span_start, gap.span_length, size, position)
            gap.tight = True
        gap.kept = False
        if gap.dirty:
            self.written.add(gap.group)

    def _covers(self, gap: Gap, position: int) -> bool:
        return (position - gap.start) % self.count < gap.length

    def _free(self, start: int, length: int, size: int, position: int) -> None:
        rounds, rest = divmod(length, self.count)
        self.held -= rounds * size
        for piece_start, piece_stop, _ in self._pieces(start, rest) if rest else []:
            if piece_stop <= position:
                continue
            if piece_start <= position:
                self.held -= size
            else:
                self.change[piece_start] -= size
            if piece_stop < self.count:
                self.change[piece_stop] += size


def _take_back(body: Body, budget: int, effort: int = 2_000_000) -> None:
    """Keeps given-up gaps that fit after all, those that save most for the room they take first."""
    levels = occupied(body)
    order = [g for g in body.gaps if not g.kept and not g.fixed]
    order.sort(key=lambda g: (_freed(g)[1] * (1 if g.dirty else 2), g.life.buffer, g.index))
    for gap in order:
        start, length = _freed(gap)
        effort -= min(length, body.num_positions)
        if effort < 0:
            return
        if _fits(levels, start, length, gap.life.size, budget):
            gap.kept = True
            _raise(levels, start, length, gap.life.size)


def _fits(levels: list[int], start: int, length: int, size: int, budget: int) -> bool:
    count = len(levels)
    rounds, rest = divmod(length, count)
    if rounds and max(levels) + (rounds + (rest > 0)) * size > budget:
        return False
    return all(levels[(start + offset) % count] + size <= budget for offset in range(rest))


def _raise(levels: list[int], start: int, length: int, size: int) -> None:
    count = len(levels)
    rounds, rest = divmod(length, count)
    for position in range(count if rounds else 0):
        levels[position] += rounds * size
    for offset in range(rest):
        levels[(start + offset) % count] += size
