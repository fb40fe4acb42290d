"""A number of threads and a dtype -> how fast this machine multiplies and copies in memory."""

import faulthandler
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch

from counterpoint.runtime.memory import Region

_GEMM_SIZE = 1024
_COPY_BYTES = 64 << 20
_RUNS_NS = 300_000_000
_CHILD_NS = 2 * 10**9


def probe_gemm(num_threads: int, dtype: torch.dtype = torch.float32) -> int:
    """Floating-point operations per second of a large matrix product; zero if it cannot run here."""
    if not gemm_works(dtype):
        return 0
    with torch_threads(num_threads):
        return 2 * _GEMM_SIZE**3 * 10**9 // _best_ns(gemm(dtype))


def gemm_works(dtype: torch.dtype) -> bool:
    """Whether a matrix product in this dtype survives, tried in a forked child.

    Some virtual machines announce AMX and trap on it: the product then dies of SIGILL, unless oneDNN was told to do
    without by ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 before its first use.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        child = os.fork()
    if child == 0:
        _multiply_and_exit(dtype)
    end = time.monotonic_ns() + _CHILD_NS
    while time.monotonic_ns() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def _multiply_and_exit(dtype: torch.dtype) -> NoReturn:
    try:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        torch.set_num_threads(1)  # the parent's other threads do not exist here
        torch.mm(torch.ones(64, 64, dtype=dtype), torch.ones(64, 64, dtype=dtype))
        os._exit(0)
    finally:
        os._exit(1)


def probe_copy(num_threads: int) -> int:
    """Bytes per second that a copy within memory moves; each is read once and written once."""
    source, target = (Region(_COPY_BYTES).tensor(torch.uint8, (_COPY_BYTES,)) for _ in range(2))
    with torch_threads(num_threads):
        return _COPY_BYTES * 10**9 // _best_ns(lambda: target.copy_(source))


def mean_ns(work: Callable[[], object], time_ns: int) -> int:
    """The mean duration of the runs that fit into `time_ns`, at least one."""
    start, count = time.perf_counter_ns(), 0
    while (elapsed := time.perf_counter_ns() - start) < time_ns or not count:
        work()
        count += 1
    return elapsed // count


def _best_ns(work: Callable[[], object]) -> int:
    """The shortest of the runs that fit into the time, after one to warm up."""
    work()
    end, best = time.perf_counter_ns() + _RUNS_NS, 1 << 62
    while (start := time.perf_counter_ns()) < end:
        work()
        best = min(best, time.perf_counter_ns() - start)
    return max(1, best)


def gemm(dtype: torch.dtype) -> Callable[[], object]:
    """A matrix product to run again and again; it allocates nothing."""
    left, right = (torch.ones(_GEMM_SIZE, _GEMM_SIZE, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=product)


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
