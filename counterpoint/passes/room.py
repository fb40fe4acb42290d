"""Free bytes at every position of a cyclic body, as one integer with a field per position.

A range of any length is then taken, given back or tried in a few operations on integers. A field's top bit is set as
long as its position has not less than no room.
"""

_FIELD = 64
_TOP = 1 << (_FIELD - 1)


class Room:
    """`tops` has the top bit of every field set."""

    def __init__(self, levels: list[int], budget: int) -> None:
        self.count = len(levels)
        self._ones = sum(1 << _FIELD * position for position in range(self.count))
        self.tops = self._ones * _TOP
        self.free = self.tops + sum((budget - level) << _FIELD * position for position, level in enumerate(levels))

    def range(self, start: int, length: int, size: int) -> int:
        """`size` at each position of a cyclic range, as often as the range covers it."""
        rounds, rest = divmod(length, self.count)
        fields = (self._ones & ((1 << _FIELD * rest) - 1)) << _FIELD * (start % self.count)
        whole = (1 << _FIELD * self.count) - 1
        return (self._ones * rounds + (fields & whole) + (fields >> _FIELD * self.count)) * size

    def fits(self, taken: int) -> bool:
        return (self.free - taken) & self.tops == self.tops

    def lacking(self) -> int:
        """The top bits of positions that hold too much."""
        return ~self.free & self.tops

    def worst(self) -> tuple[int, int]:
        """The bytes that a position holds too much, and the position where that is most; some position must."""
        lacking, found = self.lacking(), []
        while lacking:
            position = lacking.bit_length() // _FIELD - 1
            lacking ^= _TOP << _FIELD * position
            found.append((_TOP - (self.free >> _FIELD * position & (2 * _TOP - 1)), position))
        return max(found)
