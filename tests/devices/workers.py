"""What processes do in tests: train for ever, stumble, differ from one another, count what they do."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from counterpoint import ExecutionError, LossError, Trainer
from counterpoint.core.outline import Outline
from counterpoint.core.plan import Plan
from counterpoint.core.profile import LayerCost
from counterpoint.core.program import reads, unroll, writes
from counterpoint.core.task import AllReduce, Backward, Buffer, Evict, Forward, Load, Receive, Send, Task, Update
from tests.devices.problems import OPTIMIZERS, Problem, Setting, least_memory, make_trainer, train, weights_of


def train_for_ever(problem: Problem, setting: Setting, folder: str, mark: str) -> None:
    with make_trainer(problem, setting, folder) as trainer:
        batch = problem.batches(1)[0]
        while True:
            trainer.step(batch)
            Path(f"{mark}.{trainer.device}").write_text(str(trainer.step_count))


def stumble(problem: Problem, setting: Setting, folder: str) -> None:
    with make_trainer(problem, setting, folder) as trainer:
        for number, batch in enumerate(problem.batches()):
            if number == 2 and trainer.device == 1:
                raise KeyError("a mistake of the caller's own")
            trainer.step(batch)


def differ(problems: list[Problem], settings: list[Setting], folder: str) -> dict[str, Any]:
    device = int(os.environ["RANK"])
    return train(problems[device], settings[device], folder)


def quarrel(problem: Problem, setting: Setting, folder: str, calls: tuple[str, ...]) -> tuple[str, float]:
    """Two steps together, then each device makes a call of its own, which may be to leave: how it ends, and when."""
    with contextlib.ExitStack() as stack:
        trainer = make_trainer(problem, setting, folder)
        stack.push(trainer)
        batches = problem.batches()
        for batch in batches[:2]:
            trainer.step(batch)
        since = time.monotonic()
        try:
            with stack:
                _call(trainer, calls[trainer.device], batches, Path(folder))
        except ExecutionError as error:
            return str(error), time.monotonic() - since
    return "no error", 0.0


def _call(trainer: Trainer, call: str, batches: Sequence[Any], folder: Path) -> None:
    match call:
        case "step":
            for batch in batches[2:]:
                trainer.step(batch)
        case "evaluate":
            trainer.evaluate(batches[0])
        case "save" | "export":
            getattr(trainer, call)(folder / call)


def train_through_bad_losses(
    problem: Problem, setting: Setting, folder: str, bad: tuple[int, ...] | None = None
) -> dict[str, Any]:
    """With `bad` batches in the place of some; without, one before each."""
    found: dict[str, Any] = {"errors": [], "losses": [], "ended": ""}
    with make_trainer(problem, setting, folder) as trainer:

        def attempt(call: Callable[[], float]) -> None:
            try:
                found["losses"].append(call())
            except LossError as error:
                found["errors"].append(str(error).partition(";")[0])
            except ExecutionError as error:
                found["ended"] = str(error)

        for number, batch in enumerate(problem.batches()):
            x = batch["x"].clone()
            x[-1] = float("inf")
            tried = [{**batch, "x": x}, batch] if bad is None else [{**batch, "x": x}] if number in bad else [batch]
            for one in tried:
                attempt(partial(trainer.step, one))
        if not found["ended"]:
            if bad is not None:
                attempt(trainer.settle)
            found |= {"weights": weights_of(trainer), "steps": trainer.step_count}
        return found


def train_beside_ddp(problem: Problem, setting: Setting, folder: str, ddp: bool = True) -> dict[str, Any]:
    """The model's buffers on this device after each step of ours and, in the same processes, of torch's DDP."""
    found: dict[str, Any] = {"ours": [], "ddp": []}
    with make_trainer(problem, setting, folder) as trainer:
        for batch in problem.batches():
            trainer.step(batch)
            found["ours"].append(_buffers(trainer))
        trainer.settle()
        found["settled"] = _buffers(trainer)
        if ddp:
            found["ddp"] = list(_ddp_buffers(problem, trainer.device))
    return found


def _buffers(trainer: Trainer) -> dict[str, Any]:
    return {name: tensor.cpu().clone() for name, tensor in trainer.compute.buffers.items()}


def _ddp_buffers(problem: Problem, device: int) -> Iterator[dict[str, Any]]:
    """Each process runs its half of the microbatches; the last of them sums the gradients."""
    model = problem.build()
    replica = DistributedDataParallel(model)
    optimizer = OPTIMIZERS[problem.optimizer](model)
    count = problem.minibatch // problem.microbatch // 2
    for batch in problem.batches():
        for k in range(count):
            start = (device * count + k) * problem.microbatch
            part = {name: tensor[start : start + problem.microbatch] for name, tensor in batch.items()}
            with contextlib.nullcontext() if k == count - 1 else replica.no_sync():
                (problem.loss(replica(part["x"]), part) / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield {name: tensor.clone() for name, tensor in model.named_buffers()}


def act_on_servers(problem: Problem, setting: Setting, folder: str) -> dict[str, Any]:
    """Each server has a folder of its own."""
    return train(problem, setting, f"{folder}-{os.environ['GROUP_RANK']}")


def count(problem: Problem, setting: Setting, folder: str) -> dict[str, Any]:
    """What a device moved and held, measured, beside what its program says of a run of so many steps."""
    with make_trainer(problem, setting, folder) as trainer:
        for batch in problem.batches():
            trainer.step(batch)
        trainer.settle()
        moved, sent = trainer.store.counters, trainer._engine.transport.counters
        tasks = list(unroll(trainer.program, trainer.device, problem.steps))
        costs, outline = trainer.executor.costs, trainer.program.outline
        spans = sorted(trainer.executor.record.spans, key=lambda span: span.end_ns)
        return {
            "sent": (sent.sent_bytes, _bytes(costs, tasks, Send)),
            "received": (sent.received_bytes, _bytes(costs, tasks, Receive)),
            "reduced": (sent.reduced_bytes, sum(costs.reduced_bytes(t) for t in tasks if isinstance(t, AllReduce))),
            "loaded": (moved.loaded_bytes, _bytes(costs, _read(tasks), Load)),
            "evicted": (moved.evicted_bytes, _bytes(costs, tasks, Evict)),
            "in flight": (_in_flight(span.task for span in spans), _in_flight(tasks)),
            "versions": (_versions((s.task for s in spans), outline), _versions(tasks, outline)),
            "updates": (sum(isinstance(s.task, Update) for s in spans), sum(isinstance(t, Update) for t in tasks)),
        }


def count_swapping(problem: Problem, setting: Setting, folder: str) -> dict[str, Any]:
    """As `count`, in the least memory that the plan can do with."""
    with least_memory(problem, setting, folder):
        return count(problem, setting, folder)


def versions(problem: Problem, setting: Setting, folder: str) -> dict[str, Any]:
    """Bytes of the versions of each layer when they were dropped, beside what the profile says."""
    found: dict[int, dict[str, int]] = {}
    with make_trainer(problem, setting, folder) as trainer:
        drop = trainer.store.drop

        def watched(buffer: Buffer) -> None:
            if buffer.kind in ("weight", "old"):
                found.setdefault(buffer.owner, {})[buffer.kind] = trainer.store.regions[buffer].num_bytes
            drop(buffer)

        trainer.store.drop = watched
        for batch in problem.batches():
            trainer.step(batch)
        trainer.settle()
        layers = trainer.executor.costs.profile.layers
        return {"found": found, "expected": {i: _version_bytes(layers[i]) for i in found}}


def _version_bytes(layer: LayerCost) -> dict[str, int]:
    return {"weight": layer.weight_bytes} | ({"old": layer.old_bytes} if layer.old_bytes else {})


def _bytes(costs: Any, tasks: Iterable[Task], kind: type) -> int:
    return sum(costs.buffer_bytes(task.buffer) for task in tasks if isinstance(task, kind))


def _read(tasks: list[Task]) -> list[Task]:
    """Loads that read: an optimizer's state is nothing before its first update."""
    updated: set[int] = set()
    found: list[Task] = []
    for task in tasks:
        if isinstance(task, Update):
            updated |= set(range(task.first, task.last + 1))
        if not (isinstance(task, Load) and task.buffer.kind == "state" and task.buffer.owner not in updated):
            found.append(task)
    return found


def _in_flight(tasks: Iterable[Task]) -> int:
    """The most microbatches that were forward and not yet backward, on the device's first layers."""
    tasks = list(tasks)
    first = min(task.first for task in tasks if isinstance(task, Forward))
    flying: set[int] = set()
    most = 0
    for task in tasks:
        if isinstance(task, Forward) and task.first == first:
            flying.add(task.microbatch)
        elif isinstance(task, Backward) and task.first <= first <= task.last:
            flying.discard(task.microbatch)
        most = max(most, len(flying))
    return most


def _versions(tasks: Iterable[Task], outline: Outline) -> int:
    """The most versions of one layer's weights that were there at once and still wanted."""
    uses: dict[Buffer, list[int]] = {}
    for index, task in enumerate(tasks):
        if isinstance(task, Forward | Backward | Update):
            for buffer in (*reads(task, outline), *writes(task, outline)):
                if buffer.kind in ("weight", "old"):
                    uses.setdefault(buffer, []).append(index)
    lives = {buffer: (indices[0], indices[-1]) for buffer, indices in uses.items()}
    moments = {(buffer.owner, begin) for buffer, (begin, _) in lives.items()}
    return max(
        sum(b.owner == owner and begin <= moment < end for b, (begin, end) in lives.items())
        for owner, moment in moments
    )


def plan_of(problem: Problem, setting: Setting, folder: str) -> tuple[Plan, str, int]:
    with make_trainer(problem, setting, folder) as trainer:
        return trainer.forecast.plan, trainer.describe(), trainer.forecast.flush_step_ns
