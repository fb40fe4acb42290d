"""Two servers, played by two network namespaces with a thin link between them: it trains, and it ends when cut off.

Each server runs torchrun with two processes. A small GPT is trained by two replicas of two stages; the replicas of a
stage are on one server, so that activations and the gradient of the tied embedding cross the link, and no other sums.
Losses are held against a loop in one process: the plain one for flush, the one with gradients a step late for 2bw. Then
the link is cut in the middle of a run, and every process must stop within seconds with an error that says what it was
waiting for. Needs root.

    python benchmarks/two_servers.py --megabits 200
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from namespaces import ADDRESSES, LINK, Servers, two_servers

SERVERS, PER_SERVER = 2, 2
DEVICES = SERVERS * PER_SERVER
PORT = "29577"
BATCH, MICROBATCH, LENGTH, VOCABULARY, WIDTH = 8, 1, 16, 64, 32
TOLERANCE = 1e-4
CUT_AFTER_STEPS, ENDLESS_STEPS = 3, 100_000
RUN_SECONDS, END_SECONDS = 180.0, 60.0


# ---- what is trained


def build() -> Any:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=4, n_embd=WIDTH, n_head=2, vocab_size=VOCABULARY, n_positions=LENGTH, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).train()


def batch_of(step: int) -> Any:
    import torch

    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step % 2))
    return {"input_ids": tokens, "labels": tokens}


def optimizer_of(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def reference(schedule: str, steps: int) -> list[float]:
    """Losses of a loop over microbatches in this process; 2bw computes with the weights before the last update."""
    import torch

    torch.set_num_threads(1)
    newest, used = build(), build() if schedule == "2bw" else None
    optimizer = optimizer_of(newest)
    losses = []
    for step in range(steps):
        model = used or newest
        losses.append(_accumulated(model, batch_of(step)))
        if used is not None:
            with torch.no_grad():
                for late, new in zip(used.parameters(), newest.parameters(), strict=True):
                    new.grad, late.grad = late.grad, None
                    late.copy_(new)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _accumulated(model: Any, batch: Any) -> float:
    count = BATCH // MICROBATCH
    losses = []
    for k in range(count):
        part = {name: tensor[k * MICROBATCH : (k + 1) * MICROBATCH] for name, tensor in batch.items()}
        loss = model(**part).loss
        (loss / count).backward()
        losses.append(float(loss.detach()))
    return sum(losses) / count


# ---- one process


def worker(arguments: argparse.Namespace) -> None:
    """Leaves what it has seen in a file of its own, anew after every step."""
    import torch

    from counterpoint import CounterpointError, Trainer

    torch.set_num_threads(1)
    target = Path(arguments.folder) / f"device-{os.environ['RANK']}.json"
    disk = Path(arguments.folder) / f"server-{os.environ['GROUP_RANK']}"
    row: dict[str, Any] = {"losses": [], "error": ""}
    model = build()
    try:
        with Trainer(
            model, optimizer_of(model), example=batch_of(0), memory="4GiB", disk=disk, schedule=arguments.schedule,
            microbatch=MICROBATCH, replicas=PER_SERVER, devices=DEVICES, network=arguments.megabits * 125_000,
        ) as trainer:  # fmt: skip
            row["layers"] = [i for i, devices in enumerate(_writers(trainer)) if trainer.device in devices]
            for step in range(arguments.steps):
                row["losses"].append(trainer.step(batch_of(step)))
                _leave(target, row)
            row["losses"].append(trainer.settle())
    except CounterpointError as error:
        row["error"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        row["ended"] = time.time()
        _leave(target, row)


def _writers(trainer: Any) -> Any:
    from counterpoint.core.duties import duties_of

    return duties_of(trainer.program).writers


def _leave(target: Path, row: dict[str, Any]) -> None:
    unfinished = target.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(row))
    unfinished.rename(target)


# ---- the servers


@contextmanager
def launched(servers: Servers, schedule: str, steps: int, folder: Path) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """One torchrun in each namespace; they are ended with their children."""
    with ExitStack() as stack:
        agents: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, agents)
        for number, name in enumerate(servers.names):
            command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
            command += ["--nproc-per-node", str(PER_SERVER), "--node-rank", str(number), "--master-addr", ADDRESSES[0]]
            command += ["--master-port", PORT, __file__, "--worker", "--schedule", schedule, "--steps", str(steps)]
            command += ["--folder", str(folder), "--megabits", str(servers.megabits)]
            said = stack.enter_context((folder / f"server-{number}.log").open("wb"))
            environment = os.environ | {"GLOO_SOCKET_IFNAME": LINK, "OMP_NUM_THREADS": "1"}
            agents.append(subprocess.Popen(command, env=environment, stdout=said, stderr=said, start_new_session=True))
        yield agents


def _end(agents: Sequence["subprocess.Popen[bytes]"]) -> None:
    for agent in agents:
        if agent.poll() is None:
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()


def _ended(agents: Sequence["subprocess.Popen[bytes]"], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(agent.poll() is None for agent in agents):
        time.sleep(0.1)
    return all(agent.poll() is not None for agent in agents)


def _row(folder: Path, device: int) -> dict[str, Any]:
    path = folder / f"device-{device}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {"losses": [], "error": ""}


# ---- what is shown


def show_training(servers: Servers, schedule: str, steps: int, folder: Path) -> bool:
    """Train and compare; whether it was as it should be."""
    with launched(servers, schedule, steps, folder) as agents:
        well = _ended(agents, RUN_SECONDS) and not any(agent.returncode for agent in agents)
    if not well:
        print(f"{schedule}: failed", *(_tail(folder, number) for number in range(SERVERS)), sep="\n")
        return False
    rows = [_row(folder, device) for device in range(DEVICES)]
    found = [[loss for loss in row["losses"] if not math.isnan(loss)] for row in rows]
    losses = found[0][:steps] if schedule != "2bw" else found[0]
    expected = reference(schedule, steps)
    worst = max(abs(a - b) / b for a, b in zip(losses, expected, strict=True))
    same = all(other == found[0] for other in found)
    print(f"{schedule}: {steps} steps, {PER_SERVER} replicas x {SERVERS} stages, link {servers.rate}")
    for device, row in enumerate(rows):
        print(f"  device {device} on server {device // PER_SERVER} updates layers {_runs(row['layers'])}")
    print(f"  losses        {' '.join(f'{loss:.5f}' for loss in losses)}")
    print(f"  one process   {' '.join(f'{loss:.5f}' for loss in expected)}")
    print(f"  apart by at most {worst:.1e}; all devices tell the same: {'yes' if same else 'no'}", flush=True)
    together = all(rows[d]["layers"] == rows[d - d % PER_SERVER]["layers"] for d in range(DEVICES))
    return worst < TOLERANCE and same and together


def show_cut(servers: Servers, schedule: str, folder: Path) -> bool:
    """Cut the link under a run; whether every process ended soon and said why."""
    with launched(servers, schedule, ENDLESS_STEPS, folder) as agents:
        end = time.monotonic() + RUN_SECONDS
        while time.monotonic() < end and not all(_steps(folder, d) >= CUT_AFTER_STEPS for d in range(DEVICES)):
            if any(agent.poll() is not None for agent in agents):
                break
            time.sleep(0.05)
        servers.cut()
        cut = time.time()
        gone = _ended(agents, END_SECONDS)
        after = time.time() - cut
    rows = [_row(folder, device) for device in range(DEVICES)]
    print(f"{schedule}: the link is cut after {min(len(row['losses']) for row in rows)} steps")
    for device, row in enumerate(rows):
        seconds = f"{row['ended'] - cut:5.1f} s later" if "ended" in row else "did not end"
        print(f"  device {device} {seconds}: {row['error'] or 'no error'}")
    state = f"have ended after {after:.1f} s" if gone else f"still run after {END_SECONDS:.0f} s"
    print(f"  both launchers {state}", flush=True)
    return gone and all(row["error"] for row in rows)


def _runs(numbers: Sequence[int]) -> str:
    """Numbers as a person writes them: 0, 5-8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _steps(folder: Path, device: int) -> int:
    return len(_row(folder, device)["losses"])


def _tail(folder: Path, number: int) -> str:
    return f"--- server {number}\n{(folder / f'server-{number}.log').read_text()[-3000:]}"


def _terminate(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabits", type=int, default=200, help="per second, of the link")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--schedules", nargs="+", choices=("flush", "2bw"), default=["flush", "2bw"])
    parser.add_argument("--schedule", default="flush", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return 0
    signal.signal(signal.SIGTERM, _terminate)
    well = True
    for schedule in arguments.schedules:
        for show in ("training", "cut"):
            with tempfile.TemporaryDirectory() as name, two_servers(arguments.megabits) as servers:
                if show == "training":
                    well &= show_training(servers, schedule, arguments.steps, Path(name))
                else:
                    well &= show_cut(servers, schedule, Path(name))
    print("all as it should be" if well else "something is not as it should be")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
