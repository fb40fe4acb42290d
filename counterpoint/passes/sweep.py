"""A body into a first choice of what stays: where memory is short, give up what is needed last.

That is Belady's rule (1966) on a cyclic body, weighed by what a gap costs and by how much of it is room that is wanted.
"""

import heapq
from bisect import insort
from itertools import pairwise

from counterpoint.passes.body import Body, Gap


def sweep(body: Body, budget: int) -> None:
    """Sets `kept` and `tight` of every gap so that no position exceeds the budget; needs alone must fit."""
    body.keep_all()
    _Sweep(body, budget).go()


class _Sweep:
    """Goes through the positions once; what covers a position and may be given up waits in a heap per size and cost,
    what is needed last on top.

    `change` is how what is held differs from the position before.
    """

    def __init__(self, body: Body, budget: int) -> None:
        self.body, self.budget = body, budget
        self.count = body.num_positions
        levels = body.occupied()
        self.change = [levels[0], *(b - a for a, b in pairwise(levels)), 0]
        self.held = 0
        self.written: set[int] = set()
        self.heaps: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        self.keys: list[tuple[int, bool]] = []
        self.entering: list[list[tuple[int, int]]] = [[] for _ in range(self.count)]
        self.reserved: list[list[int]] = [[] for _ in range(self.count)]
        for number, gap in enumerate(body.gaps):
            self._enter(number, gap)

    def _enter(self, number: int, gap: Gap) -> None:
        if gap.length:
            for begin, _, last in self._pieces(gap.start, gap.length):
                self.entering[begin].append((-last, number))
        if gap.length < gap.span_length:
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
                self._push(last, number)
            while self.held > self.budget:
                number = self._victim(position)
                if number < 0:
                    number = self._tight_victim(position)
                if number < 0:
                    break
                self._give_up(self.body.gaps[number], position)

    def _push(self, last: int, number: int) -> None:
        gap = self.body.gaps[number]
        key = (_bucket(gap.size), gap.dirty and gap.group not in self.written)
        heap = self.heaps.get(key)
        if heap is None:
            heap = self.heaps[key] = []
            insort(self.keys, key)
        heapq.heappush(heap, (last, number))

    def _top(self, dirty: bool, heap: list[tuple[int, int]], position: int) -> tuple[int, int] | None:
        """The gap of a heap that is needed last, after others that are through or cost less by now have left it."""
        while heap:
            last, number = heap[0]
            gap = self.body.gaps[number]
            if not gap.kept or -last <= position:
                heapq.heappop(heap)
            elif dirty and gap.group in self.written:
                self._push(*heapq.heappop(heap))
            else:
                return -last, number
        return None

    def _victim(self, position: int) -> int:
        """The furthest next use per byte moved, counting only the room that is wanted."""
        wanted = self.held - self.budget
        best_score, best = 0.0, -1
        for key in [key for key in self.keys if key[1]]:
            self._top(True, self.heaps[key], position)  # what costs less by now is among the others afterwards
        for key in self.keys:
            top = self._top(key[1], self.heaps[key], position)
            if top is not None:
                size = self.body.gaps[top[1]].size
                score = min(size, wanted) * (top[0] - position) / (size * (2 if key[1] else 1))
                if (score, top[1]) > (best_score, best):
                    best_score, best = score, top[1]
        return best

    def _tight_victim(self, position: int) -> int:
        """Last resort: give up room that was reserved for overlapping transfers, largest first."""
        gaps = self.body.gaps
        candidates = [n for n in self.reserved[position] if not gaps[n].tight]
        return max(candidates, key=lambda n: (gaps[n].size, -n), default=-1)

    def _give_up(self, gap: Gap, position: int) -> None:
        if gap.kept and (position - gap.start) % self.count < gap.length:
            self._free(gap.start, gap.length, gap.size, position)
        else:
            if not gap.kept:
                self._free(gap.start, gap.length, -gap.size, position)
            self._free(gap.span_start, gap.span_length, gap.size, position)
            gap.tight = True
        gap.kept = False
        if gap.dirty:
            self.written.add(gap.group)

    def _free(self, start: int, length: int, size: int, position: int) -> None:
        rounds, rest = divmod(length, self.count)
        self.held -= rounds * size
        for piece_start, piece_stop, _ in self._pieces(start, rest) if rest else ():
            if piece_stop <= position:
                continue
            if piece_start <= position:
                self.held -= size
            else:
                self.change[piece_start] -= size
            self.change[piece_stop] += size


def _bucket(size: int) -> int:
    """Sizes to three binary digits: those of one heap differ little, and there are few heaps."""
    digits = max(size.bit_length() - 3, 0)
    return size >> digits << digits
