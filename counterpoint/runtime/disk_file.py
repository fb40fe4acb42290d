"""Offsets and memory views -> blocks of one file, past the page cache, with errors that say what to do."""

import ctypes
import errno
import os
from pathlib import Path

from counterpoint.core.errors import ExecutionError
from counterpoint.core.units import format_bytes
from counterpoint.runtime.disk_extents import BLOCK_BYTES
from counterpoint.runtime.memory import Region

_COPY_BYTES = 8 << 20
_NO_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF, errno.EPERM}
_SYNC_RANGE = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)
_SYNC_AND_WAIT = 7  # SYNC_FILE_RANGE_WAIT_BEFORE | WRITE | WAIT_AFTER
_ADVICE = {
    errno.ENOSPC: "free some space there or choose another folder",
    errno.EDQUOT: "raise the quota or choose another folder",
    errno.EFBIG: "raise the file size limit (ulimit -f) or choose another folder",
    errno.EIO: "the disk may be failing: look into the system log, and resume from the last checkpoint elsewhere",
}


class File:
    """One preallocated file moved in whole blocks: O_DIRECT where it works, else without leaving a page cache."""

    def __init__(self, path: Path, *, direct: bool = True, make: bool = True) -> None:
        self.path, self._made = path, make
        self.reserved_bytes = 0
        self.buffered_descriptor = _open(path, os.O_CREAT | os.O_TRUNC if make else 0)
        if not make:
            self.reserved_bytes = self._size()
        self._direct_descriptor = _open_direct(path) if direct else -1
        self.direct = self._direct_descriptor >= 0
        self._descriptor = self._direct_descriptor if self.direct else self.buffered_descriptor

    def reserve(self, num_bytes: int) -> None:
        """Make the file at least this long, with its space taken, or say that the disk is too small."""
        needed = num_bytes - self.reserved_bytes
        if needed <= 0:
            return
        free = free_bytes(self.path.parent)
        if needed > free:
            raise _no_space(self.path, needed, free)
        try:
            os.posix_fallocate(self.buffered_descriptor, self.reserved_bytes, needed)
        except OSError as error:
            os.ftruncate(self.buffered_descriptor, self.reserved_bytes)
            if error.errno == errno.ENOSPC:
                raise _no_space(self.path, needed, free) from error
            raise _failure(f"cannot reserve {format_bytes(needed)} in {self.path}", error) from error
        self.reserved_bytes = num_bytes

    def read(self, view: memoryview, offset: int) -> None:
        """Fill `view` from `offset`."""
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], offset + done)
            done += count
            if done < len(view) and offset + done >= self._size():
                raise ExecutionError(
                    f"{self.path} ends at byte {self._size()}, but {len(view)} bytes at offset {offset} were expected;"
                    " another program has cut it: resume from the last checkpoint"
                )
        if not self.direct:
            _drop(self.buffered_descriptor, offset, len(view))

    def write(self, view: memoryview, offset: int) -> None:
        """Put `view` at `offset`."""
        done = 0
        while done < len(view):
            done += os.pwritev(self._descriptor, [view[done:]], offset + done)
        if not self.direct:
            _sync_and_drop(self.buffered_descriptor, offset, len(view))

    def explain(self, error: BaseException, verb: str, key: str, offset: int, num_bytes: int) -> ExecutionError:
        """What a failed transfer tells the user."""
        return _failure(f"cannot {verb} {key!r} ({num_bytes} bytes at offset {offset} of {self.path})", error)

    def sync(self) -> None:
        os.fsync(self.buffered_descriptor)

    def remove(self) -> None:
        for descriptor in {self.buffered_descriptor, self._descriptor}:
            os.close(descriptor)
        if self._made:
            self.path.unlink(missing_ok=True)

    def _size(self) -> int:
        return os.fstat(self.buffered_descriptor).st_size


def copy_range(source: int, source_offset: int, target: int, target_offset: int, num_bytes: int) -> None:
    """Copy between two open files inside the kernel, a few MiB at a time, and leave neither in the page cache."""
    done = 0
    while done < num_bytes:
        size = min(_COPY_BYTES, num_bytes - done)
        count = _copy_some(source, source_offset + done, target, target_offset + done, size)
        if not count:
            raise ExecutionError(
                f"the file copied from ends at byte {source_offset + done},"
                f" {num_bytes - done} bytes early: it is torn, use another copy"
            )
        _sync_and_drop(target, target_offset + done, count)
        _drop(source, source_offset + done, count)
        done += count


def _copy_some(source: int, source_offset: int, target: int, target_offset: int, size: int) -> int:
    try:
        return os.copy_file_range(source, target, size, source_offset, target_offset)
    except OSError as error:
        if error.errno not in _NO_COPY:
            raise
    data = memoryview(os.pread(source, size, source_offset))  # another file system: through one small buffer
    done = 0
    while done < len(data):
        done += os.pwrite(target, data[done:], target_offset + done)
    return done


def free_bytes(folder: Path) -> int:
    """Space left for this user on the file system of `folder`."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        raise _failure(f"cannot open {path}", error) from error


def _open_direct(path: Path) -> int:
    """A descriptor past the page cache, or -1 where the file system has none."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return -1
    try:  # some file systems open the file and refuse the transfer
        os.preadv(descriptor, [Region(BLOCK_BYTES).view()], 0)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor


def _drop(descriptor: int, offset: int, num_bytes: int) -> None:
    os.posix_fadvise(descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)


def _sync_and_drop(descriptor: int, offset: int, num_bytes: int) -> None:
    """Only clean pages can be dropped from the page cache, so write them out first."""
    if _SYNC_RANGE is None:
        os.fdatasync(descriptor)
    elif _SYNC_RANGE(descriptor, ctypes.c_int64(offset), ctypes.c_int64(num_bytes), ctypes.c_uint(_SYNC_AND_WAIT)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    _drop(descriptor, offset, num_bytes)


def _no_space(path: Path, needed: int, free: int) -> ExecutionError:
    return ExecutionError(
        f"the disk is too small for {path}: it needs {format_bytes(needed)} more and {format_bytes(free)} are free;"
        f" {_ADVICE[errno.ENOSPC]}"
    )


def _failure(what: str, error: BaseException) -> ExecutionError:
    if isinstance(error, ExecutionError):
        return ExecutionError(f"{what}: {error}")
    advice = _ADVICE.get(getattr(error, "errno", None) or 0, "resume from the last checkpoint")
    return ExecutionError(f"{what}: {getattr(error, 'strerror', None) or error}; {advice}")
