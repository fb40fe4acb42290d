"""A benchmark's script and a number of devices -> what its processes tell, started as by torchrun, round after round.

A process tells rows by printing lines of JSON. Whatever happens, no process is left behind.
"""

import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from counterpoint.runtime.tidy_heap import tidy_environment

Row = dict[str, Any]
Setting = TypeVar("Setting")
ERROR_CHARACTERS = 3000
LAST_WORDS_SECONDS = 20


class Failed(Exception):
    """A process ended with a code, or not in time; the end of what it said is the message."""


def tell(row: Row) -> None:
    print(json.dumps(row), flush=True)


def take_turns(
    num_rounds: int,
    settings: Sequence[Setting],
    contenders: Sequence[str],
    turn: Callable[[str, Setting], Row],
    describe: Callable[[Row], str],
) -> tuple[dict[tuple[Setting, str], list[Row]], bool]:
    """Every contender at every setting, round after round: the rows of each, and whether any turn has failed."""
    table: dict[tuple[Setting, str], list[Row]] = {}
    failed = False
    for number, setting, name in itertools.product(range(num_rounds), settings, contenders):
        try:
            found = turn(name, setting)
        except Failed as error:
            failed = True
            print(f"{name} at {setting} failed: {error}", file=sys.stderr, flush=True)
        else:
            table.setdefault((setting, name), []).append(found)
            print(f"round {number} at {setting} {name:12} {describe(found)}", flush=True)
    return table, failed


def seconds_of(row: Row) -> str:
    return " ".join(f"{second:.2f}" for second in row["seconds"]) + " s"


def run_devices(
    script: str, arguments: Sequence[str], count: int, seconds: float, groups: Sequence[Path] = ()
) -> list[list[Row]]:
    """The rows of each device, in their order; `groups` are the control groups that the processes join."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        port = free_port()
        started: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, started)
        for device in range(count):
            out, err = (stack.enter_context((folder / f"{device}.{kind}").open("wb")) for kind in ("out", "err"))
            command = [sys.executable, script, *arguments]
            environment = tidy_environment(os.environ) | environment_of(device, count, port)
            started.append(
                subprocess.Popen(command, stdout=out, stderr=err, env=environment, preexec_fn=joining(groups))
            )
        _wait(started, seconds)
        codes = [process.returncode for process in started]
        if any(codes):
            raise Failed("\n".join(_last_words(folder, device, code) for device, code in enumerate(codes)))
        return [_rows((folder / f"{device}.out").read_text()) for device in range(count)]


def environment_of(device: int, count: int, port: int) -> Mapping[str, str]:
    return {
        "RANK": str(device), "LOCAL_RANK": str(device), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def joining(groups: Sequence[Path]):  # type: ignore[no-untyped-def]
    def join() -> None:
        for folder in groups:
            (folder / "cgroup.procs").write_text(str(os.getpid()))

    return join


def _wait(started: Sequence["subprocess.Popen[bytes]"], seconds: float) -> None:
    """Until all have ended; one that fails gives the others a moment to say why they stop."""
    end = time.monotonic() + seconds
    failed = False
    while any(process.poll() is None for process in started) and time.monotonic() < end:
        if not failed and any(process.poll() for process in started):
            failed, end = True, min(end, time.monotonic() + LAST_WORDS_SECONDS)
        time.sleep(0.05)
    _end(started)


def _end(started: Sequence["subprocess.Popen[bytes]"]) -> None:
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


def _last_words(folder: Path, device: int, code: int) -> str:
    said = (folder / f"{device}.err").read_text()[-ERROR_CHARACTERS:]
    return f"device {device} ended with code {code}: {said}"


def _rows(text: str) -> list[Row]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]
