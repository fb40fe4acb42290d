"""Bytes held at each position of a cyclic body: add to a range, ask for its highest, without walking it."""

_BLOCK = 128


class Levels:
    """Positions in blocks; a range that covers a block changes the block's own addend instead of its positions."""

    def __init__(self, values: list[int]) -> None:
        self.count = len(values)
        self.values = values
        self.tops = [max(values[begin : begin + _BLOCK]) for begin in range(0, self.count, _BLOCK)]
        self.addends = [0] * len(self.tops)
        self.everywhere = 0

    def add(self, start: int, length: int, size: int) -> None:
        rounds, rest = divmod(length, self.count)
        self.everywhere += rounds * size
        start %= self.count
        stop = start + rest
        if stop <= self.count:
            self._add(start, stop, size)
        else:
            self._add(start, self.count, size)
            self._add(0, stop - self.count, size)

    def highest(self, start: int, length: int) -> int:
        """The most that any of these positions holds; the range must not be empty."""
        start %= self.count
        stop = start + length
        if length >= self.count:
            found = max(self.tops)
        elif stop <= self.count:
            found = self._highest(start, stop)
        else:
            found = max(self._highest(start, self.count), self._highest(0, stop - self.count))
        return found + self.everywhere

    def _add(self, begin: int, end: int, size: int) -> None:
        if begin == end:
            return
        first, last = begin // _BLOCK, (end - 1) // _BLOCK
        if first == last:
            self._add_within(first, begin, end, size)
            return
        self._add_within(first, begin, (first + 1) * _BLOCK, size)
        self._add_within(last, last * _BLOCK, end, size)
        for block in range(first + 1, last):
            self.addends[block] += size
            self.tops[block] += size

    def _add_within(self, block: int, begin: int, end: int, size: int) -> None:
        values = self.values
        values[begin:end] = [value + size for value in values[begin:end]]
        base = block * _BLOCK
        self.tops[block] = max(values[base : base + _BLOCK]) + self.addends[block]

    def _highest(self, begin: int, end: int) -> int:
        values, addends = self.values, self.addends
        first, last = begin // _BLOCK, (end - 1) // _BLOCK
        if first == last:
            return max(values[begin:end]) + addends[first]
        edge = (first + 1) * _BLOCK
        found = max(max(values[begin:edge]) + addends[first], max(values[last * _BLOCK : end]) + addends[last])
        return max(found, max(self.tops[first + 1 : last])) if last - first > 1 else found
