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
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from crew import joining
from slow_disk import slow_disk

from counterpoint.core.units import format_bytes, parse_bytes

MEMORY = Path("/sys/fs/cgroup/memory")
SWAP_BYTES = 16 << 30
SHAPES = {
    "gpt2-tiny": (4, 256, 4),
    "gpt2": (12, 768, 12),
    "gpt2-medium": (24, 1024, 16),
    "gpt2-large": (36, 1280, 20),
    "gpt2-xl": (48, 1600, 25),
}


def build(name: str, meta: bool):  # type: ignore[no-untyped-def]
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, heads = SHAPES[name]
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        model = GPT2LMHeadModel(config)
    return model.train()


def batch_of(size: int, length: int, seed: int):  # type: ignore[no-untyped-def]
    import torch

    tokens = torch.randint(0, 50257, (size, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


def worker(arguments: argparse.Namespace) -> None:
    """One contender: prints a line of JSON per step."""
    if arguments.worker != "ours":
        os.environ.pop("THP_MEM_ALLOC_ENABLE", None)  # plain PyTorch as it comes
    import torch

    torch.set_num_threads(arguments.threads)
    batches = [batch_of(arguments.batch, arguments.length, seed) for seed in range(arguments.steps + 1)]
    run = {"ours": _ours, "mapped": _paged, "swap": _paged}.get(arguments.worker, _plain)
    before = os.times()
    for row in run(arguments, batches):
        after = os.times()
        row |= {"user": after.user - before.user, "system": after.system - before.system, "clock": time.monotonic()}
        print(json.dumps({key: round(value, 3) for key, value in row.items()}), flush=True)
        before = after


def _plain(arguments, batches):  # type: ignore[no-untyped-def]
    import torch

    model = build(arguments.model, meta=False)
    if arguments.worker == "checkpointed":
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    yield {}
    for batch in batches:
        begin = time.monotonic()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield {"seconds": time.monotonic() - begin, "loss": float(loss)}


def _paged(arguments, batches):  # type: ignore[no-untyped-def]
    """Gradients accumulated over single sequences; `mapped`: all that lasts lies in files."""
    import torch

    model = build(arguments.model, meta=arguments.worker == "mapped")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    folder = Path(arguments.folder) / f"mapped-{os.getpid()}"
    if arguments.worker == "mapped":
        folder.mkdir()
        model = _mapped(model, folder)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        _map_state(model, optimizer, folder)
    model.gradient_checkpointing_enable()
    model.train()
    try:
        yield {}
        for batch in batches:
            begin, losses = time.monotonic(), []
            for row in range(arguments.batch):
                loss = model(**{name: tensor[row : row + 1] for name, tensor in batch.items()}).loss
                (loss / arguments.batch).backward()
                losses.append(float(loss))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            yield {"seconds": time.monotonic() - begin, "loss": sum(losses) / len(losses)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _in_file(folder: Path, name: str, shape):  # type: ignore[no-untyped-def]
    import torch

    return torch.from_file(str(folder / name), shared=True, size=max(shape.numel(), 1)).view(shape)


def _mapped(model, folder):  # type: ignore[no-untyped-def]
    """A model on the meta device gets weights and gradients in files."""
    import torch

    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for number, parameter in enumerate(model.parameters()):
        parameter.data = _in_file(folder, f"weight-{number}", parameter.shape)
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.02, generator=generator)
        parameter.grad = _in_file(folder, f"grad-{number}", parameter.shape)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.weight.data.fill_(1.0)
    return model


def _map_state(model, optimizer, folder):  # type: ignore[no-untyped-def]
    import torch

    for number, parameter in enumerate(model.parameters()):
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": _in_file(folder, f"average-{number}", parameter.shape),
            "exp_avg_sq": _in_file(folder, f"square-{number}", parameter.shape),
        }


def _ours(arguments, batches):  # type: ignore[no-untyped-def]
    import torch

    from counterpoint import Trainer

    model = build(arguments.model, meta=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    folder = Path(arguments.folder) / f"home-{os.getpid()}"
    begin = time.monotonic()
    with Trainer(model, optimizer, example=batches[0], memory=arguments.memory, disk=folder) as trainer:
        print(trainer.describe(), file=sys.stderr, flush=True)
        yield {
            "setup": time.monotonic() - begin,
            "forecast_seconds": trainer.forecast.step_ns / 1e9,
            "forecast_peak": trainer.peak_bytes,
        }
        for batch in batches:
            begin = time.monotonic()
            loss = trainer.step(batch)
            facts = trainer.statistics()
            yield {
                "seconds": time.monotonic() - begin,
                "loss": loss,
                "read": facts.read_bytes,
                "written": facts.written_bytes,
                "waited": sum(ns for _, ns in facts.waited_ns) / 1e9,
                "resident_peak": facts.peak_bytes,
            }
    shutil.rmtree(folder, ignore_errors=True)


def contend(name: str, limit: int | None, swap: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one contender in its cgroup; what it printed, and how it ended."""
    group = MEMORY / f"counterpoint-{os.getpid()}"
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(str(limit or -1))
    if not swap:
        (group / "memory.swappiness").write_text("0")
    command = [sys.executable, __file__, "--worker", name, "--model", arguments.model, "--batch", str(arguments.batch)]
    command += ["--length", str(arguments.length), "--steps", str(arguments.steps), "--folder", arguments.folder]
    command += ["--threads", str(arguments.threads), "--memory", str(limit or 0)]
    swapping = _swap_file(Path(arguments.folder)) if swap else contextlib.nullcontext()
    with swapping, slow_disk(arguments.disk_limit if limit else "", arguments.folder) as groups:
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
        process = subprocess.Popen(command, stdout=out, stderr=error, preexec_fn=join)
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
    parser.add_argument("--model", choices=SHAPES, default="gpt2")
    parser.add_argument("--limits", nargs="+", default=["3GiB"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2, help="timed steps, after one that is not")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--contenders", nargs="+", default=["plain", "ours"])
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--disk-limit", default="")
    parser.add_argument("--patience", type=float, default=3600, help="seconds after which a contender is given up")
    parser.add_argument("--memory", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
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
        return "given up in its first step: takes longer than that"
    codes = [result["code"] for result in results]
    return "well" if not any(codes) else f"code {next(code for code in codes if code)}"


if __name__ == "__main__":
    main()
