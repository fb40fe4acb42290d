"""Chunk sizes and threads -> a table of the disk tier's GB/s, alone and beside a GEMM: `python benchmarks/disk.py`."""

import argparse
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from counterpoint.runtime.disk import Disk
from counterpoint.runtime.memory import Region
from counterpoint.runtime.probe_compute import gemm

PIECE_BYTES = 64 << 20
NUM_PIECES = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=".", help="where to write; a temporary folder in it is used")
    parser.add_argument("--chunks", default="256,1024,4096,16384", help="chunk sizes in KiB")
    parser.add_argument("--threads", default="1,2,4", help="threads for each direction")
    arguments = parser.parse_args()
    print("GB/s (best of 3), and CPU ms spent per GB; 'both' reads and writes at the same time")
    print(f"{'chunk':>9} {'threads':>7} | {'write':>12} {'read':>12} {'both':>12} | with a GEMM running")
    for chunk_kib in map(int, arguments.chunks.split(",")):
        for num_threads in map(int, arguments.threads.split(",")):
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                print(row(folder, chunk_kib << 10, num_threads), flush=True)


def row(folder: str, chunk_bytes: int, num_threads: int) -> str:
    sizes = {str(piece): PIECE_BYTES for piece in range(NUM_PIECES)}
    with Disk(folder, sizes, num_threads=num_threads, chunk_bytes=chunk_bytes) as disk:
        regions = Region(PIECE_BYTES), Region(PIECE_BYTES)
        move(disk, regions, "both")  # faults in the regions, and turns reserved blocks into written ones
        alone = [measure(disk, regions, mode) for mode in ("write", "read", "both")]
        with busy_cores():
            beside = [measure(disk, regions, mode, cpu=False) for mode in ("write", "read", "both")]
    columns = [" ".join(f"{text:>12}" for text in texts) for texts in (alone, beside)]
    return f"{chunk_bytes >> 10:>5} KiB {num_threads:>7} | " + " | ".join(columns)


def measure(disk: Disk, regions: tuple[Region, Region], mode: str, *, cpu: bool = True) -> str:
    num_bytes = NUM_PIECES * PIECE_BYTES * (2 if mode == "both" else 1)
    best_s, least_cpu_s = 1e9, 1e9
    for _ in range(3):
        start, start_cpu = time.perf_counter(), cpu_s()
        move(disk, regions, mode)
        best_s = min(best_s, time.perf_counter() - start)
        least_cpu_s = min(least_cpu_s, cpu_s() - start_cpu)
    speed = f"{num_bytes / best_s / 1e9:.2f}"
    return f"{speed} ({least_cpu_s * 1e3 / (num_bytes / 1e9):.0f})" if cpu else speed


def move(disk: Disk, regions: tuple[Region, Region], mode: str) -> None:
    transfers = []
    for piece in range(NUM_PIECES):
        if mode != "read":
            transfers.append(disk.write(str(piece), regions[0]))
        if mode != "write":
            transfers.append(disk.read(str((piece + NUM_PIECES // 2) % NUM_PIECES), regions[1]))
    for transfer in transfers:
        transfer.wait()


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def busy_cores() -> Iterator[None]:
    stop, multiply = threading.Event(), gemm(torch.float32)

    def work() -> None:
        while not stop.is_set():
            multiply()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


if __name__ == "__main__":
    main()
