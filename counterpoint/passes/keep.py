"""Lives into the choice of what stays on the device between two touches: the residency pass's one decision.

Between two touches of a buffer lies a gap. Kept, the buffer occupies memory for the length of the gap; given up, it
costs a load, and before that an evict if home does not have its content yet. The choice is a sweep over the cyclic
body: where memory is short, give up the gap that is needed last (Belady 1966), weighed by what it costs and by how
much of it is room that is wanted; then take back what fits after all, and exchange as long as that saves bytes.
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


def choose(body: Body, budget: int, starts: tuple[int, ...] = (100,)) -> None:
    """Sets `kept` of every gap so that no position exceeds the budget; needs alone must fit.

    Each start is a sweep that leaves so many percent of the room beyond the needs, then improved within all of it;
    the one that moves fewest bytes stands.
    """
    low, best, saved_choice = max(body.needs), -1, []
    for percent in starts:
        for gap in body.gaps:
            gap.kept, gap.tight = not gap.fixed, False
        _Sweep(body, low + max(0, budget - low) * percent // 100).go()
        improve(body, budget)
        bytes_moved = traffic(body)
        if best < 0 or bytes_moved < best:
            best, saved_choice = bytes_moved, snapshot(body)
    restore(body, saved_choice)


def snapshot(body: Body) -> list[tuple[bool, bool]]:
    return [(gap.kept, gap.tight) for gap in body.gaps]


def restore(body: Body, choice: list[tuple[bool, bool]]) -> None:
    for gap, (kept, tight) in zip(body.gaps, choice, strict=True):
        gap.kept, gap.tight = kept, tight


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
    """Goes through the positions once; what covers a position and may be given up waits in a heap per size and cost."""

    def __init__(self, body: Body, budget: int) -> None:
        self.body, self.budget = body, budget
        self.count = body.num_positions
        self.change = [0] * (self.count + 1)
        self.held = 0
        self.written: set[int] = set()
        self.heaps: dict[tuple[int, bool], list[tuple[int, int]]] = {}
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
                self._push(last, number)
            while self.held > self.budget:
                number = self._victim(position)
                if number < 0:
                    number = self._tight_victim(position)
                if number < 0:
                    break
                self._give_up(number, position)

    def _push(self, last: int, number: int) -> None:
        gap = self.body.gaps[number]
        heapq.heappush(self.heaps.setdefault((gap.life.size, self._is_dirty(gap)), []), (last, number))

    def _is_dirty(self, gap: Gap) -> bool:
        return gap.dirty and gap.group not in self.written

    def _top(self, dirty: bool, heap: list[tuple[int, int]], position: int) -> tuple[int, int] | None:
        while heap:
            last, number = heap[0]
            gap = self.body.gaps[number]
            if not gap.kept or -last <= position:
                heapq.heappop(heap)
            elif self._is_dirty(gap) != dirty:
                self._push(*heapq.heappop(heap))
            else:
                return -last, number
        return None

    def _victim(self, position: int) -> int:
        """The furthest next use per byte moved, counting only the room that is wanted."""
        wanted = self.held - self.budget
        best: tuple[float, int] = (0.0, -1)
        for size, dirty in sorted(self.heaps):
            top = self._top(dirty, self.heaps[size, dirty], position)
            if top is not None:
                cost = size * (2 if dirty else 1)
                score = min(size, wanted) * (top[0] - position) / cost
                best = max(best, (score, top[1]))
        return best[1]

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


def improve(body: Body, budget: int, effort: int = 400_000) -> None:
    """Keep gaps after all where they fit, or where giving up others instead moves fewer bytes."""
    exchange = _Exchange(body, budget, effort)
    while exchange.round() and exchange.effort > 0:
        pass


class _Exchange:
    """Local search; `effort` bounds the positions it looks at."""

    def __init__(self, body: Body, budget: int, effort: int) -> None:
        self.body, self.budget, self.effort = body, budget, effort
        self.count = body.num_positions
        self.levels = occupied(body)
        self.given_up: dict[int, int] = {}
        for gap in body.gaps:
            if not gap.kept and gap.dirty:
                self.given_up[gap.group] = self.given_up.get(gap.group, 0) + 1

    def round(self) -> bool:
        """Try each given-up gap once, those that cost most first; whether any was kept."""
        candidates = [gap for gap in self.body.gaps if not gap.kept and not gap.fixed]
        candidates.sort(key=lambda gap: (-self._saving(gap), _freed(gap)[1], gap.life.buffer, gap.index))
        changed = False
        for gap in candidates:
            if self.effort <= 0:
                break
            changed = (not gap.kept and self._try(gap)) or changed
        for gap in self.body.gaps:
            if self.effort <= 0:
                break
            changed = (gap.kept and bool(gap.length) and self._try_without(gap)) or changed
        return changed

    def _saving(self, gap: Gap) -> int:
        return gap.life.size * (2 if gap.dirty and self.given_up[gap.group] == 1 else 1)

    def _cost(self, gap: Gap) -> int:
        return gap.life.size * (2 if gap.dirty and not self.given_up.get(gap.group) else 1)

    def _try(self, gap: Gap) -> bool:
        """Keep the gap, give up others where it does not fit, fill what room that leaves; undo it unless it saves."""
        balance = self._saving(gap)
        journal = [(gap, gap.tight)]
        self._keep(gap)
        while (position := self._overfull(gap)) >= 0:
            victim = self._cheapest(position, gap)
            if victim is None:
                self._undo(journal)
                return False
            balance -= self._cost(victim)
            self._give_up(victim)
            journal.append((victim, False))
        if len(journal) > 1:
            balance += self._fill(journal)
        if balance <= 0:
            self._undo(journal)
        return balance > 0

    def _try_without(self, gap: Gap) -> bool:
        """Give the gap up and fill its room with others; undo it unless it saves."""
        balance = -self._cost(gap)
        journal = [(gap, False)]
        self._give_up(gap)
        balance += self._fill(journal)
        if balance <= 0:
            self._undo(journal)
        return balance > 0

    def _fill(self, journal: list[tuple[Gap, bool]]) -> int:
        """Keep whatever else fits near what was given up; the bytes that saves."""
        saved, fresh = 0, {id(gap) for gap, _ in journal}
        others = [gap for gap in self.body.gaps if not gap.kept and not gap.fixed and id(gap) not in fresh]
        others.sort(key=lambda gap: (-self._saving(gap), gap.life.buffer, gap.index))
        for gap in others:
            if self.effort > 0 and self._fits(gap):
                saved += self._saving(gap)
                journal.append((gap, gap.tight))
                self._keep(gap)
        return saved

    def _fits(self, gap: Gap) -> bool:
        start, length = _freed(gap)
        rounds, rest = divmod(length, self.count)
        self.effort -= 1
        limit = self.budget - gap.life.size * (rounds + 1)
        if rounds and max(self.levels) > limit + gap.life.size * (not rest):
            return False
        return all(self.levels[offset % self.count] <= limit for offset in range(start, start + rest))

    def _undo(self, journal: list[tuple[Gap, bool]]) -> None:
        for gap, tight in reversed(journal):
            if gap.kept:
                self._give_up(gap, tight)
            else:
                self._keep(gap)

    def _overfull(self, gap: Gap) -> int:
        length = min(gap.span_length, self.count)
        self.effort -= length
        levels, count = self.levels, self.count
        worst = max(range(gap.span_start, gap.span_start + length), key=lambda p: levels[p % count])
        return worst % count if levels[worst % count] > self.budget else -1

    def _cheapest(self, position: int, own: Gap) -> Gap | None:
        """The kept gap there that frees most of the wanted room for the bytes it costs."""
        wanted = self.levels[position] - self.budget
        self.effort -= len(self.body.gaps)
        best: tuple[float, int, Gap] | None = None
        for number, gap in enumerate(self.body.gaps):
            if gap.kept and gap is not own and (position - gap.start) % self.count < gap.length:
                score = self._cost(gap) / min(gap.life.size, wanted)
                if best is None or (score, number) < best[:2]:
                    best = (score, number, gap)
        return best[2] if best else None

    def _keep(self, gap: Gap) -> None:
        self._raise(*_freed(gap), gap.life.size)
        gap.kept, gap.tight = True, False
        if gap.dirty:
            self.given_up[gap.group] -= 1

    def _give_up(self, gap: Gap, tight: bool = False) -> None:
        gap.kept, gap.tight = False, tight
        self._raise(*_freed(gap), -gap.life.size)
        if gap.dirty:
            self.given_up[gap.group] = self.given_up.get(gap.group, 0) + 1

    def _raise(self, start: int, length: int, size: int) -> None:
        rounds, rest = divmod(length, self.count)
        self.effort -= rest
        for position in range(self.count if rounds else 0):
            self.levels[position] += rounds * size
        for offset in range(start, start + rest):
            self.levels[offset % self.count] += size
