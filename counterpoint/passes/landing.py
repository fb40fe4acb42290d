"""Evicts of a body in their order -> how far into the computations each still occupies memory.

What leaves is gone, for the choice of what stays, right after its last use; in truth it is there until it has been
written. A load that is hoisted into its place waits for that, and so do the computations listed after the load.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

_NS = 10**9


@dataclass(frozen=True)
class Clock:
    """When the task at each position of a cyclic body begins, if none has to wait; the last entry is the body's end."""

    starts_ns: tuple[int, ...]

    @classmethod
    def of(cls, durations_ns: Iterable[int]) -> "Clock":
        return cls((0, *accumulate(durations_ns)))

    @property
    def body_ns(self) -> int:
        return self.starts_ns[-1]

    @property
    def num_positions(self) -> int:
        return len(self.starts_ns) - 1

    def first_from(self, moment_ns: int) -> int:
        """The time of the first task that does not begin before a moment.

        >>> Clock.of([5, 0, 10]).first_from(5), Clock.of([5, 0, 10]).first_from(6), Clock.of([5, 0, 10]).first_from(16)
        (1, 3, 4)
        """
        if not self.body_ns:
            return 0
        step, rest = divmod(moment_ns, self.body_ns)
        return step * self.num_positions + bisect_left(self.starts_ns, rest)


def landings(clock: Clock, evicts: Sequence[tuple[int, int]], bytes_per_s: int) -> list[int]:
    """For evicts of so many bytes after the tasks at some positions, in order: the time of the first task after each.

    One follows the other. The second round counts: the first step has none of the step before in its way.

    >>> landings(Clock.of([10, 10, 10]), [(0, 5), (1, 10)], 10**9)
    [2, 3]
    >>> landings(Clock.of([10, 10, 10]), [(0, 5), (2, 20)], 10**9)
    [3, 5]
    """
    free = 0
    found: list[int] = []
    for step in range(2):
        begin = step * clock.body_ns
        found.clear()
        for position, num_bytes in evicts:
            free = max(free, begin + clock.starts_ns[position + 1]) + num_bytes * _NS // bytes_per_s
            found.append(clock.first_from(free) - step * clock.num_positions)
    return found
