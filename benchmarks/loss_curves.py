"""2BW beside Flush: the losses of a small GPT on Python's own sources, as a table and as a picture.

Two processes of one thread each train the same model on the same minibatches from the same initial weights: by Flush,
by 2BW, and by 2BW with its delay mitigated, by steps of Flush at the beginning, by error feedback, and by both. Losses
are those of the step they belong to. At the end all are evaluated on held-out text. A delayed gradient bears less, so
that several learning rates are shown.

    python benchmarks/loss_curves.py --steps 300 --learning-rates 1e-3 3e-3 --folder docs/pictures
"""

import argparse
import csv
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from crew import Row, run_devices, tell

DEVICES = 2
SMOOTHED_STEPS = 15
HELD_OUT_SAMPLES = 64
RUN_SECONDS = 1200.0
WIDTH, PANEL, HEAD, LEFT, RIGHT, TOP, BOTTOM = 860, 270, 34, 44, 24, 24, 26
STYLE = """\
svg { --ground: #ffffff; --ink: #1c2733; --faint: #6b7885; --grid: #e4e9ee; --flush: #2f7fd6; --two: #d8593f;
  --begun: #b8860b; --fed: #8a5fc7; --both: #2c9c6a;
  background: var(--ground); font-family: system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) { svg { --ground: #12181f; --ink: #e3e9ef; --faint: #8f9ba7; --grid: #29323c;
  --flush: #5b9ae0; --two: #f0705f; --begun: #d8ab45; --fed: #b08ee8; --both: #4fc38d; } }
text { fill: var(--ink); font-size: 11px; } .title { font-size: 16px; font-weight: 600; }
.faint { fill: var(--faint); } .end { text-anchor: end; } .middle { text-anchor: middle; }
.grid { stroke: var(--grid); }
path { fill: none; stroke-linejoin: round; } .flush { stroke: var(--flush); } .two { stroke: var(--two); }
.begun { stroke: var(--begun); } .fed { stroke: var(--fed); } .both { stroke: var(--both); }
.each { stroke-width: 1; opacity: .3; } .smooth { stroke-width: 2; }
"""


@dataclass(frozen=True)
class Curve:
    """One way to train; `name` is also its class in the picture. Of the first two every loss is shown."""

    name: str
    about: str
    schedule: str = "2bw"
    begins_by_flush: bool = False
    feeds_back: bool = False


CURVES = {
    curve.name: curve
    for curve in (
        Curve("flush", "Flush", schedule="flush"),
        Curve("two", "2BW"),
        Curve("begun", "2BW, first {flush_steps} steps by Flush", begins_by_flush=True),
        Curve("fed", "2BW, error feedback {error_feedback:g}", feeds_back=True),
        Curve("both", "2BW, both", begins_by_flush=True, feeds_back=True),
    )
}
DETAILED = ("flush", "two")


# ---- one process


def worker(arguments: argparse.Namespace) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from counterpoint import ErrorFeedback, Trainer
    from counterpoint.job.config import Config
    from counterpoint.job.data import open_data

    torch.set_num_threads(1)
    curve = CURVES[arguments.worker]
    first = arguments.flush_steps if curve.begins_by_flush else 0
    config = GPT2Config(
        n_layer=arguments.blocks, n_embd=arguments.width, n_head=4, vocab_size=256, n_positions=arguments.length,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(arguments.seed)
    model = GPT2LMHeadModel(config).train()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rates[0])
    if curve.feeds_back:
        optimizer = ErrorFeedback(optimizer, arguments.error_feedback)
    rises = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    with tempfile.TemporaryDirectory() as cache:
        asked = Config(minibatch=arguments.batch, sequence_length=arguments.length, seed=arguments.seed)
        data = open_data(asked, 256, None, Path(cache))
        example = data.training.batch(0, arguments.batch)
        with Trainer(
            model, optimizer, example=example, memory="4GiB", schedule=curve.schedule, max_grad_norm=1.0,
            microbatch=arguments.batch // arguments.m, activations="keep", devices=DEVICES, flush_steps=first,
        ) as trainer:  # fmt: skip
            told = list(_told(trainer, data.training, rises, arguments))
            held_out = trainer.evaluate(data.held_out.batch(0, HELD_OUT_SAMPLES))
        data.close()
    prompt = arguments.steps if curve.schedule == "flush" else first
    losses = told[:prompt] + told[prompt + 1 :]
    tell({"losses": losses, "held_out": held_out, "parameters": sum(p.numel() for p in model.parameters())})


def _told(trainer: Any, samples: Any, rises: Any, arguments: argparse.Namespace) -> Iterator[float]:
    """What each step returns, and what settling does: by 2bw a step's loss is told one call later."""
    for step in range(arguments.steps):
        yield trainer.step(samples.batch(step * arguments.batch, arguments.batch))
        rises.step()
    yield trainer.settle()


# ---- all


def train(curve: str, rate: float, arguments: argparse.Namespace) -> Row:
    command = ["--worker", curve, "-m", str(arguments.m), "--learning-rates", str(rate)]
    for option in ("steps", "blocks", "width", "length", "batch", "seed", "flush_steps", "error_feedback"):
        command += [f"--{option.replace('_', '-')}", str(getattr(arguments, option))]
    rows = [found[-1] for found in run_devices(__file__, command, DEVICES, RUN_SECONDS)]
    assert all(row == rows[0] for row in rows), "the devices tell different losses"
    return rows[0] | {"about": CURVES[curve].about.format(**vars(arguments))}


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
    for number, (name, row) in enumerate(curves.items()):
        yield from _curve(name, row, top + 12 + 18 * number, lambda i, loss: f"{x(i):.1f} {y(loss):.1f}")


def _curve(name: str, row: Row, height: int, place: Any) -> Iterator[str]:
    """Every loss faintly where asked for, their running mean, and a line of the legend."""
    kinds = [("each", row["losses"])] if name in DETAILED else []
    for kind, losses in (*kinds, ("smooth", smoothed(row["losses"]))):
        points = " L".join(place(i, loss) for i, loss in enumerate(losses))
        yield f'<path class="{name} {kind}" d="M{points}"/>'
    left = WIDTH - RIGHT - 370
    text = f"{escape(row['about'])}: last {SMOOTHED_STEPS} steps {smoothed(row['losses'])[-1]:.3f}, "
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
    parser.add_argument("--flush-steps", type=int, default=50, help="first steps by Flush, where there are some")
    parser.add_argument("--error-feedback", type=float, default=1.0, help="its strength, where there is some")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default=".", help="where loss_curves.csv and loss_curves.svg go")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return 0
    panels = {rate: {name: train(name, rate, arguments) for name in CURVES} for rate in arguments.learning_rates}
    folder = Path(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write_table(folder / "loss_curves.csv", panels)
    parameters = next(iter(panels.values()))["flush"]["parameters"]
    size = f"{arguments.blocks} blocks x {arguments.width}, {parameters:,} parameters"
    title = f"2BW beside Flush: GPT of {size}, {arguments.batch} x {arguments.length} bytes, AdamW"
    (folder / "loss_curves.svg").write_text(picture(panels, title))
    for rate, curves in panels.items():
        for row in curves.values():
            print(f"{rate:g} {row['about']:34} first {row['losses'][0]:.4f}, last {SMOOTHED_STEPS} steps ", end="")
            print(f"{smoothed(row['losses'])[-1]:.4f}, held out {row['held_out']:.4f}")
    return 0


def _write_table(path: Path, panels: dict[float, dict[str, Row]]) -> None:
    columns = {f"{row['about']} {rate:g}": row["losses"] for rate, curves in panels.items() for row in curves.values()}
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["step", *columns])
        for step, losses in enumerate(zip(*columns.values(), strict=True)):
            table.writerow([step, *(f"{loss:.6f}" for loss in losses)])


if __name__ == "__main__":
    sys.exit(main())
