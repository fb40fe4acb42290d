"""A body and a budget into what stays on the device: the residency pass's one decision.

A greedy choice can do worse with more memory. So choices are made for levels that do not depend on the budget, the
rungs of a ladder, and a choice counts for every budget that its peak fits: the best of those that count can only
improve as the budget grows.
"""

import heapq
from dataclasses import dataclass

from counterpoint.passes.body import Body, Gap
from counterpoint.passes.exchange import improve
from counterpoint.passes.fill import fill
from counterpoint.passes.levels import Levels
from counterpoint.passes.sweep import sweep

FINE = 2_000  # bodies of up to so many positions times gaps get a fine ladder
COARSE = 500_000  # and up to so many a coarse one
EFFORT = 200_000
RUNGS = 64
STEP_PERCENT = 88  # of the distance to everything kept is what the next coarse rung leaves of it


@dataclass(frozen=True, slots=True)
class _Rung:
    level: int
    peak: int
    bytes_moved: int
    choice: list[tuple[bool, bool]]


def choose(body: Body, budget: int, quick: bool = False) -> None:
    """Keep what moves fewest bytes within the budget; needs alone must fit.

    Large bodies, and all of them when `quick`, get one sweep and what fits after all. Room that was reserved for
    overlap counts as needed unless nothing else helps: such bodies get a sweep and exchanges, for on the lower rungs
    of a ladder it is gone.
    """
    body.keep_all()
    high, size = max(body.occupied()), body.num_positions * len(body.gaps)
    if budget >= high:
        return
    if quick or size > COARSE:
        sweep(body, budget)
        fill(body, budget)
    elif any(gap.length < gap.span_length for gap in body.gaps):
        sweep(body, budget)
        improve(body, budget, EFFORT)
    elif size > FINE:
        _climb_coarse(body, budget, high)
    else:
        _climb_fine(body, budget, high)


def _climb_fine(body: Body, budget: int, high: int) -> None:
    fitting = [rung for rung in _fine_ladder(body, high) if rung.peak <= budget]
    body.restore(min(fitting, key=lambda rung: (rung.bytes_moved, -rung.level)).choice)


def _fine_ladder(body: Body, high: int) -> list[_Rung]:
    """Down from everything kept, each rung below the peak of the last; then up, improving on the one below.

    Steps are small where little is given up.
    """
    low, level = max(body.needs), high - 1
    down: list[_Rung] = []
    while level > low:
        down.append(_swept(body, level, EFFORT))
        step = min((high - low) // RUNGS, (high - level) // 8)
        level = min(down[-1].peak - 1, level - step)
    ladder = [_swept(body, low, EFFORT)]
    for rung in reversed(down):
        body.restore(ladder[-1].choice)
        improve(body, rung.level, EFFORT)
        ladder.append(min(_rung(body, rung.level), rung, key=lambda r: r.bytes_moved))
    return ladder + down


def _climb_coarse(body: Body, budget: int, high: int) -> None:
    """Up a few rungs; from each on, gaps are kept one by one in an order of their own.

    The next rung is no worse than where that leads, and the order is followed as far as the budget goes.
    """
    levels = _coarse_levels(max(body.needs), high)
    best: _Rung | None = None
    for level in levels:
        if level > budget:
            break
        rung = _swept(body, level, EFFORT // len(levels))
        if best is not None:
            body.restore(best.choice)
            _extend(body, level)
            rung = min(_rung(body, level), rung, key=lambda r: r.bytes_moved)
        best = rung
    assert best is not None
    body.restore(best.choice)
    _extend(body, budget)


def _coarse_levels(low: int, high: int) -> list[int]:
    """From the needs on, ever closer together towards everything kept."""
    levels, distance = [low], (high - low) * STEP_PERCENT // 100
    while distance * RUNGS > high - low:
        levels.append(high - distance)
        distance = distance * STEP_PERCENT // 100
    return levels


def _extend(body: Body, budget: int) -> None:
    """Keep one gap after the other, each time the one that needs least memory, up to the first that does not fit.

    What one needs can only grow as others are kept, so a heap whose entries may be too low finds it.
    """
    levels = Levels(body.occupied())
    given_up = [gap for gap in body.gaps if not gap.kept and not gap.fixed]
    heap = [(_needed(levels, gap), number) for number, gap in enumerate(given_up)]
    heapq.heapify(heap)
    while heap and heap[0][0] <= budget:
        noted, number = heap[0]
        gap = given_up[number]
        needed = _needed(levels, gap)
        if needed > noted:
            heapq.heapreplace(heap, (needed, number))
            continue
        heapq.heappop(heap)
        levels.add(*gap.freed, gap.size)
        gap.kept, gap.tight = True, False


def _needed(levels: Levels, gap: Gap) -> int:
    """The most that any position holds if the gap is kept."""
    start, length = gap.freed
    return levels.highest(start, length) + -(-length // levels.count) * gap.size


def _swept(body: Body, level: int, effort: int) -> _Rung:
    sweep(body, level)
    improve(body, level, effort)
    return _rung(body, level)


def _rung(body: Body, level: int) -> _Rung:
    return _Rung(level, max(body.occupied()), body.traffic(), body.snapshot())
