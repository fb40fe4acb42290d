"""A file that the devices of a server share -> which version of each buffer is at home, without a barrier.

Whoever brings a new version home says so here when it is there; whoever loads it waits until then. Nobody has to be
asked before a version is overwritten: an update needs the gradients of all that used the version it replaces, so by
then every load of that version is done.
"""

import mmap
import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from counterpoint.core.errors import ExecutionError

NONE = -2  # before even the version that a delayed schedule begins with
_POLL_SECONDS = (0.0002, 0.002)


class Versions:
    """One number per key. `make` on the server's first device, before the others open it."""

    def __init__(self, path: Path, keys: Sequence[str], make: bool) -> None:
        self.path = path
        self._places = {key: 8 * index for index, key in enumerate(keys)}
        size = max(8 * len(keys), 8)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC if make else 0), 0o600)
        try:
            if make:
                os.pwrite(descriptor, struct.pack("q", NONE) * (size // 8), 0)
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def get(self, key: str) -> int:
        return int(struct.unpack_from("q", self._map, self._places[key])[0])

    def put(self, key: str, version: int) -> None:
        struct.pack_into("q", self._map, self._places[key], version)

    def wait(self, key: str, version: int, stopped: Callable[[], bool]) -> None:
        """Return when exactly this version is at home."""
        pause = _POLL_SECONDS[0]
        while (found := self.get(key)) < version:
            if stopped():
                raise ExecutionError(f"nobody brings version {version} of {key!r} home any more")
            time.sleep(pause)
            pause = min(pause * 1.5, _POLL_SECONDS[1])
        if found != version:
            raise ExecutionError(f"version {version} of {key!r} was overwritten by version {found} before it was read")

    def close(self) -> None:
        self._map.close()
