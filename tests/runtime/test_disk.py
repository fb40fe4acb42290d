"""The disk tier on real files: round trips, reuse, faults, locks, and a page cache that does not grow."""

import itertools
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.core.errors import ExecutionError
from counterpoint.runtime.disk import Disk
from counterpoint.runtime.disk_extents import BLOCK_BYTES, Extents
from counterpoint.runtime.disk_transfer import Transfer
from counterpoint.runtime.memory import Region

MIB = 1 << 20
CGROUP = Path("/sys/fs/cgroup/memory")


@pytest.fixture(params=["direct", "buffered", "tmpfs"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, bool]]:
    """A folder, and whether to ask for O_DIRECT there."""
    if request.param != "tmpfs":
        yield tmp_path, request.param == "direct"
        return
    folder = Path(f"/dev/shm/counterpoint-test-{os.getpid()}")
    yield folder, False
    shutil.rmtree(folder, ignore_errors=True)


def filled(num_bytes: int, seed: int) -> Region:
    region = Region(num_bytes)
    pattern = bytes((seed * 31 + index * 7) % 251 for index in range(4093))
    data = (pattern * (region.num_bytes // len(pattern) + 1))[: region.num_bytes]
    region.view()[:] = data
    return region


def same(one: Region, other: Region) -> bool:
    return one.view() == other.view()


def threads_of_disks() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("counterpoint-")]


def test_what_is_written_is_read(place: tuple[Path, bool]) -> None:
    folder, direct = place
    sizes = {"weight": 9 * MIB + 1, "state": 3, "empty": 0}
    with Disk(folder, sizes, direct=direct) as disk:
        sources = {key: filled(size, seed) for seed, (key, size) in enumerate(sizes.items())}
        for transfer in [disk.write(key, region) for key, region in sources.items()]:
            transfer.wait()
        for key, source in sources.items():
            target = Region(sizes[key])
            disk.read(key, target).wait()
            assert same(source, target)
        moved = sum(region.num_bytes for region in sources.values())
        statistics = disk.statistics()
        assert (statistics.read_bytes, statistics.written_bytes, statistics.num_keys) == (moved, moved, 3)
        assert statistics.file_bytes == moved == disk.path.stat().st_size


def test_part_of_an_extent(tmp_path: Path) -> None:
    with Disk(tmp_path, {"a": 8 * BLOCK_BYTES, "b": BLOCK_BYTES}) as disk:
        disk.write("a", filled(8 * BLOCK_BYTES, 1)).wait()
        target = Region(4 * BLOCK_BYTES)
        disk.read("a", target.view(BLOCK_BYTES, 2 * BLOCK_BYTES), 3 * BLOCK_BYTES).wait()
        whole = filled(8 * BLOCK_BYTES, 1).view(3 * BLOCK_BYTES, 2 * BLOCK_BYTES)
        assert target.view(BLOCK_BYTES, 2 * BLOCK_BYTES) == whole
        for offset in (-BLOCK_BYTES, 1, 5 * BLOCK_BYTES):
            with pytest.raises(ValueError, match="not whole blocks within"):
                disk.read("a", target, offset)
        for memory in (bytearray(BLOCK_BYTES + 1), bytes(BLOCK_BYTES), target.view(16, BLOCK_BYTES), bytearray()):
            with pytest.raises(ValueError, match="use a Region"):
                disk.read("b", memoryview(memory))
        with pytest.raises(ValueError, match="no extent for 'c'"):
            disk.read("c", target)


def test_many_threads_at_once(tmp_path: Path) -> None:
    sizes = {f"layer{index}": (index % 5 + 1) * MIB // 2 for index in range(24)}
    errors: list[BaseException] = []

    def churn(disk: Disk, mine: list[str]) -> None:
        try:
            for turn in range(5):
                sources = {key: filled(sizes[key], hash((key, turn)) % 1000) for key in mine}
                for transfer in [disk.write(key, region) for key, region in sources.items()]:
                    transfer.wait()
                targets = {key: Region(sizes[key]) for key in mine}
                for transfer in [disk.read(key, region) for key, region in targets.items()]:
                    transfer.wait()
                assert all(same(sources[key], targets[key]) for key in mine)
        except BaseException as error:
            errors.append(error)

    with Disk(tmp_path, sizes, num_threads=3, chunk_bytes=256 << 10) as disk:
        workers = [threading.Thread(target=churn, args=(disk, list(sizes)[index::4])) for index in range(4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert not errors
    assert not threads_of_disks()


def test_a_small_transfer_does_not_wait_for_a_large_one(tmp_path: Path) -> None:
    with Disk(tmp_path, {"large": 64 * MIB, "small": MIB}, num_threads=1, chunk_bytes=MIB // 16) as disk:
        large = disk.write("large", Region(64 * MIB))
        small = disk.write("small", Region(MIB))
        small.wait()
        large.wait()
    assert small.finished_ns < large.finished_ns


def test_transient_keys_reuse_space(tmp_path: Path) -> None:
    with Disk(tmp_path, {"weight": MIB}, scratch_bytes=4 * MIB) as disk:
        reserved = disk.statistics().file_bytes
        for microbatch in range(50):
            for value in range(4):
                disk.add(f"activation{value}.{microbatch}", MIB)
            source, target = filled(MIB, microbatch), Region(MIB)
            disk.write(f"activation3.{microbatch}", source).wait()
            disk.read(f"activation3.{microbatch}", target).wait()
            assert same(source, target)
            for value in range(4):
                disk.release(f"activation{value}.{microbatch}")
        assert disk.statistics().file_bytes == reserved == 5 * MIB
        disk.add("large", 9 * MIB)
        assert disk.statistics().file_bytes > reserved
        with pytest.raises(ValueError, match="has an extent already"):
            disk.add("large", 1)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40_000)), max_size=60))
def test_extents_never_overlap_and_leave_no_waste(moves: list[tuple[bool, int]]) -> None:
    extents = Extents()
    for index, (adds, number) in enumerate(moves):
        if adds or not len(extents):
            extents.add(str(index), number)
        else:
            extents.release(list(extents)[number % len(extents)])
        spans = sorted((extents[key].offset_bytes, extents[key].end_bytes) for key in extents)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert extents.end_bytes == max((end for _, end in spans), default=0)


def test_copy_to_and_from_files_at_any_offset(place: tuple[Path, bool], tmp_path: Path) -> None:
    folder, direct = place
    size = 9 * MIB + 77
    with Disk(folder, {"a": size, "b": size}, direct=direct) as disk, open(tmp_path / "saved", "wb+") as saved:
        source = filled(size, 5)
        disk.write("a", source).wait()
        disk.copy_to("a", saved.fileno(), 13)
        assert (tmp_path / "saved").read_bytes()[13:] == bytes(source.view(0, size))
        disk.copy_from("b", saved.fileno(), 13)
        target = Region(size)
        disk.read("b", target).wait()
        assert target.view(0, size) == source.view(0, size)
        disk.copy_to("a", saved.fileno(), 0, offset_bytes=5, num_bytes=10)
        assert (tmp_path / "saved").read_bytes()[:10] == bytes(source.view(5, 10))
        with pytest.raises(ValueError, match="not within 'a'"):
            disk.copy_to("a", saved.fileno(), 0, offset_bytes=size, num_bytes=1)
        with pytest.raises(ExecutionError, match="is torn"):
            disk.copy_from("b", saved.fileno(), 14)
        disk.sync()


def test_copy_between_file_systems(tmp_path: Path) -> None:
    other = Path(f"/dev/shm/counterpoint-copy-{os.getpid()}")
    size = 8 * MIB + 5
    try:
        with Disk(tmp_path, {"a": size}) as disk, open(other, "wb+") as saved:
            source = filled(size, 9)
            disk.write("a", source).wait()
            disk.copy_to("a", saved.fileno())
            assert other.read_bytes() == bytes(source.view(0, size))
    finally:
        other.unlink(missing_ok=True)


def test_a_disk_too_small_is_refused_before_the_start(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(ExecutionError, match=r"needs .* more and .* are free; free some space"):
        Disk(tmp_path / "folder", {"weight": 2 * free})
    assert not list((tmp_path / "folder").iterdir())
    with Disk(tmp_path / "folder", {"weight": MIB}) as disk:
        with pytest.raises(ExecutionError, match="disk is too small"):
            disk.add("activation", 2 * free)
        disk.add("activation", MIB)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_small_file_system_fills_up(tmp_path: Path) -> None:
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(tmp_path)], check=False).returncode:
        pytest.skip("this system does not let tests mount a tmpfs")
    try:
        with Disk(tmp_path / "folder", {"weight": 2 * MIB}) as disk:
            with pytest.raises(ExecutionError, match=r"needs 3.00 MiB more"):
                disk.add("activation", 3 * MIB)
            disk.add("activation", MIB)
        with pytest.raises(ExecutionError, match=r"needs 5.00 MiB more and .* are free"):
            Disk(tmp_path / "folder", {"weight": 5 * MIB})
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_truncated_file_is_named_and_nobody_hangs(place: tuple[Path, bool]) -> None:
    folder, direct = place
    with Disk(folder, {"a": 4 * MIB, "b": 20 * MIB}, chunk_bytes=MIB, direct=direct) as disk:
        os.truncate(disk.path, 10 * MIB + 100)
        transfer = disk.read("b", Region(20 * MIB))
        refused: list[ExecutionError] = []

        def wait() -> None:
            try:
                transfer.wait()
            except ExecutionError as error:
                refused.append(error)

        waiters = [threading.Thread(target=wait) for _ in range(3)]
        for waiter in waiters:
            waiter.start()
        for waiter in waiters:
            waiter.join(10)
        assert len(refused) == 3
        with pytest.raises(ExecutionError, match=r"cannot read 'b' .*extents.bin ends at byte .* last checkpoint"):
            transfer.wait()
        assert transfer.done()
        assert transfer.exception() is not None
        disk.read("a", Region(4 * MIB)).wait()
    assert not threads_of_disks()


def test_a_write_the_system_refuses(tmp_path: Path) -> None:
    with Disk(tmp_path, {"a": 4 * MIB, "b": 4 * MIB}) as disk:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (6 * MIB, limits[1]))
        try:
            with pytest.raises(ExecutionError, match=r"cannot write 'b' .*File too large; raise the file size limit"):
                disk.write("b", Region(4 * MIB)).wait()
            disk.write("a", Region(4 * MIB)).wait()
            with pytest.raises(ExecutionError, match="raise the file size limit"):
                disk.add("c", 100 * MIB)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        disk.write("b", Region(4 * MIB)).wait()


def test_close_cancels_what_has_not_begun_and_leaves_nothing(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "folder", {str(index): 32 * MIB for index in range(8)}, num_threads=1, chunk_bytes=MIB)
    region = Region(32 * MIB)
    transfers = [disk.write(str(index), region) for index in range(8)]
    disk.close()
    disk.close()
    assert all(transfer.done() for transfer in transfers)
    with pytest.raises(ExecutionError, match="was cancelled: the disk was closed"):
        transfers[-1].wait()
    with pytest.raises(ExecutionError, match="disk is closed"):
        disk.write("0", region)
    for refused in (disk.sync, lambda: disk.add("x", 1), lambda: disk.copy_to("0", 0)):
        with pytest.raises(ExecutionError, match="is closed; open it again"):
            refused()
    assert region.close(), "a finished transfer must not keep its memory"
    assert not threads_of_disks()
    assert not list((tmp_path / "folder").iterdir())


def test_an_abandoned_disk_cleans_up(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "folder", {"a": MIB})
    transfer = disk.write("a", Region(MIB))
    transfer.wait()
    del disk
    assert not threads_of_disks()
    assert not list((tmp_path / "folder").iterdir())


def run_python(text: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", text, *arguments], stdout=subprocess.PIPE, text=True)


HOLD = """
import sys
from counterpoint.runtime.disk import Disk
disk = Disk(sys.argv[1], {"a": 1 << 20})
print("ready", flush=True)
if sys.argv[2] == "hold":
    sys.stdin.read()
"""


def test_two_processes_cannot_share_a_folder_but_a_dead_one_is_replaced(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), "hold"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdin is not None
    try:
        assert other.stdout.readline() == "ready\n"
        with pytest.raises(ExecutionError, match=f"in use by process {other.pid}; wait for it to end"):
            Disk(tmp_path, {"a": 1})
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
        other.stdout.close()
        other.stdin.close()
    assert (tmp_path / "extents.bin").exists()
    with Disk(tmp_path, {"a": 1}) as disk:
        assert disk.path.stat().st_size == BLOCK_BYTES
        with pytest.raises(ExecutionError, match=f"in use by process {os.getpid()}"):
            Disk(tmp_path, {"a": 1})
    assert not list(tmp_path.iterdir())


def test_a_process_that_ends_without_close_cleans_up(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", HOLD, str(tmp_path), "end"], timeout=60, check=False)
    assert result.returncode == 0
    assert not list(tmp_path.iterdir())


def test_a_forked_child_leaves_the_file_alone(tmp_path: Path) -> None:
    fork = (
        "import os, sys\n"
        "from counterpoint.runtime.disk import Disk\n"
        "disk = Disk(sys.argv[1], {'a': 1})\n"
        "child = os.fork()\n"
        "if child == 0: sys.exit(0)\n"
        "os.waitpid(child, 0)\n"
        "assert disk.path.exists()\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", fork, str(tmp_path)], timeout=60, check=True)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExecutionError, match=r"cannot use folder .*; choose another folder"):
        Disk(tmp_path / "file", {"a": 1})


def test_a_transfer_knows_when_it_ran_and_a_wait_can_end(tmp_path: Path) -> None:
    with Disk(tmp_path, {"a": 64 * MIB}) as disk:
        before = time.perf_counter_ns()
        transfer = disk.write("a", Region(64 * MIB))
        with pytest.raises(TimeoutError, match="write of 'a'"):
            transfer.wait(0)
        transfer.wait()
        assert before <= transfer.started_ns < transfer.finished_ns <= time.perf_counter_ns()
        assert transfer.exception() is None


def test_a_request_costs_little(tmp_path: Path) -> None:
    with Disk(tmp_path, {"a": BLOCK_BYTES}) as disk:
        region, best_ns = Region(BLOCK_BYTES), 10**9
        for _ in range(5):
            start = time.perf_counter_ns()
            transfers: list[Transfer] = [disk.read("a", region) for _ in range(20)]
            best_ns = min(best_ns, (time.perf_counter_ns() - start) // 20)
            for transfer in transfers:
                transfer.wait()
        assert best_ns < 100_000


CACHE = """
import os, sys
from pathlib import Path
from counterpoint.runtime.disk import Disk
from counterpoint.runtime.memory import Region
group, direct = Path(sys.argv[2]), sys.argv[3] == "direct"
(group / "cgroup.procs").write_text(str(os.getpid()))
MIB = 1 << 20
def cache():
    lines = (group / "memory.stat").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("cache ")))
sizes = {str(i): 32 * MIB for i in range(4)}
with Disk(sys.argv[1], sizes, direct=direct) as disk, open(sys.argv[1] + "/copy", "wb") as copy:
    region, before = Region(32 * MIB), cache()
    for i in range(4):
        disk.write(str(i), region).wait()
        disk.read(str(i), region).wait()
        disk.copy_to(str(i), copy.fileno(), i * 32 * MIB)
    print((cache() - before) // MIB)
"""


@pytest.mark.skipif(os.geteuid() != 0 or not CGROUP.is_dir(), reason="needs root and a memory cgroup of version 1")
@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_a_hard_limit_is_survived_and_the_page_cache_does_not_grow(tmp_path: Path, mode: str) -> None:
    group = CGROUP / f"counterpoint-test-{os.getpid()}-{mode}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(128 * MIB))
        run = run_python(CACHE, str(tmp_path), str(group), mode)
        output, _ = run.communicate(timeout=60)
        assert run.returncode == 0
        assert int(output) < 24, "384 MiB were moved; at most a few pages in flight may stay cached"
    finally:
        group.rmdir()
