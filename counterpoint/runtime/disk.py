"""A folder and a size per key -> the disk tier: extents read and written by threads past the page cache."""

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from counterpoint.core.errors import ExecutionError
from counterpoint.runtime.disk_extents import BLOCK_BYTES, Extent, Extents
from counterpoint.runtime.disk_file import File, copy_range
from counterpoint.runtime.disk_lock import FolderLock
from counterpoint.runtime.disk_transfer import Threads, Transfer
from counterpoint.runtime.memory import Region

CHUNK_BYTES = 4 << 20
NUM_THREADS = 2  # for each direction
_GROWTH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class DiskStatistics:
    """What a disk has moved, and the space it takes."""

    read_bytes: int
    written_bytes: int
    file_bytes: int
    num_keys: int


class Disk:
    """One folder, one file, one extent per key. Requests for the same key are the caller's to order.

    Keys of `sizes` are laid out in their order; `scratch_bytes` more are reserved for keys added later. All space is
    taken here, so a disk that is too small is refused before the start. The file is removed when the disk is closed,
    collected or left behind at exit. With `make` False it is that of another process of the same run, which made it
    with the same sizes.
    """

    def __init__(
        self,
        folder: str | Path,
        sizes: Mapping[str, int],
        *,
        scratch_bytes: int = 0,
        num_threads: int = NUM_THREADS,
        chunk_bytes: int = CHUNK_BYTES,
        direct: bool = True,
        make: bool = True,
    ) -> None:
        if num_threads < 1 or chunk_bytes < BLOCK_BYTES or chunk_bytes % BLOCK_BYTES:
            raise ValueError(f"need threads and whole blocks, not {num_threads} threads and {chunk_bytes}-byte chunks")
        self.folder = Path(folder)
        self._lock = threading.Lock()
        self._extents = Extents()
        for key, num_bytes in sizes.items():
            self._extents.add(key, num_bytes)
        with contextlib.ExitStack() as stack:
            if make:
                stack.callback(_lock(self.folder).release)
            self._file = File(self.folder / "extents.bin", direct=direct, make=make)
            stack.callback(self._file.remove)
            self._file.reserve(self._extents.end_bytes + scratch_bytes)
            self._readers = stack.enter_context(Threads("read", num_threads, chunk_bytes))
            self._writers = stack.enter_context(Threads("write", num_threads, chunk_bytes))
            self._close = weakref.finalize(self, _close, os.getpid(), stack.pop_all())

    @property
    def direct(self) -> bool:
        """Whether transfers pass the page cache (O_DIRECT) or go through it and are dropped from it."""
        return self._file.direct

    @property
    def path(self) -> Path:
        return self._file.path

    def extent(self, key: str) -> Extent:
        with self._lock:
            return self._extents[key]

    def __contains__(self, key: str) -> bool:
        with self._lock:
            return key in self._extents

    @property
    def descriptor(self) -> int:
        """The open file, for whoever maps its extents."""
        return self._file.buffered_descriptor

    def hide(self) -> None:
        """Take the file's name away: it is gone with the last process that has it open, however that ends."""
        self.path.unlink(missing_ok=True)

    def mapped(self, key: str) -> None:
        """No key of a disk lies in memory."""

    def add(self, key: str, num_bytes: int) -> None:
        """Give a further key an extent, from space released before if some is large enough."""
        with self._lock:
            self._require_open()
            extent = self._extents.add(key, num_bytes)
            if extent.end_bytes > self._file.reserved_bytes:
                try:
                    self._grow(extent.end_bytes)
                except ExecutionError:
                    self._extents.release(key)
                    raise

    def release(self, key: str) -> None:
        """Forget a key; its extent may be handed to the next one."""
        with self._lock:
            self._extents.release(key)

    def read(self, key: str, target: Region | memoryview, offset_bytes: int = 0) -> Transfer:
        """Fill `target` from the key's extent, starting `offset_bytes` within it."""
        return self._submit(self._readers, False, key, target, offset_bytes)

    def write(self, key: str, source: Region | memoryview, offset_bytes: int = 0) -> Transfer:
        """Put `source` into the key's extent, starting `offset_bytes` within it."""
        return self._submit(self._writers, True, key, source, offset_bytes)

    def copy_to(
        self, key: str, target: int, target_offset: int = 0, *, offset_bytes: int = 0, num_bytes: int | None = None
    ) -> None:
        """Copy the key's bytes into the open file `target`; its owner syncs it. Any offset will do."""
        start, size = self._part(key, offset_bytes, num_bytes)
        try:
            copy_range(self._file.buffered_descriptor, start, target, target_offset, size)
        except OSError as error:
            raise self._file.explain(error, "copy", key, start, size) from error

    def copy_from(
        self, key: str, source: int, source_offset: int = 0, *, offset_bytes: int = 0, num_bytes: int | None = None
    ) -> None:
        """Copy bytes of the open file `source` into the key's extent. Any offset will do."""
        start, size = self._part(key, offset_bytes, num_bytes)
        try:
            copy_range(source, source_offset, self._file.buffered_descriptor, start, size)
        except OSError as error:
            raise self._file.explain(error, "fill", key, start, size) from error

    def sync(self) -> None:
        """Return when all that was written would survive a power failure."""
        self._require_open()
        self._file.sync()

    def statistics(self) -> DiskStatistics:
        moved = (self._readers.moved_bytes, self._writers.moved_bytes)
        return DiskStatistics(*moved, self._file.reserved_bytes, len(self._extents))

    def close(self) -> None:
        """Finish chunks under way, cancel the rest, end the threads, remove the file. Safe to call again."""
        self._close()

    def __enter__(self) -> "Disk":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if not self._close.alive:
            raise ExecutionError(f"the disk in {self.folder} is closed; open it again")

    def _grow(self, num_bytes: int) -> None:
        """In large steps, because a transient key comes with every microbatch; exactly if a step is too large."""
        try:
            self._file.reserve(-(-num_bytes // _GROWTH_BYTES) * _GROWTH_BYTES)
        except ExecutionError:
            self._file.reserve(num_bytes)

    def _submit(
        self, threads: Threads, write: bool, key: str, memory: Region | memoryview, offset_bytes: int
    ) -> Transfer:
        view = memory.view() if isinstance(memory, Region) else _aligned(memory)
        extent = self.extent(key)
        if offset_bytes < 0 or offset_bytes % BLOCK_BYTES or len(view) > extent.num_bytes - offset_bytes:
            raise ValueError(
                f"{len(view)} bytes at {offset_bytes} are not whole blocks within the {extent.num_bytes} of {key!r}"
            )
        transfer = Transfer(self._file, write, key, view, extent.offset_bytes + offset_bytes)
        threads.submit(transfer)
        return transfer

    def _part(self, key: str, offset_bytes: int, num_bytes: int | None) -> tuple[int, int]:
        """Where in the file a part of the key's used bytes begins, and how long it is."""
        self._require_open()
        extent = self.extent(key)
        size = extent.used_bytes - offset_bytes if num_bytes is None else num_bytes
        if offset_bytes < 0 or size < 0 or offset_bytes + size > extent.used_bytes:
            raise ValueError(f"bytes {offset_bytes} to {offset_bytes + size} are not within {key!r}: {extent}")
        return extent.offset_bytes + offset_bytes, size


def _lock(folder: Path) -> FolderLock:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return FolderLock(folder)
    except OSError as error:
        raise ExecutionError(f"cannot use folder {folder}: {error.strerror}; choose another folder") from error


def _close(owner: int, stack: contextlib.ExitStack[bool | None]) -> None:
    if os.getpid() == owner:  # a forked child has neither the threads nor a right to the file
        stack.close()


def _aligned(view: memoryview) -> memoryview:
    view = view.cast("B")
    if view.readonly or not len(view) or len(view) % BLOCK_BYTES or _address(view) % BLOCK_BYTES:
        raise ValueError(f"memory of {len(view)} bytes is not writable whole aligned blocks; use a Region")
    return view


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
