"""Programs that run a layer too often, not at all, or on a weight version that was not promised."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from counterpoint.core.examined import Examined, Failure
from counterpoint.core.notation import dump_layers, dump_numbers
from counterpoint.core.task import Backward, Forward, Update


def order_failures(examined: Examined) -> Iterator[Failure]:
    yield from _coverage(examined)
    yield from _versions(examined)
    yield from _updates(examined)


def _coverage(examined: Examined) -> Iterator[Failure]:
    """Each layer of each microbatch runs forward once and backward once; a recompute may stand in for the forward."""
    forwards: Counter[tuple[int, int]] = Counter()
    backwards: Counter[tuple[int, int]] = Counter()
    fused: set[tuple[int, int]] = set()
    for task in examined.run.tasks:
        if isinstance(task, (Forward, Backward)):
            microbatches = range(task.microbatch, task.microbatch + task.count)
            cells = [(layer, k) for layer in range(task.first, task.last + 1) for k in microbatches]
            (forwards if isinstance(task, Forward) else backwards).update(cells)
            if isinstance(task, Backward) and task.recompute:
                fused.update(cells)
    forwards.update(cell for cell in sorted(fused) if not forwards[cell])
    yield from _miscounted("forward", forwards, examined)
    yield from _miscounted("backward", backwards, examined)


def _miscounted(what: str, counts: Counter[tuple[int, int]], examined: Examined) -> Iterator[Failure]:
    """One failure per stretch of layers that go wrong in the same way."""
    m = examined.program.num_microbatches
    expected = range(examined.steps * m)
    surplus = sorted({k for _, k in counts if k not in expected})
    if surplus:
        text = f"microbatch {dump_numbers(surplus)} runs {what}"
        yield Failure(f"{text}, but {examined.steps} steps of {m} have 0 to {expected[-1]}")
    begin = 0
    last_wrong: tuple[tuple[int, int], ...] = ()
    for layer in range(examined.program.outline.num_layers + 1):
        wrong = tuple((k, counts[layer, k]) for k in expected if counts[layer, k] != 1)
        if layer == examined.program.outline.num_layers or wrong != last_wrong:
            if last_wrong:
                yield Failure(_miscount(what, begin, layer - 1, last_wrong))
            begin, last_wrong = layer, wrong


def _miscount(what: str, first: int, last: int, wrong: tuple[tuple[int, int], ...]) -> str:
    by_count: defaultdict[int, list[int]] = defaultdict(list)
    for microbatch, count in wrong:
        by_count[count].append(microbatch)
    parts = [
        f"{'never' if not count else f'{count} times'} for microbatch {dump_numbers(by_count[count])}"
        for count in sorted(by_count)
    ]
    return f"layer {dump_layers(first, last)} must run {what} once for each microbatch; it runs {' and '.join(parts)}"


def _versions(examined: Examined) -> Iterator[Failure]:
    """All of a microbatch runs on one version: the newest, or the one before in programs with an epilogue."""
    m, lag = examined.program.num_microbatches, 1 if examined.program.epilogue_steps else 0
    chosen: dict[int, tuple[int, int]] = {}
    for index in range(len(examined.run.tasks)):
        task, bodies = examined.task(index), examined.bodies[index]
        if not isinstance(task, (Forward, Backward)):
            continue
        for microbatch in range(task.microbatch, task.microbatch + task.count):
            step = microbatch // m
            version, other = chosen.setdefault(microbatch + bodies * m, (task.version + bodies, index))
            if not step - lag <= task.version <= step:
                allowed = f"the newest or the one before, {step} or {step - 1}" if lag else f"the newest, {step}"
                yield examined.failure(index, f"step {step} runs on weight version {task.version}, not on {allowed}")
            elif task.version + bodies != version:
                text = f"microbatch {microbatch} runs on version {task.version}, but on {version - bodies}"
                yield examined.failure(index, f"{text} at {examined.where(other)}")
            if isinstance(task, Backward) and task.step != step:
                text = f"microbatch {microbatch} is of step {step}, its gradient goes to step {task.step}"
                yield examined.failure(index, text)


def _updates(examined: Examined) -> Iterator[Failure]:
    """A layer is updated once per step on each device that updates it, and on some device in every step."""
    outline, run = examined.program.outline, examined.run
    seen: dict[tuple[int, int, int], int] = {}
    done: set[tuple[int, int]] = set()
    for index, task in enumerate(run.tasks):
        if not isinstance(task, Update):
            continue
        for layer in range(task.first, task.last + 1):
            other = seen.setdefault((run.devices[index], layer, task.step), index)
            if other != index:
                yield examined.failure(
                    index, f"layer {layer} is updated twice in one step, first at {examined.where(other)}"
                )
            done.add((layer, task.step))
    for layer in range(outline.num_layers):
        missing = [step for step in range(examined.steps) if (layer, step) not in done]
        if missing and outline.layers[layer].has_weights:
            yield Failure(f"layer {layer} is never updated in step {dump_numbers(missing)}")
    surplus = sorted({step for _, step in done if step not in range(examined.steps)})
    if surplus:
        yield Failure(f"step {dump_numbers(surplus)} is updated, but the run has {examined.steps} steps from 0 on")
