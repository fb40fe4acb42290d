"""Keys and their sizes -> extents: where in one file the bytes of each key lie."""

import mmap
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

# O_DIRECT asks at most 4096 of offsets, lengths and addresses; whole pages let an extent be as long as its region.
BLOCK_BYTES = max(4096, mmap.PAGESIZE)


def round_to_blocks(num_bytes: int) -> int:
    """The smallest number of whole blocks that holds `num_bytes`.

    >>> round_to_blocks(0) // BLOCK_BYTES, round_to_blocks(BLOCK_BYTES + 1) // BLOCK_BYTES
    (0, 2)
    """
    if num_bytes < 0:
        raise ValueError(f"a size cannot be negative: {num_bytes}")
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Extent:
    """Whole blocks of the file, and how many of their bytes the key uses."""

    offset_bytes: int
    num_bytes: int
    used_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.num_bytes


class Extents:
    """The table of one file: first fit, lowest offset first, and released neighbours join.

    >>> extents = Extents()
    >>> [extents.add(key, BLOCK_BYTES + 1).offset_bytes // BLOCK_BYTES for key in "abc"]
    [0, 2, 4]
    >>> extents.release("b")
    >>> extents.add("d", BLOCK_BYTES).offset_bytes // BLOCK_BYTES, extents.end_bytes // BLOCK_BYTES
    (2, 6)
    """

    def __init__(self) -> None:
        self.end_bytes = 0
        self._extents: dict[str, Extent] = {}
        self._gaps: list[tuple[int, int]] = []  # offset and size, in order of offset, never touching each other

    def __iter__(self) -> Iterator[str]:
        return iter(self._extents)

    def __len__(self) -> int:
        return len(self._extents)

    def __contains__(self, key: str) -> bool:
        return key in self._extents

    def __getitem__(self, key: str) -> Extent:
        if key not in self._extents:
            raise ValueError(f"no extent for {key!r}; add it first ({len(self._extents)} keys are known)")
        return self._extents[key]

    def add(self, key: str, num_bytes: int) -> Extent:
        if key in self._extents:
            raise ValueError(f"{key!r} has an extent already; release it first")
        size = max(round_to_blocks(num_bytes), BLOCK_BYTES)
        extent = Extent(self._take(size), size, num_bytes)
        self._extents[key] = extent
        return extent

    def release(self, key: str) -> None:
        extent = self[key]
        del self._extents[key]
        self._give(extent.offset_bytes, extent.num_bytes)

    def _take(self, size: int) -> int:
        for index, (offset, room) in enumerate(self._gaps):
            if room >= size:
                self._gaps[index : index + 1] = [(offset + size, room - size)] if room > size else []
                return offset
        self.end_bytes += size
        return self.end_bytes - size

    def _give(self, offset: int, size: int) -> None:
        index = bisect_left(self._gaps, (offset, 0))
        if index < len(self._gaps) and self._gaps[index][0] == offset + size:
            size += self._gaps.pop(index)[1]
        if index and sum(self._gaps[index - 1]) == offset:
            index -= 1
            before, room = self._gaps.pop(index)
            offset, size = before, room + size
        if offset + size == self.end_bytes:
            self.end_bytes = offset
        else:
            self._gaps.insert(index, (offset, size))
