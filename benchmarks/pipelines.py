"""GPT-2 on two processes of one thread each: our pipelines against torch's, and against data parallelism.

Every contender makes whole training steps with AdamW on the same batches, split before the same block, without dropout,
recompute or swapping. Each turn is a fresh pair of processes, turns are interleaved in rounds, medians are reported.
Contenders:

    gpipe, flush, 2bw          ours, by Trainer             torch-gpipe, torch-1f1b  torch.distributed.pipelining
    ddp                        half of the batch each

The head is tied to the embedding, so that pipelines add up its gradients of both stages; with `--untied` none has to.
The first loss shows that all compute the same. `cores` is the processor time of both processes per second.

    python benchmarks/pipelines.py --microbatches 2 4 8 --rounds 3 --steps 4
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from crew import Row, run_devices, seconds_of, take_turns, tell
from memory_contenders import SHAPES, batch_of

OURS = ("gpipe", "flush", "2bw")
CONTENDERS = (*OURS, "torch-gpipe", "torch-1f1b", "ddp")
WARM_STEPS = 3  # a look-ahead returns from the first at once
DEVICES = 2
TURN_SECONDS = 600.0


def build(arguments: argparse.Namespace) -> Any:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, heads = SHAPES[arguments.model]
    config = GPT2Config(
        n_layer=layers, n_embd=width, n_head=heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        tie_word_embeddings=not arguments.untied,
    )  # fmt: skip
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).train()


def split_of(arguments: argparse.Namespace) -> int:
    """The first block of the second stage: the head costs about five blocks, the embedding next to nothing."""
    if arguments.split is not None:
        return int(arguments.split)
    return min(SHAPES[arguments.model][0] - 1, round((SHAPES[arguments.model][0] + 5) / 2 - 0.1))


# ---- one process


def worker(arguments: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(1)
    batches = [batch_of(arguments.batch, arguments.length, seed) for seed in range(arguments.steps + WARM_STEPS)]
    name, (m,) = arguments.worker, arguments.microbatches
    run = _ours if name in OURS else _ddp if name == "ddp" else _torch_pipeline
    for turn in run(arguments, name, m, batches[0]):
        _measure(turn, batches, m)


def _measure(step: Callable[[Any], float | None], batches: list[Any], m: int) -> None:
    """Steps in a row, timed after the first ones, with what the processor did meanwhile."""
    losses = [step(batch) for batch in batches[:WARM_STEPS]]
    begin, begin_cpu = time.monotonic(), time.process_time()
    ends = []
    for batch in batches[WARM_STEPS:]:
        losses.append(step(batch))
        ends.append(time.monotonic())
    cpu = time.process_time() - begin_cpu
    seconds = [b - a for a, b in zip([begin, *ends], ends, strict=False)]
    known = [loss for loss in losses if loss is not None and loss == loss]
    tell({"m": m, "seconds": seconds, "wall": ends[-1] - begin, "cpu": cpu, "loss": known[0] if known else None})


def _ours(arguments: argparse.Namespace, name: str, m: int, example: Any) -> Iterator[Callable[[Any], float | None]]:
    import torch

    from counterpoint import Trainer

    model = build(arguments)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    plan = _plan(arguments, name, m, model, optimizer, example)
    with Trainer(model, optimizer, example=example, memory=arguments.memory, plan=plan) as trainer:
        print(trainer.describe(), file=sys.stderr, flush=True)
        yield trainer.step
        trainer.settle()


def _plan(arguments: argparse.Namespace, name: str, m: int, model: Any, optimizer: Any, example: Any) -> Any:
    """Each stage is one pack that keeps what autograd saves, as torch's stages do."""
    from counterpoint.core.plan import Pack, Plan
    from counterpoint.trainer.parts import parts_of

    layers = parts_of(model, optimizer, example, None, None).chain.layers
    first = next(layer.index for layer in layers if layer.name.startswith(f"transformer.h.{split_of(arguments)}."))
    stages = (Pack(0, first - 1), Pack(first, len(layers) - 1))
    return Plan(name, m, arguments.batch // m, stages, stages, ("keep",) * 2, num_devices=DEVICES, stages=stages)


def _torch_pipeline(
    arguments: argparse.Namespace, name: str, m: int, example: Any
) -> Iterator[Callable[[Any], float | None]]:
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    dist.init_process_group("gloo")
    device = dist.get_rank()
    model = build(arguments)
    stage = _stage(model, device, split_of(arguments))
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-4)
    kind = ScheduleGPipe if name == "torch-gpipe" else Schedule1F1B

    def loss_of(logits: Any, labels: Any) -> Any:
        return model.loss_function(logits=logits, labels=labels, vocab_size=model.config.vocab_size)

    schedule = kind(PipelineStage(stage, device, DEVICES, torch.device("cpu")), m, loss_fn=loss_of)

    def step(batch: Any) -> float | None:
        losses: list[Any] = []
        if device == 0:
            schedule.step(batch["input_ids"], return_outputs=False)
        else:
            schedule.step(target=batch["labels"], losses=losses, return_outputs=False)
        if not arguments.untied:
            dist.all_reduce(stage.shared.grad)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if losses else None

    yield step
    dist.destroy_process_group()


def _stage(model: Any, device: int, split: int) -> Any:
    import torch
    from torch import nn

    body = model.transformer

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe, self.blocks = body.wte, body.wpe, body.h[:split]

        @property
        def shared(self) -> Any:
            return self.wte.weight

        def forward(self, tokens: Any) -> Any:
            hidden = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
            for block in self.blocks:
                hidden = _hidden(block(hidden))
            return hidden

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.norm, self.head = body.h[split:], body.ln_f, model.lm_head

        @property
        def shared(self) -> Any:
            return self.head.weight

        def forward(self, hidden: Any) -> Any:
            for block in self.blocks:
                hidden = _hidden(block(hidden))
            return self.head(self.norm(hidden))

    return Last() if device else First()


def _hidden(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _ddp(arguments: argparse.Namespace, name: str, m: int, example: Any) -> Iterator[Callable[[Any], float | None]]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    device = dist.get_rank()
    model = DistributedDataParallel(build(arguments))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(batch: Any) -> float | None:
        half = {name: tensor.tensor_split(DEVICES)[device] for name, tensor in batch.items()}
        loss = model(**half).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    yield step
    dist.destroy_process_group()


# ---- all of them


def turn(name: str, m: int, arguments: argparse.Namespace) -> Row:
    """One contender once: seconds of the slower process, processor time of both."""
    command = ["--worker", name, "--microbatches", str(m), "--model", arguments.model, "--steps", str(arguments.steps)]
    command += ["--batch", str(arguments.batch), "--length", str(arguments.length), "--memory", arguments.memory]
    command += ["--split", str(split_of(arguments)), *(["--untied"] if arguments.untied else [])]
    rows = [found[-1] for found in run_devices(__file__, command, DEVICES, TURN_SECONDS)]
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    return {
        "seconds": [max(pair) for pair in zip(*(row["seconds"] for row in rows), strict=True)],
        "cores": sum(row["cpu"] for row in rows) / max(row["wall"] for row in rows),
        "loss": sum(losses) / len(losses),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="gpt2")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=4, help=f"timed steps of a turn, after {WARM_STEPS} that are not")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--split", type=int, help="first block of the second stage")
    parser.add_argument("--untied", action="store_true")
    parser.add_argument("--memory", default="8GiB", help="of each of our processes: enough, so that nothing is swapped")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return 0
    table, failed = take_turns(
        arguments.rounds,
        arguments.microbatches,
        arguments.contenders,
        lambda name, m: turn(name, m, arguments),
        lambda row: f"{seconds_of(row)}, {row['cores']:.2f} cores",
    )
    _print_table(table, arguments)
    return 1 if failed else 0


def _print_table(table: dict[tuple[int, str], list[Row]], arguments: argparse.Namespace) -> None:
    tokens = arguments.batch * arguments.length
    speeds = {
        key: tokens / statistics.median([s for row in rows for s in row["seconds"]]) for key, rows in table.items()
    }
    tied = "untied" if arguments.untied else "tied"
    print(f"\n{arguments.model} ({tied}), {arguments.batch} x {arguments.length} tokens, 2 processes of one thread,")
    print(f"block {split_of(arguments)} is the first of the second stage")
    print(f"{'m':>2} {'':12} {'tokens/s':>9} {'cores':>6} {'of 1F1B':>8} {'of GPipe':>9} {'first loss':>11}")
    for (m, name), rows in sorted(table.items(), key=lambda item: (item[0][0], CONTENDERS.index(item[0][1]))):
        cores = statistics.median(row["cores"] for row in rows)
        shares = [_share(speeds[m, name], speeds.get((m, other))) for other in ("torch-1f1b", "torch-gpipe")]
        loss = rows[0]["loss"]
        print(f"{m:2} {name:12} {speeds[m, name]:9.1f} {cores:6.2f} {shares[0]:>8} {shares[1]:>9} {loss:11.4f}")


def _share(speed: float, base: float | None) -> str:
    return f"{speed / base:.2f}" if base else "-"


if __name__ == "__main__":
    sys.exit(main())
