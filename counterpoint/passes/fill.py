"""A choice of what stays into one that also keeps what fits after all."""

from counterpoint.passes.body import Body, Gap
from counterpoint.passes.levels import Levels


def fill(body: Body, budget: int) -> None:
    """Those first that cost most; an evict is counted where giving up the gap alone would need one."""
    levels = Levels(body.occupied())
    given_up = [gap for gap in body.gaps if not gap.kept and not gap.fixed]
    for gap in sorted(given_up, key=_rank):
        start, length = gap.freed
        if levels.highest(start, length) + -(-length // body.num_positions) * gap.size <= budget:
            levels.add(start, length, gap.size)
            gap.kept, gap.tight = True, False


def _rank(gap: Gap) -> tuple[int, int, int, int]:
    return -gap.size * (2 if gap.dirty else 1), gap.length, gap.start, gap.index
