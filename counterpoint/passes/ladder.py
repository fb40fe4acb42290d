"""A body and a budget into what stays on the device: the residency pass's one decision."""

from dataclasses import dataclass

from counterpoint.passes.body import Body
from counterpoint.passes.exchange import improve
from counterpoint.passes.fill import fill
from counterpoint.passes.sweep import sweep

EXACT = 32  # bodies of up to so many tasks get a whole ladder
THOROUGH = 600  # bodies of up to so many tasks get several sweeps and exchanges
STARTS = (100, 75, 50)
EFFORT = 200_000
RUNGS = 64


@dataclass(frozen=True, slots=True)
class _Rung:
    level: int
    peak: int
    bytes_moved: int
    choice: list[tuple[bool, bool]]


def choose(body: Body, budget: int, quick: bool = False) -> None:
    """Keep what moves fewest bytes within the budget; needs alone must fit.

    Large bodies, and all of them when `quick`, get one sweep and what fits after all.
    """
    body.keep_all()
    high = max(body.occupied())
    if budget >= high:
        return
    if quick or body.num_positions > THOROUGH:
        sweep(body, budget)
        fill(body, budget)
    elif body.num_positions > EXACT:
        _best_of(body, budget, STARTS)
    else:
        _climb(body, budget, high)


def _best_of(body: Body, budget: int, starts: tuple[int, ...]) -> None:
    """Each start is a sweep that leaves so many percent of the room beyond the needs, improved within all of it."""
    low, best, choice = max(body.needs), -1, body.snapshot()
    for percent in starts:
        sweep(body, low + max(0, budget - low) * percent // 100)
        improve(body, budget, EFFORT)
        bytes_moved = body.traffic()
        if best < 0 or bytes_moved < best:
            best, choice = bytes_moved, body.snapshot()
    body.restore(choice)


def _climb(body: Body, budget: int, high: int) -> None:
    """As on the best rung of a ladder that fits the budget.

    A greedy choice can do worse with more memory. The rungs of a ladder do not depend on the budget, and a choice
    counts for every budget that its peak fits; the best of those that count can only improve as the budget grows.
    """
    fitting = [rung for rung in _ladder(body, high) if rung.peak <= budget]
    body.restore(min(fitting, key=lambda rung: (rung.bytes_moved, -rung.level)).choice)


def _ladder(body: Body, high: int) -> list[_Rung]:
    """Down from everything kept, each rung below the peak of the last; then up, improving on the one below.

    Steps are small where little is given up.
    """
    low, level = max(body.needs), high - 1
    down: list[_Rung] = []
    while level > low:
        _best_of(body, level, (100,))
        down.append(_rung(body, level))
        step = min((high - low) // RUNGS, (high - level) // 8)
        level = min(down[-1].peak - 1, level - step)
    _best_of(body, low, (100,))
    ladder = [_rung(body, low)]
    for rung in reversed(down):
        body.restore(ladder[-1].choice)
        improve(body, rung.level, EFFORT)
        ladder.append(min(_rung(body, rung.level), rung, key=lambda r: r.bytes_moved))
    return ladder + down


def _rung(body: Body, level: int) -> _Rung:
    return _Rung(level, max(body.occupied()), body.traffic(), body.snapshot())
