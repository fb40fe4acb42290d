"""A function and a number of devices -> what it returns in as many processes, as torchrun would have started them.

Processes are forked from a server that has torch loaded already, so that a test costs what it computes. Functions must
be importable: they are named, not copied.
"""

import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests import where

PRELOADED = ["torch", "torch.distributed", "counterpoint.trainer", "counterpoint.decomposer"]
TIMEOUT_SECONDS = 240
PATIENT = {"COUNTERPOINT_SILENCE_SECONDS": "60"}  # a busy machine is no failure

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


@dataclass(frozen=True)
class Outcome:
    """How a process ended: what it returned, or the text of what it raised; `code` is negative for a signal."""

    code: int
    value: Any = None
    error: str = ""


class Crew:
    """Processes under way; whatever happens, none of them is left behind."""

    def __init__(
        self, count: int, function: Callable[..., Any], *arguments: Any, environments: Sequence[dict[str, str]] = ()
    ) -> None:
        with ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            port = str(_free_port())
            self.processes = []
            stack.callback(self._end)
            for rank in range(count):
                environment = {
                    "RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
                    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16", **PATIENT, **(environments[rank] if environments else {}),
                }  # fmt: skip
                target = self.folder / f"{rank}.pt"
                process = _context.Process(target=_enter, args=(environment, target, function, arguments), daemon=True)
                process.start()
                self.processes.append(process)
            self._stack = stack.pop_all()

    def outcomes(self, timeout_seconds: float = TIMEOUT_SECONDS) -> list[Outcome]:
        """How each process ended; one that has not is an error."""
        end = time.monotonic() + timeout_seconds
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
        late = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        if late:
            raise TimeoutError(f"devices {late} are still running after {timeout_seconds} s")
        return [self.outcome(rank) for rank in range(len(self.processes))]

    def results(self, timeout_seconds: float = TIMEOUT_SECONDS) -> list[Any]:
        """What each process returned; the first that failed is an error."""
        found = self.outcomes(timeout_seconds)
        failed = [f"device {rank} ({o.code}): {o.error}" for rank, o in enumerate(found) if o.code or o.error]
        assert not failed, "\n".join(failed)
        return [outcome.value for outcome in found]

    def outcome(self, rank: int) -> Outcome:
        import torch

        path, code = self.folder / f"{rank}.pt", self.processes[rank].exitcode or 0
        if not path.exists():
            return Outcome(code)
        value, error = torch.load(path, weights_only=False)
        return Outcome(code, value, error)

    def _end(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join()

    def __enter__(self) -> "Crew":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


def launch(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run the function on `count` devices; what each returned."""
    with Crew(count, function, *arguments) as crew:
        return crew.results()


def _enter(environment: dict[str, str], target: Path, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    import torch

    os.environ.update(environment)
    where.device()
    torch.set_num_threads(1)
    value, error = None, ""
    try:
        value = function(*arguments)
    except BaseException as found:
        traceback.print_exc()
        error = f"{type(found).__name__}: {found}"
    unfinished = target.with_suffix(".unfinished")
    torch.save((value, error), unfinished)
    unfinished.rename(target)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
