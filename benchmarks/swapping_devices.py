"""Training on several processes whose memory holds a part of it: Harmony against virtual memory, on one disk.

The devices together may use `--share` of what weights, gradients and optimizer state take; everybody has the same
minibatch and `-m` microbatches per device or pipeline. Contenders:

    harmony-pp, harmony-dp   planned residency       pp-lru, dp-lru   1F1B and a plain loop of replicas, paged by lru

`--limits` holds the disk to so many bytes per second in each direction for all processes together (blkio cgroup v1,
needs root); `none` leaves it as it is. Bytes are set beside the formulas for a working set much larger than memory:
paging that drops clean pages moves weights 2m+2 times and gradients 2m times, Harmony weights 3 times and gradients
never, all move the state twice; with replicas times N.

    python benchmarks/swapping_devices.py --limits none 200MB --rounds 1 --steps 2
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

from crew import Row, run_devices, seconds_of, take_turns, tell
from memory_contenders import SHAPES
from slow_disk import slow_disk

from counterpoint.core.units import format_bytes

OPTIONS: dict[str, dict[str, Any]] = {
    "harmony-pp": {"schedule": "harmony_pp"},
    "harmony-dp": {"schedule": "harmony"},
    "pp-lru": {"schedule": "flush", "residency": "lru"},
    "dp-lru": {"schedule": "plain", "residency": "lru"},
}
KINDS = {"weight": "weights", "grad": "grads", "state": "state"}
TURN_SECONDS = 3600.0
MEMORY = "6GiB"  # to begin with; what programs may use is given by hand, whatever Python itself needs


def build(arguments: argparse.Namespace) -> Any:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, heads = SHAPES[arguments.model]
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        vocab_size=arguments.vocabulary, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.device("meta"):
        return GPT2LMHeadModel(config).train()


def batch_of(arguments: argparse.Namespace, seed: int) -> Any:
    import torch

    size = (arguments.batch, arguments.length)
    tokens = torch.randint(0, arguments.vocabulary, size, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


# ---- one process


def worker(arguments: argparse.Namespace) -> None:
    import torch

    from counterpoint import Trainer
    from counterpoint.runtime.memory_process import peak_resident_bytes, reset_peak_resident

    torch.set_num_threads(1)
    batches = [batch_of(arguments, seed) for seed in range(arguments.steps + 1)]
    model = build(arguments)
    weight_bytes = sum(p.nbytes for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    options = dict(OPTIONS[arguments.worker])
    options["microbatch"] = arguments.batch // (arguments.m * _replicas(arguments.worker, arguments.devices))
    if "residency" in options:
        options |= {"pack": 1, "activations": "recompute"}
    budget = int(4 * weight_bytes * arguments.share / arguments.devices)
    _hold_to(budget)
    with Trainer(model, optimizer, example=batches[0], memory=MEMORY, disk=arguments.folder, **options) as trainer:
        print(trainer.describe(), file=sys.stderr, flush=True)
        row: Row = {"seconds": [], "moved": [], "weight_bytes": weight_bytes, "losses": []}
        for batch in batches:
            reset_peak_resident()
            begin = time.monotonic()
            row["losses"].append(trainer.step(batch))
            row["seconds"].append(time.monotonic() - begin)
            facts = trainer.statistics()
            row["moved"].append(facts.read_bytes + facts.written_bytes)
            row["resident"] = peak_resident_bytes() - trainer.base_bytes
        trainer.settle()
        row |= {"budget": budget, "program": _program_bytes(trainer), "plan": str(trainer.plan)}
        row["forecast"] = trainer.forecast.step_ns / 1e9
    tell(row)


def _hold_to(budget: int) -> None:
    """Programs may use `budget`, and the whole process what it takes without them besides."""
    from counterpoint.trainer import decision, engine

    base: list[int] = []

    def usable_bytes(memory_bytes: int, base_bytes: int) -> int:
        base.append(base_bytes)
        return budget

    def of(memory_bytes: int, *rest: Any) -> Any:
        return whole.of(decision.memory_with(budget, base[-1]), *rest)

    whole = engine.ProcessMemory
    engine.usable_bytes, engine.ProcessMemory = usable_bytes, SimpleNamespace(of=of)  # type: ignore[assignment,misc]


def _replicas(name: str, devices: int) -> int:
    return devices if name.endswith(("-dp", "dp-lru")) else 1


def _program_bytes(trainer: Any) -> dict[str, int]:
    """What a step of the program moves on all devices, by kind."""
    from counterpoint.core.task import Evict, Load

    found: Counter[str] = Counter()
    for part in trainer.program.devices:
        for task in part.body:
            if isinstance(task, (Load, Evict)):
                found[KINDS.get(task.buffer.kind, "activations")] += trainer.executor.costs.buffer_bytes(task.buffer)
    return dict(found)


# ---- all of them


def turn(name: str, limit: str, arguments: argparse.Namespace) -> Row:
    command = ["--worker", name, "--model", arguments.model, "--vocabulary", str(arguments.vocabulary)]
    for option in ("batch", "length", "devices", "steps", "share"):
        command += [f"--{option}", str(getattr(arguments, option))]
    bandwidth = "" if limit == "none" else limit
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, slow_disk(bandwidth, folder) as groups:
        command += ["-m", str(arguments.m), "--folder", folder]
        rows = [found[-1] for found in run_devices(__file__, command, arguments.devices, TURN_SECONDS, groups)]
    return rows[0] | {
        "seconds": [max(step) for step in zip(*(row["seconds"] for row in rows), strict=True)][1:],
        "moved": statistics.median([sum(step) for step in zip(*(row["moved"] for row in rows), strict=True)][1:]),
        "resident": max(row["resident"] for row in rows),
    }


def formula(name: str, m: int, devices: int) -> dict[str, int]:
    """Weights and gradients in multiples of the weights, state in multiples of the state."""
    weights, grads = (2 * m + 2, 2 * m) if name.endswith("lru") else (3, 0)
    factor = _replicas(name, devices)
    return {"weights": weights * factor, "grads": grads * factor, "state": 2 * factor}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="gpt2")
    parser.add_argument("--vocabulary", type=int, default=8192, help="the head alone must fit into a device's share")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("-m", type=int, default=8, help="microbatches per device or pipeline")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step")
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--steps", type=int, default=2, help="timed steps, after one that is not")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--limits", nargs="+", default=["none", "200MB"])
    parser.add_argument("--contenders", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk that is measured")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return 0
    table, failed = take_turns(
        arguments.rounds,
        arguments.limits,
        arguments.contenders,
        lambda name, limit: turn(name, limit, arguments),
        seconds_of,
    )
    for limit in arguments.limits:
        _print_table(limit, {name: rows for (at, name), rows in table.items() if at == limit}, arguments)
    return 1 if failed else 0


def _print_table(limit: str, table: dict[str, list[Row]], arguments: argparse.Namespace) -> None:
    if not table:
        return
    first = next(iter(table.values()))[0]
    weights = first["weight_bytes"]
    disk = "the disk as it is" if limit == "none" else f"the disk held to {limit}/s"
    print(
        f"\n{arguments.model}, {format_bytes(weights)} of weights, {arguments.batch} x {arguments.length} tokens,",
        end="",
    )
    print(f" m = {arguments.m}, {arguments.devices} devices of {format_bytes(first['budget'])}, {disk}")
    medians = {name: statistics.median([s for row in rows for s in row["seconds"]]) for name, rows in table.items()}
    print(f"{'':12}{'s/step':>8}{'forecast':>9}{'resident':>10}{'swapped':>12}{'program':>12}", end="")
    print(f"{'weights/|W|':>17}{'grads/|W|':>16}{'state/|K|':>16}{'pp-lru':>8}{'dp-lru':>8}")
    for name, rows in table.items():
        row = rows[0]
        moved = format_bytes(int(statistics.median(r["moved"] for r in rows)))
        program = format_bytes(sum(row["program"].values()))
        ratios = [medians[base] / medians[name] if base in medians else None for base in ("pp-lru", "dp-lru")]
        shares = "".join(_beside(kind, row, name, arguments) for kind in KINDS.values())
        resident = format_bytes(max(r["resident"] for r in rows))
        times = f"{medians[name]:8.2f}{row['forecast']:9.2f}{resident:>10}"
        print(f"{name:12}{times}{moved:>12}{program:>12}{shares}" + "".join(_times(ratio) for ratio in ratios))


def _beside(kind: str, row: Row, name: str, arguments: argparse.Namespace) -> str:
    """What the program moves in multiples of the whole, and the formula."""
    whole = row["weight_bytes"] * (2 if kind == "state" else 1)
    text = f"{row['program'].get(kind, 0) / whole:.2f} ({formula(name, arguments.m, arguments.devices)[kind]})"
    return f"{text:>{17 if kind == 'weights' else 16}}"


def _times(ratio: float | None) -> str:
    return f"{'-':>8}" if ratio is None else f"{f'{ratio:.1f}x':>8}"


if __name__ == "__main__":
    sys.exit(main())
