"""Costs of layers into contiguous parts: stages of equal time, packs within a memory limit."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from counterpoint.core.plan import Pack


def balanced(costs_ns: Sequence[int], parts: int) -> tuple[Pack, ...]:
    """The partition into non-empty runs whose largest run is smallest; among those, runs close to the mean.

    >>> balanced((4, 1, 1, 1, 1), 2)
    (Pack(first=0, last=0), Pack(first=1, last=4))
    >>> [pack.last - pack.first + 1 for pack in balanced((1,) * 10, 4)]
    [2, 2, 3, 3]
    """
    if not 1 <= parts <= len(costs_ns):
        raise ValueError(f"{parts} stages for {len(costs_ns)} layers; ask for 1 to {len(costs_ns)}")
    sums = [0, *accumulate(costs_ns)]
    largest = _smallest_largest(sums, parts)
    needed = _parts_needed(sums, largest)
    packs: list[Pack] = []
    first = 0
    for left in range(parts - 1, -1, -1):
        end = _end(sums, first, left, largest, needed)
        packs.append(Pack(first, end - 1))
        first = end
    return tuple(packs)


def packs_within(stage: Pack, max_bytes: int, bytes_of: Callable[[int, int], int]) -> tuple[Pack, ...]:
    """The fewest packs of a stage for which `bytes_of(first, last)` stays within `max_bytes`, taken greedily.

    A single layer that exceeds the limit is a pack of its own: whether it can run at all is not decided here.
    """
    packs: list[Pack] = []
    first = stage.first
    for layer in range(stage.first + 1, stage.last + 1):
        if bytes_of(first, layer) > max_bytes:
            packs.append(Pack(first, layer - 1))
            first = layer
    return (*packs, Pack(first, stage.last))


def _smallest_largest(sums: list[int], parts: int) -> int:
    """Binary search for the smallest limit that `parts` runs can keep to."""
    low = max((b - a for a, b in pairwise(sums)), default=0)
    high = sums[-1]
    while low < high:
        middle = (low + high) // 2
        if _parts_needed(sums, middle)[0] <= parts:
            high = middle
        else:
            low = middle + 1
    return low


def _parts_needed(sums: list[int], largest: int) -> list[int]:
    """For each layer, how many runs within `largest` the layers from it on need."""
    count = len(sums) - 1
    needed = [0] * (count + 1)
    for first in range(count - 1, -1, -1):
        needed[first] = 1 + needed[bisect_right(sums, sums[first] + largest, lo=first + 1) - 1]
    return needed


def _end(sums: list[int], first: int, left: int, largest: int, needed: list[int]) -> int:
    """Where the run that starts at `first` ends, with `left` runs after it: close to the mean of what remains."""
    count = len(sums) - 1
    latest = min(bisect_right(sums, sums[first] + largest, lo=first + 1) - 1, count - left)
    earliest = next(end for end in range(first + 1, latest + 1) if needed[end] <= left)
    mean = sums[first] + (sums[-1] - sums[first]) // (left + 1)
    end = bisect_left(sums, mean, lo=first + 1)
    if end > first + 1 and mean - sums[end - 1] < sums[min(end, count)] - mean:
        end -= 1
    return min(max(end, earliest), latest)
