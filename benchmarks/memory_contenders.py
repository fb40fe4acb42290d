"""The contenders of `memory_limit.py`, each in a process of its own: a line of JSON per step.

Run by hand it is not held to a limit:

    python benchmarks/memory_contenders.py plain --model gpt2 --batch 8 --length 256 --steps 2
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

SHAPES = {
    "gpt2-tiny": (4, 256, 4),
    "gpt2": (12, 768, 12),
    "gpt2-medium": (24, 1024, 16),
    "gpt2-large": (36, 1280, 20),
    "gpt2-xl": (48, 1600, 25),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=SHAPES, default="gpt2")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2, help="timed steps, after one that is not")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", default=tempfile.gettempdir())


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("worker", choices=("plain", "checkpointed", "ours", "swap", "mapped"))
    parser.add_argument("--memory", type=int, default=0, help="of ours, in bytes")
    add_options(parser)
    arguments = parser.parse_args()
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


if __name__ == "__main__":
    main()
