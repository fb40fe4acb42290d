"""An accelerator -> how fast it copies from and to pinned host memory."""

import time
from dataclasses import dataclass

import torch

from counterpoint.runtime.backend import Backend
from counterpoint.runtime.host_memory import pinned_region

_BYTES = 32 << 20
_TIMES = 4


@dataclass(frozen=True, slots=True)
class CopySpeed:
    load_bytes_per_s: int
    evict_bytes_per_s: int


def probe_copies(backend: Backend) -> CopySpeed:
    """The best of a few, after one to warm up."""
    host = pinned_region(_BYTES).tensor(torch.uint8, (_BYTES,))
    device = backend.empty(_BYTES, torch.uint8)
    times: dict[str, list[int]] = {"load": [], "evict": []}
    for _ in range(1 + _TIMES):
        for way, target, source in (("load", device, host), ("evict", host, device)):
            backend.finish()
            begin = time.monotonic_ns()
            target.copy_(source, non_blocking=True)
            backend.finish()
            times[way].append(time.monotonic_ns() - begin)
    return CopySpeed(*(_BYTES * 10**9 // max(1, min(found[1:])) for found in times.values()))
