"""A choice of what stays into a better one: exchange gaps as long as that saves bytes."""

from itertools import pairwise

from counterpoint.passes.body import Body, Gap
from counterpoint.passes.room import Room

_Journal = list[tuple[Gap, bool]]
"""Gaps that were changed, in order, and whether they were tight before."""


def improve(body: Body, budget: int, effort: int) -> None:
    """Keep gaps where they fit, or where giving up others instead moves fewer bytes; `effort` bounds the looks."""
    exchange = _Exchange(body, budget, effort)
    exchange.fill([])
    while exchange.round() and exchange.effort > 0:
        pass


class _Exchange:
    """Local search. `evicts` counts the given-up gaps of each dirty group: the first costs an evict, the others none.

    `frees` is what a gap gives back, as `Room` counts it; `over` are the gaps over each position. `hope` is the
    most that keeping one more gap can save.
    """

    def __init__(self, body: Body, budget: int, effort: int) -> None:
        self.body, self.effort = body, effort
        self.room = Room(body.occupied(), budget)
        self.given_up = {id(gap): gap for gap in body.gaps if not gap.kept and not gap.fixed}
        self.frees: dict[tuple[int, bool], int] = {}
        self.covers: dict[int, int] = {}
        self.over: list[list[Gap]] = [[] for _ in body.needs]
        self.groups: dict[int, list[Gap]] = {}
        self.evicts: dict[int, int] = {}
        self.hope = 0
        for gap in body.gaps:
            self._note(gap)

    def _note(self, gap: Gap) -> None:
        key, room = id(gap), self.room
        self.frees[key, False] = room.range(gap.start, gap.length, gap.size)
        self.frees[key, True] = room.range(gap.span_start, gap.span_length, gap.size)
        self.covers[key] = room.range(gap.start, min(gap.length, room.count), room.tops & -room.tops)
        for offset in range(gap.start, gap.start + min(gap.length, room.count)):
            self.over[offset % room.count].append(gap)
        if gap.dirty and gap.length:
            self.groups.setdefault(gap.group, []).append(gap)
        if gap.dirty and not gap.kept:
            self.evicts[gap.group] = self.evicts.get(gap.group, 0) + 1

    def round(self) -> bool:
        """Try to keep each given-up gap and to give up kept ones; whether any of it saved bytes."""
        changed = False
        self.hope = max(map(self._saving, self.given_up.values()), default=0)
        for gap in sorted(self.given_up.values(), key=self._rank):
            changed = self._try_with_all(gap) or changed
        alone = [[gap] for gap in self.body.gaps if gap.length]
        pairs = [list(pair) for group in self.groups.values() for pair in pairwise(group)]
        for gaps in (*alone, *pairs, *self.groups.values()):
            changed = (self.effort > 0 and self._try_without(gaps)) or changed
        return changed

    def _rank(self, gap: Gap) -> tuple[int, int, int, int]:
        return -self._saving(gap), gap.length, gap.start, gap.index

    def _saving(self, gap: Gap) -> int:
        return gap.size * (2 if gap.dirty and self.evicts[gap.group] == 1 else 1)

    def _cost(self, gap: Gap) -> int:
        return gap.size * (2 if gap.dirty and not self.evicts.get(gap.group) else 1)

    def _try_with_all(self, gap: Gap) -> bool:
        """Keep the gap instead of the cheapest others, or of any one where memory is shortest and the cheapest then."""
        if self.effort <= 0 or gap.kept:
            return False
        if self._try_with(gap, None):
            return True
        tight = gap.tight
        self._keep(gap)
        _, position = self.room.worst()
        self._give_up(gap, tight)
        others = [other for other in self.over[position] if other.kept]
        return any(self.effort > 0 and self._try_with(gap, other) for other in others)

    def _try_with(self, gap: Gap, victim: Gap | None) -> bool:
        """Keep the gap, give up others where it does not fit, fill what room that leaves; undo it unless it saves."""
        balance, journal = self._saving(gap), [(gap, gap.tight)]
        self._keep(gap)
        while self.room.lacking():
            victim = victim or self._cheapest(gap)
            if victim is None or balance + self.hope <= self._cost(victim):
                self._undo(journal)
                return False
            balance -= self._cost(victim)
            self._give_up(victim)
            journal.append((victim, False))
            victim = None
        return self._settle(balance, journal)

    def _try_without(self, gaps: list[Gap]) -> bool:
        """Give gaps up and fill their room with others; undo it unless it saves."""
        balance, journal = 0, []
        for gap in gaps:
            if gap.kept:
                balance -= self._cost(gap)
                self._give_up(gap)
                journal.append((gap, False))
        return bool(journal) and self._settle(balance, journal)

    def _settle(self, balance: int, journal: _Journal) -> bool:
        """Keep whatever else fits; undo everything unless it saves."""
        balance += self.fill(journal)
        if balance <= 0:
            self._undo(journal)
        return balance > 0

    def fill(self, journal: _Journal) -> int:
        """Keep what fits beside what was just given up, and note it; the bytes that saves."""
        saved, fresh, fits = 0, {id(gap) for gap, _ in journal}, self.room.fits
        self.effort -= len(self.given_up)
        fitting = [gap for key, gap in self.given_up.items() if fits(self.frees[key, gap.tight]) and key not in fresh]
        for gap in sorted(fitting, key=self._rank):
            if fits(self.frees[id(gap), gap.tight]):
                saved += self._saving(gap)
                journal.append((gap, gap.tight))
                self._keep(gap)
        return saved

    def _undo(self, journal: _Journal) -> None:
        for gap, tight in reversed(journal):
            if gap.kept:
                self._give_up(gap, tight)
            else:
                self._keep(gap)

    def _cheapest(self, own: Gap) -> Gap | None:
        """The kept gap over the fullest position that frees most of the wanted room for the bytes it costs."""
        lacking = self.room.lacking()
        wanted, position = self.room.worst()
        best_score, best = 0.0, None
        self.effort -= len(self.over[position])
        for gap in self.over[position]:
            if gap.kept and gap is not own:
                freed = min(gap.size, wanted) * (self.covers[id(gap)] & lacking).bit_count()
                score = self._cost(gap) / freed
                if best is None or score < best_score:
                    best_score, best = score, gap
        return best

    def _keep(self, gap: Gap) -> None:
        del self.given_up[id(gap)]
        self.room.free -= self.frees[id(gap), gap.tight]
        gap.kept, gap.tight = True, False
        if gap.dirty:
            self.evicts[gap.group] -= 1

    def _give_up(self, gap: Gap, tight: bool = False) -> None:
        gap.kept, gap.tight = False, tight
        self.given_up[id(gap)] = gap
        self.room.free += self.frees[id(gap), tight]
        if gap.dirty:
            self.evicts[gap.group] = self.evicts.get(gap.group, 0) + 1
