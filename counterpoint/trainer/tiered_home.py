"""Sizes by key and a device -> the home of its training: a disk, and host memory before it beside an accelerator.

Host memory is a file in a file system that lies in memory, which processes of one server can map at once. Its name is
taken away as soon as all of them have it open: whatever ends the processes, the memory is free again.
"""

import contextlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from counterpoint.core.errors import ExecutionError
from counterpoint.core.units import format_bytes
from counterpoint.runtime.backend import Backend
from counterpoint.runtime.disk import Disk
from counterpoint.runtime.disk_file import free_bytes
from counterpoint.runtime.host_memory import MappedFile
from counterpoint.runtime.tiers import Home, Tiers, split

_IN_MEMORY = Path("/dev/shm")
_USED_PERCENT = 95  # of what the file system has


def host_room_bytes() -> int:
    """Host memory that files can lie in."""
    return free_bytes(_IN_MEMORY) * _USED_PERCENT // 100 if _IN_MEMORY.is_dir() else 0


def host_folder(stack: contextlib.ExitStack, host_bytes: int) -> Path | None:
    """A new folder in memory, for so many bytes; None if none are wanted."""
    if not host_bytes:
        return None
    room = host_room_bytes()
    if host_bytes > room:
        raise ExecutionError(
            f"host_memory is {format_bytes(host_bytes)} and files in {_IN_MEMORY} may have {format_bytes(room)}; give "
            "less, or give that file system more (mount -o remount,size=...)"
        )
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="counterpoint-", dir=_IN_MEMORY)))


def open_tiers(
    stack: contextlib.ExitStack,
    folder: Path,
    sizes: Mapping[str, int],
    backend: Backend,
    in_memory: Path | None = None,
    host_bytes: int = 0,
    make: bool = True,
    all_have_it: Callable[[], None] = lambda: None,
) -> Home:
    """`all_have_it` returns when every process has opened the files. Keys added later share what memory is left."""
    if in_memory is None:
        disk = stack.enter_context(Disk(folder, sizes, make=make))
        all_have_it()
        return disk
    first, rest = split(sizes, host_bytes)
    disk = stack.enter_context(Disk(folder, rest, make=make))
    host = stack.enter_context(Disk(in_memory, first, make=make, direct=False))
    all_have_it()
    if make:
        host.hide()
    memory = MappedFile(host.descriptor, backend.pin)
    stack.callback(memory.close)
    return Tiers(host, disk, memory, host_bytes - sum(host.extent(key).num_bytes for key in first))
