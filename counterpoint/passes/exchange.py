"""A choice of what stays into a better one: keep what fits after all, and exchange as long as that saves bytes."""

from counterpoint.passes.body import Body, Gap
from counterpoint.passes.levels import Levels

_Journal = list[tuple[Gap, bool]]
"""Gaps that were changed, in order, and whether they were tight before."""


def fill(body: Body, budget: int) -> None:
    """Keep what fits after all, those first that cost most."""
    _Exchange(body, budget, 0).fill([])


def improve(body: Body, budget: int, effort: int) -> None:
    """Keep gaps where they fit, or where giving up others instead moves fewer bytes; `effort` bounds the looks."""
    exchange = _Exchange(body, budget, effort)
    exchange.fill([])
    while exchange.round() and exchange.effort > 0:
        pass


class _Exchange:
    """Local search. `evicts` counts the given-up gaps of each dirty group: the first costs an evict, the others none.

    `blocks` remembers for a given-up gap a position where it did not fit: most do not fit there the next time either.
    """

    def __init__(self, body: Body, budget: int, effort: int) -> None:
        self.body, self.budget, self.effort = body, budget, effort
        self.count = body.num_positions
        self.levels = Levels(body.occupied())
        self.given_up = {id(gap): gap for gap in body.gaps if not gap.kept and not gap.fixed}
        self.blocks = {key: gap.freed[0] % self.count for key, gap in self.given_up.items()}
        self.evicts: dict[int, int] = {}
        for gap in self.given_up.values():
            if gap.dirty:
                self.evicts[gap.group] = self.evicts.get(gap.group, 0) + 1
        self.over: list[list[Gap]] = [[] for _ in range(self.count if effort else 0)]
        for gap in body.gaps if effort else ():
            for offset in range(gap.start, gap.start + min(gap.length, self.count)):
                self.over[offset % self.count].append(gap)

    def round(self) -> bool:
        """Try to keep each given-up gap and to give up each kept one; whether any of it saved bytes."""
        changed = False
        for gap in sorted(self.given_up.values(), key=self._rank):
            if self.effort > 0 and not gap.kept:
                changed = self._try_with(gap) or changed
        for gap in self.body.gaps:
            if self.effort > 0 and gap.kept and gap.length:
                changed = self._try_without(gap) or changed
        return changed

    def _rank(self, gap: Gap) -> tuple[int, int, int, int]:
        return -self._saving(gap), gap.length, gap.start, gap.index

    def _saving(self, gap: Gap) -> int:
        return gap.size * (2 if gap.dirty and self.evicts[gap.group] == 1 else 1)

    def _cost(self, gap: Gap) -> int:
        return gap.size * (2 if gap.dirty and not self.evicts.get(gap.group) else 1)

    def _try_with(self, gap: Gap) -> bool:
        """Keep the gap, give up others where it does not fit, fill what room that leaves; undo it unless it saves."""
        balance, levels = self._saving(gap), self.levels
        journal = [(gap, gap.tight)]
        self._keep(gap)
        while (level := levels.highest(gap.span_start, gap.span_length)) > self.budget:
            victim = self._cheapest(levels.where(gap.span_start, gap.span_length, level), level, gap)
            if victim is None:
                self._undo(journal)
                return False
            balance -= self._cost(victim)
            self._give_up(victim)
            journal.append((victim, False))
        return self._settle(balance, journal)

    def _try_without(self, gap: Gap) -> bool:
        """Give the gap up and fill its room with others; undo it unless it saves."""
        balance = -self._cost(gap)
        self._give_up(gap)
        return self._settle(balance, [(gap, False)])

    def _settle(self, balance: int, journal: _Journal) -> bool:
        """Keep whatever else fits; undo everything unless it saves."""
        balance += self.fill(journal)
        if balance <= 0:
            self._undo(journal)
        return balance > 0

    def fill(self, journal: _Journal) -> int:
        """Keep what fits beside what was just given up, and note it; the bytes that saves."""
        saved, budget, levels, blocks = 0, self.budget, self.levels, self.blocks
        self.effort -= len(self.given_up)
        fresh = {id(gap) for gap, _ in journal}
        candidates = [
            gap
            for key, gap in self.given_up.items()
            if levels.at(blocks[key]) + gap.size <= budget and key not in fresh
        ]
        for gap in sorted(candidates, key=self._rank):
            start, length = gap.freed
            level = levels.highest(start, length)
            if level + -(-length // self.count) * gap.size <= budget:
                saved += self._saving(gap)
                journal.append((gap, gap.tight))
                self._keep(gap)
            else:
                blocks[id(gap)] = levels.where(start, length, level)
        return saved

    def _undo(self, journal: _Journal) -> None:
        for gap, tight in reversed(journal):
            if gap.kept:
                self._give_up(gap, tight)
            else:
                self._keep(gap)

    def _cheapest(self, position: int, level: int, own: Gap) -> Gap | None:
        """The kept gap there that frees most of the wanted room for the bytes it costs."""
        wanted, best_score, best = level - self.budget, 0.0, None
        self.effort -= len(self.over[position])
        for gap in self.over[position]:
            if gap.kept and gap is not own:
                score = self._cost(gap) / min(gap.size, wanted)
                if best is None or score < best_score:
                    best_score, best = score, gap
        return best

    def _keep(self, gap: Gap) -> None:
        del self.given_up[id(gap)]
        self.levels.add(*gap.freed, gap.size)
        gap.kept, gap.tight = True, False
        if gap.dirty:
            self.evicts[gap.group] -= 1

    def _give_up(self, gap: Gap, tight: bool = False) -> None:
        gap.kept, gap.tight = False, tight
        self.given_up[id(gap)] = gap
        start, length = gap.freed
        self.blocks[id(gap)] = start % self.count
        self.levels.add(start, length, -gap.size)
        if gap.dirty:
            self.evicts[gap.group] = self.evicts.get(gap.group, 0) + 1
