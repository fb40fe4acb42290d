"""The operating system's books -> how much memory this process has, may have and should give back."""

import contextlib
import ctypes
import os
import sys
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_UNLIMITED = 1 << 62  # cgroup v1 writes "no limit" as the largest whole number of pages
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -3, -4, -8
_MANY_MAPPINGS = 1 << 16  # glibc's own limit


def resident_bytes() -> int:
    """Memory this process occupies, everything included."""
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[1]) * PAGE_BYTES


def peak_resident_bytes() -> int:
    """The most this process ever occupied, or since `reset_peak_resident`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmHWM in /proc/self/status")


def reset_peak_resident() -> bool:
    """Let the peak start again from what is resident; False where the system does not allow it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return True
    return False


def physical_memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES


def memory_limit_bytes() -> int:
    """What the system lets this process occupy: physical memory, or the tightest cgroup above it if that is less."""
    limits = [physical_memory_bytes()]
    for folder in cgroup_folders("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limits.append(_limit_in(folder / name))
    return min(limits)


def cgroup_folders(controller: str, proc: Path = Path("/proc/self")) -> tuple[Path, ...]:
    """The folders, leaf first, of the cgroups that bound this process: version 1 of `controller`, then version 2."""
    folders: list[Path] = []
    for line in (proc / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for mount, root in _cgroup_mounts(controller if controllers else "", proc):
            folders += _chain(mount, root, path)
    return tuple(folders)


def _cgroup_mounts(controller: str, proc: Path) -> list[tuple[Path, str]]:
    """Mount point and mounted root of the hierarchy with `controller`; version 2 if that is empty."""
    mounts = []
    for line in (proc / "mountinfo").read_text().splitlines():
        fields, _, tail = line.partition(" - ")
        kind, _, options = tail.split(" ", 2)
        if kind == "cgroup2" if not controller else kind == "cgroup" and controller in options.split(","):
            mounts.append((Path(fields.split()[4]), fields.split()[3]))
    return mounts


def _chain(mount: Path, root: str, path: str) -> list[Path]:
    """The cgroup's folder and those above it; in a container only the part below the mounted root is visible."""
    below = Path(os.path.relpath(path, root)) if path.startswith(root) else Path()
    return [mount / part for part in (below, *below.parents)] if below != Path() else [mount]


def _limit_in(file: Path) -> int:
    try:
        text = file.read_text().strip()
    except OSError:
        return _UNLIMITED
    return _UNLIMITED if text == "max" else int(text)


LEAVING_BYTES = 256 << 10  # freed tensors of that size leave the process where they may not wait
HEAP_BYTES = 32 << 20  # what glibc can be told to keep in its heap: tensors below that


def keep_freed_memory(large: bool = False) -> bool:
    """Let freed tensors wait in one heap for the next ones; False (and nothing done) where the C library is not glibc.

    Tensors below `HEAP_BYTES` share a heap that is hardly ever cut back by itself: whoever has a budget sees to it
    (`Headroom`). With `large` the others do too, which is for budgets with room for the largest of them twice. Page
    faults of tensors that come and go would cost a transformer's layers half their time again.
    """
    return _set_thresholds(HEAP_BYTES, 2**31 - 1, 0 if large else _MANY_MAPPINGS)


def give_back_freed_memory() -> bool:
    """Let freed tensors leave the resident set at once: for budgets that have no room for what waits.

    Tensors of 256 KiB and more get their own mapping and vanish when freed. Huge pages under them make up for a part of
    the page faults, if torch was told of them before its first tensor.
    """
    return _set_thresholds(LEAVING_BYTES, 16 << 20, _MANY_MAPPINGS)


def _set_thresholds(mmap_bytes: int, trim_bytes: int, num_mappings: int) -> bool:
    libc = _glibc()
    if libc is None:
        return False
    settings = (
        (_M_MMAP_THRESHOLD, mmap_bytes), (_M_TRIM_THRESHOLD, trim_bytes), (_M_MMAP_MAX, num_mappings), (_M_ARENA_MAX, 1)
    )  # fmt: skip
    return all(libc.mallopt(name, value) == 1 for name, value in settings)


def trim() -> bool:
    """Give the free pages of the heap back, also those between live blocks; False where the C library is not glibc."""
    libc = _glibc()
    if libc is None:
        return False
    libc.malloc_trim(ctypes.c_size_t(0))
    return True


def is_glibc() -> bool:
    return _glibc() is not None


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
