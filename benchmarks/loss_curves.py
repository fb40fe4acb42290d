"""2BW beside Flush: the losses of a small GPT on Python's own sources, as a table and as a picture.

Two processes of one thread each train the same model on the same minibatches from the same initial weights, once by
each schedule; losses are those of the step they belong to. At the end both are evaluated on held-out text. A delayed
gradient bears less, so that several learning rates are shown.

    python benchmarks/loss_curves.py --steps 300 --learning-rates 1e-3 3e-3 --folder docs/pictures
"""

import argparse
import csv
import sys
import tempfile
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from crew import Row, run_devices, tell

DEVICES = 2
SCHEDULES = {"flush": "Flush", "2bw": "2BW"}
SMOOTHED_STEPS = 15
HELD_OUT_SAMPLES = 64
RUN_SECONDS = 1200.0
WIDTH, PANEL, HEAD, LEFT, RIGHT, TOP, BOTTOM = 860, 270, 34, 44, 24, 24, 26
STYLE = """\
svg { --ground: #ffffff; --ink: #1c2733; --faint: #6b7885; --grid: #e4e9ee; --flush: #2f7fd6; --two: #d8593f;
  background: var(--ground); font-family: system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) { svg { --ground: #12181f; --ink: #e3e9ef; --faint: #8f9ba7; --grid: #29323c;
  --flush: #5b9ae0; --two: #f0705f; } }
text { fill: var(--ink); font-size: 11px; } .title { font-size: 16px; font-weight: 600; }
.faint { fill: var(--faint); } .end { text-anchor: end; } .middle { text-anchor: middle; }
.grid { stroke: var(--grid); }
path { fill: none; stroke-linejoin: round; } .flush { stroke: var(--flush); } .two { stroke: var(--two); }
.each { stroke-width: 1; opacity: .3; } .smooth { stroke-width: 2; }
"""
CLASSES = {"flush": "flush", "2bw": "two"}


# ---- one process


def worker(arguments: argparse.Namespace) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from counterpoint import Trainer
    from counterpoint.job.config import Config
    from counterpoint.job.data import open_data

    torch.set_num_threads(1)
    config = GPT2Config(
        n_layer=arguments.blocks, n_embd=arguments.width, n_head=4, vocab_size=256, n_positions=arguments.length,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(arguments.seed)
    model = GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rates[0])
    rises = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    with tempfile.TemporaryDirectory() as cache:
        asked = Config(minibatch=arguments.batch, sequence_length=arguments.length, seed=arguments.seed)
        data = open_data(asked, 256, None, Path(cache))
        example = data.training.batch(0, arguments.batch)
        with Trainer(
            model, optimizer, example=example, memory="4GiB", schedule=arguments.worker, max_grad_norm=1.0,
            microbatch=arguments.batch // arguments.m, activations="keep", devices=DEVICES,
        ) as trainer:  # fmt: skip
            told = list(_told(trainer, data.training, rises, arguments))
            held_out = trainer.evaluate(data.held_out.batch(0, HELD_OUT_SAMPLES))
        data.close()
    losses = told[1:] if arguments.worker == "2bw" else told[:-1]
    tell({"losses": losses, "held_out": held_out, "parameters": sum(p.numel() for p in model.parameters())})


def _told(trainer: Any, samples: Any, rises: Any, arguments: argparse.Namespace) -> Iterator[float]:
    """What each step returns, and what settling does: 2bw tells a step's loss one call later."""
    for step in range(arguments.steps):
        yield trainer.step(samples.batch(step * arguments.batch, arguments.batch))
        rises.step()
    yield trainer.settle()


# ---- both


def train(schedule: str, rate: float, arguments: argparse.Namespace) -> Row:
    command = ["--worker", schedule, "-m", str(arguments.m), "--learning-rates", str(rate)]
    for option in ("steps", "blocks", "width", "length", "batch", "seed"):
        command += [f"--{option}", str(getattr(arguments, option))]
    rows = [found[-1] for found in run_devices(__file__, command, DEVICES, RUN_SECONDS)]
    assert all(row == rows[0] for row in rows), "the devices tell different losses"
    return rows[0]


def smoothed(losses: Sequence[float]) -> list[float]:
    """The mean of the last steps up to each."""
    parts = [losses[max(0, i + 1 - SMOOTHED_STEPS) : i + 1] for i in range(len(losses))]
    return [sum(part) / len(part) for part in parts]


def picture(panels: dict[float, dict[str, Row]], title: str) -> str:
    """A panel for each learning rate, one below the other."""
    height = HEAD + PANEL * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img"><title>{escape(title)}</title>',
        f"<style>{STYLE}</style>",
        f'<text class="title" x="12" y="24">{escape(title)}</text>',
    ]
    for number, (rate, curves) in enumerate(panels.items()):
        parts += _panel(rate, curves, HEAD + PANEL * number)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(rate: float, curves: dict[str, Row], begin: int) -> Iterator[str]:
    every = [loss for row in curves.values() for loss in row["losses"]]
    low, high, count = min(every), max(every), max(len(row["losses"]) for row in curves.values())
    top, bottom = begin + TOP, begin + PANEL - BOTTOM

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * step / max(count - 1, 1)

    def y(loss: float) -> float:
        return top + (bottom - top) * (high - loss) / max(high - low, 1e-9)

    for loss in _round_numbers(low, high, 6):
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(loss):.1f}" y2="{y(loss):.1f}"/>'
        yield f'<text class="faint end" x="{LEFT - 6}" y="{y(loss) + 4:.1f}">{loss:g}</text>'
    for step in _round_numbers(0, count - 1, 8):
        yield f'<text class="faint middle" x="{x(step):.1f}" y="{bottom + 16}">{step:g}</text>'
    yield f'<text x="{LEFT}" y="{top - 8}">loss by step, learning rate {rate:g}</text>'
    for number, (schedule, row) in enumerate(curves.items()):
        yield from _curve(schedule, row, top + 12 + 18 * number, lambda i, loss: f"{x(i):.1f} {y(loss):.1f}")


def _curve(schedule: str, row: Row, height: int, place: Any) -> Iterator[str]:
    """Every loss faintly, their running mean over it, and a line of the legend."""
    name = CLASSES[schedule]
    for kind, losses in (("each", row["losses"]), ("smooth", smoothed(row["losses"]))):
        points = " L".join(place(i, loss) for i, loss in enumerate(losses))
        yield f'<path class="{name} {kind}" d="M{points}"/>'
    left = WIDTH - RIGHT - 250
    text = f"{SCHEDULES[schedule]}: last {SMOOTHED_STEPS} steps {smoothed(row['losses'])[-1]:.3f}, "
    yield f'<path class="{name} smooth" d="M{left} {height - 4} h18"/>'
    yield f'<text x="{left + 24}" y="{height}">{text}held out {row["held_out"]:.3f}</text>'


def _round_numbers(low: float, high: float, most: int) -> list[float]:
    """At most so many multiples of 1, 2 or 5 times a power of ten."""
    steps = [base * 10.0**power for power in range(-6, 7) for base in (1, 2, 5)]
    step = next(step for step in steps if (high - low) / step <= most - 1)
    first = int(low / step) + (low > int(low / step) * step)
    return [number * step for number in range(first, int(high / step) + 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=64, help="bytes of a sample")
    parser.add_argument("--batch", type=int, default=16, help="samples of a step")
    parser.add_argument("-m", type=int, default=4, help="microbatches of a step")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[1e-3, 3e-3])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default=".", help="where loss_curves.csv and loss_curves.svg go")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return 0
    panels = {rate: {name: train(name, rate, arguments) for name in SCHEDULES} for rate in arguments.learning_rates}
    folder = Path(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write_table(folder / "loss_curves.csv", panels)
    parameters = next(iter(panels.values()))["flush"]["parameters"]
    size = f"{arguments.blocks} blocks x {arguments.width}, {parameters:,} parameters"
    title = f"2BW beside Flush: GPT of {size}, {arguments.batch} x {arguments.length} bytes, AdamW"
    (folder / "loss_curves.svg").write_text(picture(panels, title))
    for rate, curves in panels.items():
        for schedule, row in curves.items():
            print(
                f"{rate:g} {SCHEDULES[schedule]:6} first {row['losses'][0]:.4f}, last {SMOOTHED_STEPS} steps ", end=""
            )
            print(f"{smoothed(row['losses'])[-1]:.4f}, held out {row['held_out']:.4f}")
    return 0


def _write_table(path: Path, panels: dict[float, dict[str, Row]]) -> None:
    columns = {f"{name} {rate:g}": row["losses"] for rate, curves in panels.items() for name, row in curves.items()}
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["step", *columns])
        for step, losses in enumerate(zip(*columns.values(), strict=True)):
            table.writerow([step, *(f"{loss:.6f}" for loss in losses)])


if __name__ == "__main__":
    sys.exit(main())
