"""One choice of what stays into the best of several, so that more memory never means more traffic."""

from dataclasses import dataclass

from counterpoint.passes.keep import Body, choose, improve, occupied, restore, snapshot, traffic

EXACT = 32  # bodies of up to so many tasks get every rung
THOROUGH = 600  # bodies of up to so many tasks get several sweeps
STARTS = (100, 75, 50)


@dataclass(frozen=True, slots=True)
class _Rung:
    level: int
    peak: int
    bytes_moved: int
    choice: list[tuple[bool, bool]]


def climb(body: Body, budget: int, rungs: int | None) -> None:
    """Choose for the budget, or as on a lower rung of a ladder if that moves fewer bytes.

    A greedy choice can do worse with more memory. The rungs of a ladder do not depend on the budget, and a choice
    counts for every budget that its peak fits; the best of those that count can only improve as the budget grows.
    A small body (or `rungs` = 0) gets the whole ladder; a larger one is chosen for at its budget alone.
    """
    choose(body, 1 << 62)
    if budget >= max(occupied(body)):
        return
    if rungs is None:
        rungs = 0 if body.num_positions <= EXACT else 2
    if rungs:
        choose(body, budget, STARTS if rungs > 1 and body.num_positions <= THOROUGH else (100,))
        return
    fitting = [rung for rung in _ladder(body) if rung.peak <= budget]
    restore(body, min(fitting, key=lambda rung: (rung.bytes_moved, -rung.level)).choice)


def _ladder(body: Body) -> list[_Rung]:
    """Down from everything kept, each rung just below the peak of the last; then up, improving on the one below."""
    low, level = max(body.needs), max(occupied(body)) - 1
    down: list[_Rung] = []
    while level > low:
        choose(body, level, STARTS)
        down.append(_rung(body, level))
        level = min(down[-1].peak, level) - 1
    choose(body, low, STARTS)
    ladder = [_rung(body, low)]
    for rung in reversed(down):
        restore(body, ladder[-1].choice)
        improve(body, rung.level)
        ladder.append(min(_rung(body, rung.level), rung, key=lambda r: r.bytes_moved))
    return ladder + down


def _rung(body: Body, level: int) -> _Rung:
    return _Rung(level, max(occupied(body)), traffic(body), snapshot(body))
