"""A bandwidth and a folder -> a control group whose processes move no more, each way, on the folder's disk.

Needs root and version 1 of the blkio cgroup. It holds what processes read and write themselves; dirty pages of mapped
files are written by the kernel, which it does not hold.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from counterpoint.core.units import parse_bytes

_BLKIO = Path("/sys/fs/cgroup/blkio")


@contextmanager
def slow_disk(limit: str, folder: str) -> Iterator[list[Path]]:
    """The groups to join: none without a limit."""
    if not limit:
        yield []
        return
    device = os.stat(folder).st_dev
    line = f"{os.major(device)}:{os.minor(device)} {parse_bytes(limit)}"
    group = _BLKIO / f"counterpoint-{os.getpid()}"
    group.mkdir(exist_ok=True)
    try:
        for way in ("read", "write"):
            (group / f"blkio.throttle.{way}_bps_device").write_text(line)
        yield [group]
    finally:
        group.rmdir()
