"""A check -> the same check run in other processes, in which the played device is installed.

Installing changes what `torch.accelerator` finds, for good: the process that runs the tests must stay without it.
"""

import functools
import importlib.util
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torch

from tests.played import install

SECONDS = 240


def in_child(check: Callable[[], None]) -> Callable[[], None]:
    """The check as a test that runs in a child process; all checks of one test process share the child."""

    @functools.wraps(check)
    def test() -> None:
        try:
            _child().submit(_run, check.__code__.co_filename, check.__qualname__).result(SECONDS)
        except BrokenProcessPool:
            _child.cache_clear()  # the next check gets a new child
            raise

    return test


def on_ranks(check: Callable[[int], None], size: int, folder: Path) -> list[int]:
    """Runs the check with each rank in a process of its own and a process group; gives their exit codes."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(check, rank, size, folder)) for rank in range(size)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + SECONDS
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [process for process in ranks if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    return [-1 if process.exitcode is None else process.exitcode for process in ranks]


@functools.cache
def _child() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=install)


def _run(path: str, name: str) -> None:
    """What fails is told as text: not every exception finds its way back."""
    failure = ""
    torch.accelerator.set_device_index(0)  # wherever the check before has left it
    try:
        getattr(_module(path), name).__wrapped__()
    except BaseException:
        failure = traceback.format_exc()
    assert not failure, failure


@functools.cache
def _module(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"in_child_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _rank(check: Callable[[int], None], rank: int, size: int, folder: Path) -> None:
    import torch.distributed as dist

    install()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "cpu:gloo,played:pccl",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    check(rank)
    dist.destroy_process_group()
