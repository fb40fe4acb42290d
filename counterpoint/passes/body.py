"""A device's body as the choice of what stays sees it: what each position needs in any case, and the gaps.

Between two touches of a buffer lies a gap. Kept, the buffer occupies memory for the length of the gap; given up, it
costs a load, and before that an evict if home does not have its content yet.
"""

from dataclasses import dataclass
from itertools import accumulate

from counterpoint.passes.lives import Life


@dataclass(slots=True)
class Gap:
    """Between touches `index` and `index + 1` of a life; giving it up frees positions `start` to `start + length`.

    `span_start` and `span_length` are all positions between the touches; the difference is room reserved for writing
    the buffer out beside the next computation and for reading it in beside the previous one. A `fixed` gap is such
    room alone, before a first or after a last touch. `tight` gives the reserved room up too. Dirty gaps of one
    `group` share one evict.
    """

    life: Life
    index: int
    group: int
    dirty: bool
    size: int
    span_start: int
    span_length: int
    start: int
    length: int
    fixed: bool = False
    kept: bool = True
    tight: bool = False

    @property
    def freed(self) -> tuple[int, int]:
        """Where memory is free if the gap is given up."""
        return (self.span_start, self.span_length) if self.tight else (self.start, self.length)


@dataclass(slots=True)
class Body:
    """Cyclic: position 0 follows the last one."""

    needs: list[int]
    gaps: list[Gap]

    @property
    def num_positions(self) -> int:
        return len(self.needs)

    def keep_all(self) -> None:
        for gap in self.gaps:
            gap.kept, gap.tight = not gap.fixed, False

    def snapshot(self) -> list[tuple[bool, bool]]:
        return [(gap.kept, gap.tight) for gap in self.gaps]

    def restore(self, choice: list[tuple[bool, bool]]) -> None:
        for gap, (kept, tight) in zip(self.gaps, choice, strict=True):
            gap.kept, gap.tight = kept, tight

    def traffic(self) -> int:
        """Bytes that the gaps given up cost per step."""
        given_up = [gap for gap in self.gaps if not gap.kept and not gap.fixed]
        evicts = {gap.group: gap.size for gap in given_up if gap.dirty}
        return sum(gap.size for gap in given_up) + sum(evicts.values())

    def occupied(self) -> list[int]:
        """Bytes at each position under the current choice."""
        difference = [0] * (self.num_positions + 1)
        everywhere = 0
        for gap in self.gaps:
            everywhere += _add(difference, gap.span_start, gap.span_length, gap.size)
            if not gap.kept:
                everywhere += _add(difference, *gap.freed, -gap.size)
        difference[0] += everywhere
        return [held + need for held, need in zip(accumulate(difference), self.needs, strict=False)]


def _add(difference: list[int], start: int, length: int, size: int) -> int:
    """Adds to a cyclic range; returns what whole rounds add everywhere."""
    count = len(difference) - 1
    rounds, rest = divmod(length, count)
    start %= count
    stop = start + rest
    if stop <= count:
        difference[start] += size
        difference[stop] -= size
    else:
        difference[start] += size
        difference[count] -= size
        difference[0] += size
        difference[stop - count] -= size
    return rounds * size
