"""Nanoseconds into places on a drawing, and the round times that an axis names."""

from dataclasses import dataclass

_UNITS = (("s", 10**9), ("ms", 10**6), ("us", 10**3), ("ns", 1))


@dataclass(frozen=True, slots=True)
class Scale:
    """The stretch of time from `begin_ns` to `end_ns`, drawn from `left` to `right`."""

    begin_ns: int
    end_ns: int
    left: float
    right: float

    def x(self, time_ns: int) -> float:
        time = min(max(time_ns, self.begin_ns), self.end_ns) - self.begin_ns
        return self.left + (self.right - self.left) * time / max(self.end_ns - self.begin_ns, 1)

    def shows(self, start_ns: int, end_ns: int) -> bool:
        return start_ns < self.end_ns and end_ns > self.begin_ns

    def ticks(self, count: int = 10) -> list[tuple[int, str]]:
        """About `count` round times with their labels.

        >>> Scale(0, 230_000_000, 0, 1).ticks(5)
        [(0, '0 ms'), (50000000, '50 ms'), (100000000, '100 ms'), (150000000, '150 ms'), (200000000, '200 ms')]
        """
        distance = _round_up(max(self.end_ns - self.begin_ns, 1) // count)
        unit, size = next((unit, size) for unit, size in _UNITS if distance >= size)
        first = -(-self.begin_ns // distance) * distance
        return [(time, f"{time // size} {unit}") for time in range(first, self.end_ns + 1, distance)]


def _round_up(time_ns: int) -> int:
    """The next of 1, 2, 5, 10, 20, 50, ..."""
    power: int = 10 ** (len(str(max(time_ns, 1))) - 1)
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= time_ns)
