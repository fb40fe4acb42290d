"""Keys and their sizes -> where each lies at home: in host memory as far as its budget goes, then on disk."""

import threading
from collections.abc import Mapping
from typing import Protocol

from counterpoint.core.errors import ExecutionError
from counterpoint.runtime.disk import Disk
from counterpoint.runtime.disk_extents import BLOCK_BYTES, round_to_blocks
from counterpoint.runtime.disk_transfer import Transfer
from counterpoint.runtime.host_memory import HostRegion, MappedFile
from counterpoint.runtime.memory import Region


class Home(Protocol):
    """What the store needs of a home: a disk, or several tiers that together look like one."""

    def add(self, key: str, num_bytes: int) -> None: ...

    def release(self, key: str) -> None: ...

    def read(self, key: str, target: Region | memoryview, offset_bytes: int = 0) -> Transfer: ...

    def write(self, key: str, source: Region | memoryview, offset_bytes: int = 0) -> Transfer: ...

    def copy_to(
        self, key: str, target: int, target_offset: int = 0, *, offset_bytes: int = 0, num_bytes: int | None = None
    ) -> None: ...

    def copy_from(
        self, key: str, source: int, source_offset: int = 0, *, offset_bytes: int = 0, num_bytes: int | None = None
    ) -> None: ...

    def mapped(self, key: str) -> HostRegion | None:
        """The memory of a key that lies in host memory."""


def split(sizes: Mapping[str, int], host_bytes: int) -> tuple[dict[str, int], dict[str, int]]:
    """What goes into host memory, in the order of the keys, and what on disk."""
    host: dict[str, int] = {}
    disk: dict[str, int] = {}
    for key, num_bytes in sizes.items():
        size = max(round_to_blocks(num_bytes), BLOCK_BYTES)
        fits = size <= host_bytes
        (host if fits else disk)[key] = num_bytes
        host_bytes -= size if fits else 0
    return host, disk


class Tiers:
    """A file in memory and one on disk. Keys added later go into memory while there are `spare_bytes` of it."""

    def __init__(self, host: Disk, disk: Disk, memory: MappedFile, spare_bytes: int) -> None:
        self.host, self.disk, self._memory = host, disk, memory
        self.spare_bytes = spare_bytes
        self._lock = threading.Lock()

    def add(self, key: str, num_bytes: int) -> None:
        size = max(round_to_blocks(num_bytes), BLOCK_BYTES)
        with self._lock:
            fits = size <= self.spare_bytes
            self.spare_bytes -= size if fits else 0
        if fits:
            try:
                self.host.add(key, num_bytes)
            except ExecutionError:  # the system has less memory than the user allows
                fits = False
        if not fits:
            self.disk.add(key, num_bytes)

    def release(self, key: str) -> None:
        if key not in self.host:
            self.disk.release(key)
            return
        extent = self.host.extent(key)
        self._memory.forget(extent.offset_bytes, extent.num_bytes)
        self.host.release(key)
        with self._lock:
            self.spare_bytes += extent.num_bytes

    def read(self, key: str, target: Region | memoryview, offset_bytes: int = 0) -> Transfer:
        return self._tier(key).read(key, target, offset_bytes)

    def write(self, key: str, source: Region | memoryview, offset_bytes: int = 0) -> Transfer:
        return self._tier(key).write(key, source, offset_bytes)

    def copy_to(
        self, key: str, target: int, target_offset: int = 0, *, offset_bytes: int = 0, num_bytes: int | None = None
    ) -> None:
        self._tier(key).copy_to(key, target, target_offset, offset_bytes=offset_bytes, num_bytes=num_bytes)

    def copy_from(
        self, key: str, source: int, source_offset: int = 0, *, offset_bytes: int = 0, num_bytes: int | None = None
    ) -> None:
        self._tier(key).copy_from(key, source, source_offset, offset_bytes=offset_bytes, num_bytes=num_bytes)

    def mapped(self, key: str) -> HostRegion | None:
        if key not in self.host:
            return None
        extent = self.host.extent(key)
        with self._lock:
            return self._memory.region(extent.offset_bytes, extent.num_bytes)

    def _tier(self, key: str) -> Disk:
        return self.host if key in self.host else self.disk
