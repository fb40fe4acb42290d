"""Home and an accelerator's regions -> copies between them: at once from host memory, through staging from a disk."""

import threading
from collections.abc import Callable

import torch

from counterpoint.runtime.device_memory import DeviceRegion
from counterpoint.runtime.host_memory import HostRegion, pinned_region
from counterpoint.runtime.tiers import Home

STAGE_BYTES = 8 << 20


class Copies:
    """Transfers of lanes, each in its own staging memory; `finish` waits for what the calling lane has started."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish
        self._local = threading.local()

    def load(self, home: Home, key: str, target: DeviceRegion) -> None:
        mapped = home.mapped(key)
        if mapped is None:
            self._load_staged(home, key, target)
        else:
            target.content.copy_(mapped.tensor(torch.uint8, (target.num_bytes,)), non_blocking=True)
        self._finish()

    def evict(self, home: Home, key: str, source: DeviceRegion) -> None:
        mapped = home.mapped(key)
        if mapped is None:
            self._evict_staged(home, key, source)
        else:
            mapped.tensor(torch.uint8, (source.num_bytes,)).copy_(source.content, non_blocking=True)
            self._finish()

    def _load_staged(self, home: Home, key: str, target: DeviceRegion) -> None:
        """One part is read while the one before it goes to the device."""
        rooms, parts = self._rooms(), _parts(target.num_bytes)
        transfer = home.read(key, rooms[0].view(0, parts[0][1]), 0)
        for number, (offset, size) in enumerate(parts):
            transfer.wait()
            self._finish()  # the other room is free
            if number + 1 < len(parts):
                following, length = parts[number + 1]
                transfer = home.read(key, rooms[(number + 1) % 2].view(0, length), following)
            content = rooms[number % 2].tensor(torch.uint8, (size,))
            target.content[offset : offset + size].copy_(content, non_blocking=True)

    def _evict_staged(self, home: Home, key: str, source: DeviceRegion) -> None:
        """One part is written while the next one comes from the device."""
        rooms = self._rooms()
        writes: list[object] = [None, None]
        for number, (offset, size) in enumerate(_parts(source.num_bytes)):
            turn = number % 2
            _wait(writes[turn])
            content = rooms[turn].tensor(torch.uint8, (size,))
            content.copy_(source.content[offset : offset + size], non_blocking=True)
            self._finish()
            writes[turn] = home.write(key, rooms[turn].view(0, size), offset)
        for write in writes:
            _wait(write)

    def _rooms(self) -> tuple[HostRegion, HostRegion]:
        if not hasattr(self._local, "rooms"):
            self._local.rooms = (pinned_region(STAGE_BYTES), pinned_region(STAGE_BYTES))
        rooms: tuple[HostRegion, HostRegion] = self._local.rooms
        return rooms


def _wait(transfer: object) -> None:
    if transfer is not None:
        transfer.wait()  # type: ignore[attr-defined]


def _parts(num_bytes: int) -> list[tuple[int, int]]:
    return [(offset, min(STAGE_BYTES, num_bytes - offset)) for offset in range(0, num_bytes, STAGE_BYTES)]
