"""This machine and a folder -> measured speeds, for `counterpoint doctor` and for forecasts; a few seconds in all."""

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from counterpoint.runtime.disk import Disk
from counterpoint.runtime.disk_file import free_bytes
from counterpoint.runtime.disk_transfer import Transfer
from counterpoint.runtime.memory import Region
from counterpoint.runtime.memory_process import cgroup_folders, is_glibc, memory_limit_bytes, physical_memory_bytes
from counterpoint.runtime.probe_compute import gemm, mean_ns, probe_copy, probe_gemm, torch_threads

_PIECE_BYTES = 8 << 20  # four of them are in memory, within what a small budget leaves
_WINDOW_NS = 150_000_000
_NUM_WINDOWS = 3
_LOOK_SECONDS = 0.0005


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Of each direction by itself, and of both at once."""

    read_bytes_per_s: int
    write_bytes_per_s: int
    both_bytes_per_s: int


@dataclass(frozen=True, slots=True)
class Accelerator:
    kind: str
    index: int
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Findings:
    """What `probe_machine` found. Zero flops: a matrix product in this dtype kills the process here.

    `contention_percent` is how much longer a GEMM takes while the disk is busy.
    """

    num_cores: int
    physical_memory_bytes: int
    memory_limit_bytes: int
    copy_bytes_per_s: int
    float32_flops_per_s: int
    bfloat16_flops_per_s: int
    file_system: str
    direct: bool
    free_bytes: int
    disk: DiskSpeed
    contention_percent: int
    torch_version: str
    is_glibc: bool
    accelerators: tuple[Accelerator, ...]


def probe_machine(folder: str | Path) -> Findings:
    """Measure everything below; the folder is created if it is missing."""
    folder = Path(folder)
    num_cores = available_cores()
    with _busy_disk(folder, 256 << 20) as disk:
        speed, contention, direct = _disk_speed(disk), _contention(disk, num_cores), disk.direct
    return Findings(
        num_cores=num_cores,
        physical_memory_bytes=physical_memory_bytes(),
        memory_limit_bytes=memory_limit_bytes(),
        copy_bytes_per_s=probe_copy(num_cores),
        float32_flops_per_s=probe_gemm(num_cores, torch.float32),
        bfloat16_flops_per_s=probe_gemm(num_cores, torch.bfloat16),
        file_system=file_system(folder),
        direct=direct,
        free_bytes=free_bytes(folder),
        disk=speed,
        contention_percent=contention,
        torch_version=torch.__version__,
        is_glibc=is_glibc(),
        accelerators=find_accelerators(),
    )


def probe_disk(folder: str | Path, num_bytes: int = 256 << 20) -> DiskSpeed:
    """Read and write a file of `num_bytes` through the disk tier itself; a slow disk is measured on less of it."""
    with _busy_disk(Path(folder), num_bytes) as disk:
        return _disk_speed(disk)


def available_cores() -> int:
    """Cores this process may use: its affinity, and the CPU quota of its cgroups rounded up."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *(_quota(folder, cores) for folder in cgroup_folders("cpu"))]))


def _quota(folder: Path, cores: int) -> int:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    except OSError:
        return cores
    return cores if quota == "max" or int(quota) <= 0 else -(-int(quota) // int(period))


def file_system(folder: str | Path) -> str:
    """The kind of file system a folder is on, such as ext4 or tmpfs."""
    path, found, kind = Path(folder).resolve(), Path(), "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, tail = line.partition(" - ")
        mount = Path(fields.split()[4].encode().decode("unicode_escape"))
        if path.is_relative_to(mount) and len(mount.parts) >= len(found.parts):
            found, kind = mount, tail.split()[0]
    return kind


def find_accelerators() -> tuple[Accelerator, ...]:
    if not torch.accelerator.is_available():
        return ()
    accelerator = torch.accelerator.current_accelerator()
    kind = accelerator.type if accelerator else "unknown"
    return tuple(_describe(kind, index) for index in range(torch.accelerator.device_count()))


def _describe(kind: str, index: int) -> Accelerator:
    module = torch.get_device_module(kind)
    name = module.get_device_name(index) if hasattr(module, "get_device_name") else kind
    try:
        memory_bytes = torch.accelerator.get_memory_info(index)[1]
    except (AttributeError, NotImplementedError, RuntimeError):  # not every backend can tell
        memory_bytes = 0
    return Accelerator(kind, index, name, memory_bytes)


@contextmanager
def _busy_disk(folder: Path, num_bytes: int) -> Iterator[Disk]:
    """A disk of pieces in a subfolder of its own, so that a run in `folder` is left alone."""
    pieces = {str(piece): _PIECE_BYTES for piece in range(max(1, num_bytes // _PIECE_BYTES))}
    own = folder / f"probe-{os.getpid()}"
    try:
        with Disk(own, pieces) as disk:
            yield disk
    finally:
        if own.is_dir():
            own.rmdir()


class _Traffic:
    """Transfers of piece after piece in one direction, a few of them always under way."""

    def __init__(self, disk: Disk, write: bool) -> None:
        self.moved_bytes = 0
        self._start = disk.write if write else disk.read
        self._num_pieces = disk.statistics().num_keys
        self._next = 0
        self._regions = deque(Region(_PIECE_BYTES) for _ in range(2))
        self._open: deque[Transfer] = deque()
        for region in self._regions:
            region.populate()

    def feed(self, num_open: int) -> None:
        """Forget what is done, and start pieces until `num_open` are under way."""
        while self._open and self._open[0].done():
            self._wait()
        while len(self._open) < num_open:
            self._open.append(self._start(str(self._next % self._num_pieces), self._regions[self._next % 2]))
            self._next += 1

    def run(self, num_pieces: int, time_ns: int) -> int:
        """Move so many pieces, or as many as the time allows; bytes per second."""
        start, before = time.perf_counter_ns(), self.moved_bytes
        for _ in range(num_pieces):
            self.feed(2)
            if time.perf_counter_ns() - start > time_ns:
                break
            self._wait()
        self.drain()
        return (self.moved_bytes - before) * 10**9 // (time.perf_counter_ns() - start)

    def drain(self) -> None:
        while self._open:
            self._wait()

    def _wait(self) -> None:
        transfer = self._open.popleft()
        transfer.wait()
        self.moved_bytes += transfer.num_bytes


def _disk_speed(disk: Disk) -> DiskSpeed:
    """The first pass of writes is not counted: it also turns reserved blocks into written ones."""
    num_pieces = disk.statistics().num_keys
    writes, reads = _Traffic(disk, write=True), _Traffic(disk, write=False)
    writes.run(num_pieces, 2 * _WINDOW_NS)
    return DiskSpeed(
        write_bytes_per_s=writes.run(2 * num_pieces, 3 * _WINDOW_NS),
        read_bytes_per_s=reads.run(2 * num_pieces, 3 * _WINDOW_NS),
        both_bytes_per_s=_run_both(writes, reads, 3 * _WINDOW_NS),
    )


def _run_both(writes: _Traffic, reads: _Traffic, time_ns: int) -> int:
    """Bytes per second while some of each are always under way."""
    start, before = time.perf_counter_ns(), writes.moved_bytes + reads.moved_bytes
    while time.perf_counter_ns() - start < time_ns:
        for direction in (writes, reads):
            direction.feed(2)
        time.sleep(_LOOK_SECONDS)
    for direction in (writes, reads):
        direction.drain()
    return (writes.moved_bytes + reads.moved_bytes - before) * 10**9 // (time.perf_counter_ns() - start)


def _contention(disk: Disk, num_threads: int) -> int:
    """The disk is idle and busy in turn, so that a drift of the machine hits both alike."""
    multiply, traffic = gemm(torch.float32), (_Traffic(disk, write=True), _Traffic(disk, write=False))
    alone = busy = 0

    def multiply_and_feed() -> None:
        for direction in traffic:
            direction.feed(8)
        multiply()

    with torch_threads(num_threads):
        multiply()
        for _ in range(_NUM_WINDOWS):
            alone += mean_ns(multiply, _WINDOW_NS)
            busy += mean_ns(multiply_and_feed, _WINDOW_NS)
            for direction in traffic:
                direction.drain()
    return max(0, 100 * busy // alone - 100)
