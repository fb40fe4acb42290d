"""GPT-2 under a hard memory limit of the operating system, against plain PyTorch with and without that limit.

Every contender runs in a process of its own inside a memory cgroup (v1, needs root); the rounds are interleaved and
medians reported. Contenders:

    plain         plain PyTorch, no limit
    checkpointed  plain PyTorch with activation checkpointing, no limit
    ours          Counterpoint, the limit as its memory
    killed        plain PyTorch under the limit
    swap          PyTorch paged by the kernel under the limit, through a swap file
    mapped        PyTorch with weights, gradients and optimizer state in memory-mapped files, under the limit

The two paged ones get what spares memory without changing the result much: activation checkpointing, and gradients
accumulated over single sequences. `--disk-limit 200MB` holds the disk to that many bytes per second in each direction
(blkio cgroup) for everyone under a limit. `swap` makes a swap file in `--folder` for the time it needs it.
A contender that has not made its steps after `--patience` seconds is given up.

    python benchmarks/memory_limit.py --model gpt2-medium --limits 3GiB 2GiB 1.25GiB --batch 8 --steps 2 --rounds 2
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import memory_contenders
from crew import joining
from slow_disk import slow_disk

from counterpoint.core.units import format_bytes, parse_bytes
from counterpoint.runtime.tidy_heap import tidy_environment

MEMORY = Path("/sys/fs/cgroup/memory")
SWAP_BYTES = 16 << 30


def contend(name: str, limit: int | None, swap: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one contender in its cgroup; what it printed, and how it ended."""
    group = MEMORY / f"counterpoint-{os.getpid()}"
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(str(limit or -1))
    if not swap:
        (group / "memory.swappiness").write_text("0")
    command = [sys.executable, memory_contenders.__file__, name, "--memory", str(limit or 0)]
    for option in ("model", "batch", "length", "steps", "threads"):
        command += [f"--{option}", str(getattr(arguments, option))]
    swapping = _swap_file(Path(arguments.folder)) if swap else contextlib.nullcontext()
    own_folder = tempfile.TemporaryDirectory(prefix="contender-", dir=arguments.folder)  # a killed one leaves files
    with swapping, own_folder as folder, slow_disk(arguments.disk_limit if limit else "", folder) as groups:
        command += ["--folder", folder]
        code, out, error = _run(command, joining((group, *groups)), arguments.patience)
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    peak = int((group / "memory.max_usage_in_bytes").read_text())
    group.rmdir()
    seconds = [row["seconds"] for row in rows if "seconds" in row][1:]
    for row in rows:
        print("   ", json.dumps(row), flush=True)
    given_up = code is None and not seconds and bool(rows)
    if given_up:
        seconds = [time.monotonic() - rows[-1]["clock"]]
    return {"seconds": seconds, "given_up": given_up, "peak": peak, "code": code, "error": error[-2000:]}


def _run(command: list[str], join: Callable[[], None], patience: float) -> tuple[int | None, str, str]:
    """How a process ended and what it said; no code if it took too long."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        environment = tidy_environment(os.environ)
        process = subprocess.Popen(command, stdout=out, stderr=error, env=environment, preexec_fn=join)
        try:
            code: int | None = process.wait(patience)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            process.kill()
            process.wait()
        out.seek(0)
        error.seek(0)
        return code, out.read(), error.read()


@contextlib.contextmanager
def _swap_file(folder: Path) -> Iterator[None]:
    file = folder / f"swap-{os.getpid()}"
    try:
        subprocess.run(["fallocate", "-l", str(SWAP_BYTES), str(file)], check=True)
        file.chmod(0o600)
        subprocess.run(["mkswap", str(file)], check=True, capture_output=True)
        subprocess.run(["swapon", str(file)], check=True)
        yield
    finally:
        subprocess.run(["swapoff", str(file)], check=False)
        file.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    memory_contenders.add_options(parser)
    parser.add_argument("--limits", nargs="+", default=["3GiB"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--contenders", nargs="+", default=["plain", "ours"])
    parser.add_argument("--disk-limit", default="")
    parser.add_argument("--patience", type=float, default=3600, help="seconds after which a contender is given up")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # the swap file must not stay behind
    table: dict[str, list[dict[str, Any]]] = {}
    for _ in range(arguments.rounds):
        for name in arguments.contenders:
            limits = [None] if name in ("plain", "checkpointed") else [parse_bytes(text) for text in arguments.limits]
            for limit in limits:
                result = contend("plain" if name == "killed" else name, limit, name == "swap", arguments)
                label = name if limit is None else f"{name} {format_bytes(limit)}"
                table.setdefault(label, []).append(result)
                print(label, result["seconds"], format_bytes(result["peak"]), result["code"], flush=True)
                if result["code"]:
                    print(result["error"], file=sys.stderr)
    _print_table(table, arguments)


def _print_table(table: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> None:
    tokens = arguments.batch * arguments.length
    medians = {}
    for label, results in table.items():
        seconds = [second for result in results for second in result["seconds"]]
        medians[label] = statistics.median(seconds) if seconds else None
    base = medians.get("plain") or medians.get("checkpointed")
    print(f"\n{arguments.model}, {arguments.batch} x {arguments.length} tokens, {arguments.threads} threads")
    print(f"{'':24} {'s/step':>8} {'tokens/s':>9} {'of plain':>9} {'peak':>10}  ended")
    for label, results in table.items():
        median = medians[label]
        peak = format_bytes(max(result["peak"] for result in results))
        if median is None:
            print(f"{label:24} {'-':>8} {'-':>9} {'-':>9} {peak:>10}  {_ended(results)}")
        else:
            share = f"{base / median:.2f}" if base else "-"
            print(f"{label:24} {median:8.1f} {tokens / median:9.1f} {share:>9} {peak:>10}  {_ended(results)}")


def _ended(results: list[dict[str, Any]]) -> str:
    if any(result["given_up"] for result in results):
        return "given up: a step takes longer than that"
    codes = [result["code"] for result in results]
    return "well" if not any(codes) else f"code {next(code for code in codes if code)}"


if __name__ == "__main__":
    main()
