"""A folder -> the right to use it alone, as long as this process lives."""

import contextlib
import fcntl
import os
from pathlib import Path

from counterpoint.core.errors import ExecutionError


class FolderLock:
    """An flock on a file in the folder: the kernel drops it when its process dies, so none is ever stale."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        self._descriptor = self._acquire()
        with contextlib.suppress(OSError):  # a full disk: the lock holds, only its holder is unknown
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def _acquire(self) -> int:
        while True:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                holder = os.pread(descriptor, 32, 0).decode().strip() or "unknown"
                os.close(descriptor)
                raise ExecutionError(
                    f"folder {self.path.parent} is in use by process {holder};"
                    " wait for it to end, or give this run another folder"
                ) from error
            if self._is_current(descriptor):
                return descriptor
            os.close(descriptor)  # its holder removed the file between our open and our lock

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        self.path.unlink(missing_ok=True)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # also if a forked child holds a copy of the descriptor
        os.close(self._descriptor)
