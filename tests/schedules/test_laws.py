"""Laws over random chains and plans: whatever was decided, the program is legal, complete and free of deadlock."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.core.check import check
from counterpoint.core.edges import unrolled
from counterpoint.core.outline import LayerOutline, Outline, Value
from counterpoint.core.plan import SCHEDULES, Pack, Plan
from counterpoint.core.program import DeviceProgram, Program, reads, unroll, writes
from counterpoint.core.slots import settle
from counterpoint.core.task import (
    AllReduce,
    Backward,
    Buffer,
    Clip,
    Drop,
    Evict,
    Forward,
    Load,
    Receive,
    Send,
    Task,
    Update,
)
from counterpoint.schedules import write_program

PIPELINES = ("model_parallel", "gpipe", "flush", "2bw")


@st.composite
def outlines(draw: st.DrawFn) -> Outline:
    """Chains with skips, several consumers, values without gradient, layers without weights and tied layers."""
    count = draw(st.integers(1, 8))
    trained = [draw(st.integers(0, 3)) > 0 for _ in range(count)]
    layers = []
    for index in range(count):
        owners = [other for other in range(index) if trained[other]]
        tied = draw(st.lists(st.sampled_from(owners), max_size=2, unique=True)) if owners else []
        narrows = trained[index] and draw(st.booleans())
        layers.append(LayerOutline(trained[index], draw(st.booleans()), tuple(tied), narrows))
    values = [Value(index, (index + 1,)) for index in range(count - 1)]
    for producer in draw(st.lists(st.integers(0, max(count - 2, 0)), max_size=4)) if count > 1 else []:
        consumers = draw(st.lists(st.integers(producer + 1, count - 1), min_size=1, max_size=4, unique=True))
        values.append(Value(producer, tuple(sorted(consumers)), draw(st.booleans())))
    return Outline(tuple(layers), tuple(values))


def cut(draw: st.DrawFn, count: int, ends: Sequence[int], free: Sequence[int]) -> tuple[Pack, ...]:
    """Packs of `count` layers that end at all of `ends` and some of `free`."""
    if not count:
        return ()
    chosen = {*ends, count - 1, *(end for end in free if draw(st.booleans()))}
    chosen = {end for end in chosen if end < count}
    starts = [0, *(end + 1 for end in sorted(chosen))]
    return tuple(Pack(first, last - 1) for first, last in pairwise(starts))


@st.composite
def plans(draw: st.DrawFn, outline: Outline, schedules: Sequence[str] = SCHEDULES) -> Plan:
    schedule = draw(st.sampled_from(schedules))
    count = outline.num_layers
    stages = cut(draw, count, (), range(count)) if schedule in PIPELINES else ()
    ends = [stage.last for stage in stages]
    backward = cut(draw, count, ends, range(count))
    fused = draw(st.booleans())
    kept = draw(st.sampled_from(("recompute", "keep", "evict"))) if schedule != "harmony_pp" else "recompute"
    free = range(count) if kept == "recompute" else [pack.last for pack in backward]
    covered = backward[-1].first if fused else count
    forward = cut(draw, covered, ends, free)
    group = draw(st.integers(1, 2))
    replicas = draw(st.integers(1, 3)) if schedule != "harmony_pp" else 1
    devices = draw(st.integers(1, 4)) if schedule == "harmony_pp" else max(len(stages), 1) * replicas
    least = max(len(stages) - 1, 1) if schedule == "2bw" else 1
    return Plan(
        schedule,
        draw(st.integers(least, least + 3)) * group,
        1,
        backward,
        forward,
        (kept,) * len(backward),
        devices,
        replicas,
        stages,
        group,
        group,
        tuple(sorted(draw(st.sets(st.integers(0, outline.num_layers - 1))))),
        draw(st.booleans()),
        draw(st.booleans()),
        replicas_apart=draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn, schedules: Sequence[str] = SCHEDULES) -> tuple[Plan, Outline]:
    outline = draw(outlines())
    return draw(plans(outline, schedules)), outline


def flattened(program: Program, steps: int) -> list[list[Task]]:
    return [list(unroll(program, device, steps)) for device in range(len(program.devices))]


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_program_is_legal(case: tuple[Plan, Outline]) -> None:
    program = write_program(*case)
    assert program.num_microbatches == case[0].num_microbatches * case[0].num_replicas
    assert check(program) == ()
    assert check(program, steps=1) == ()


@settings(max_examples=100, deadline=None)
@given(cases())
def test_no_deadlock_when_everything_is_dropped_at_once(case: tuple[Plan, Outline]) -> None:
    """Allocations wait for drops, drops for sends and evicts: a device with little memory must still get through."""
    program = write_program(*case)
    steps = 3
    lists = [_tight(tasks, program.outline) for tasks in flattened(program, steps)]
    flat = Program(
        program.outline, program.num_microbatches, tuple(DeviceProgram(tuple(tasks), (), ()) for tasks in lists)
    )
    slots = settle(unrolled(flat, 0)).slots
    assert None not in slots


def _tight(tasks: list[Task], outline: Outline) -> list[Task]:
    """What is received or reduced goes home until it is used; all is dropped after its last use."""
    swapped: list[Task] = []
    away: set[Buffer] = set()
    for task in tasks:
        for buffer in dict.fromkeys(_passing(task, outline)):
            if buffer in away and not isinstance(task, Receive):
                swapped.append(Load(buffer, "host"))
                away.remove(buffer)
        swapped.append(task)
        if isinstance(task, (Receive, AllReduce)):
            for buffer in writes(task, outline):
                swapped += [Evict(buffer, "host"), Drop(buffer)]
                away.add(buffer)
    return _dropped(swapped, outline)


def _dropped(tasks: list[Task], outline: Outline) -> list[Task]:
    following: dict[Buffer, bool] = {}
    result: list[Task] = []
    for task in reversed(tasks):
        if not isinstance(task, Drop):
            touched = dict.fromkeys(_passing(task, outline))
            result += [Drop(b) for b in touched if not following.get(b, False)]
            following |= {buffer: not isinstance(task, (Receive, Load)) for buffer in touched}
            result.append(task)
    return result[::-1]


def _passing(task: Task, outline: Outline) -> list[Buffer]:
    if isinstance(task, Update) and task.host:
        return []
    kinds = ("activation", "activation_grad", "grad")
    return [buffer for buffer in reads(task, outline) + writes(task, outline) if buffer.kind in kinds]


@settings(max_examples=100, deadline=None)
@given(cases(), st.integers(1, 3))
def test_every_layer_runs_once_and_is_updated_after_its_last_gradient(case: tuple[Plan, Outline], steps: int) -> None:
    plan, outline = case
    program = write_program(plan, outline)
    forward: dict[tuple[int, int], int] = defaultdict(int)
    backward: dict[tuple[int, int], int] = defaultdict(int)
    updates: dict[int, list[int]] = defaultdict(list)
    for tasks in flattened(program, steps):
        gradients: dict[tuple[int, int], int] = defaultdict(int)
        for index, task in enumerate(tasks):
            match task:
                case Forward() | Backward():
                    counts = forward if isinstance(task, Forward) else backward
                    for microbatch in range(task.microbatch, task.microbatch + task.count):
                        for layer in range(task.first, task.last + 1):
                            counts[layer, microbatch] += 1
                            if isinstance(task, Backward):
                                gradients |= {(u, task.step): index for u in outline.weights(layer, layer)}
                case Update():
                    for layer in range(task.first, task.last + 1):
                        if outline.layers[layer].has_weights:
                            assert gradients[layer, task.step] < index
                            updates[layer].append(task.step)
                case _:
                    pass
    cells = {(layer, k) for layer in range(outline.num_layers) for k in range(steps * program.num_microbatches)}
    fused = plan.backward_packs[-1].first if plan.fused else outline.num_layers
    assert forward == {cell: 1 for cell in cells if cell[0] < fused}
    assert backward == dict.fromkeys(cells, 1)
    trained = [layer for layer in range(outline.num_layers) if outline.layers[layer].has_weights]
    assert {layer: sorted(set(found)) for layer, found in updates.items()} == {u: list(range(steps)) for u in trained}
    once = [layer for layer in updates if plan.shard_updates or layer in plan.host_layers]
    assert all(len(updates[layer]) == steps for layer in once)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_pairs_and_groups_of_devices_keep_one_order(case: tuple[Plan, Outline]) -> None:
    program = write_program(*case)
    sent: dict[tuple[int, int], list[Buffer]] = defaultdict(list)
    received: dict[tuple[int, int], list[Buffer]] = defaultdict(list)
    gathered: dict[tuple[int, ...], dict[int, list[Task]]] = defaultdict(lambda: defaultdict(list))
    for device, tasks in enumerate(flattened(program, 3)):
        for task in tasks:
            match task:
                case Send(buffer, peer):
                    sent[device, peer].append(buffer)
                case Receive(buffer, peer):
                    received[peer, device].append(buffer)
                case AllReduce(peers=peers) | Clip(peers=peers):
                    gathered[peers][device].append(task)
                case _:
                    pass
    assert sent == received
    for peers, lists in gathered.items():
        assert sorted(lists) == sorted(peers)
        assert all(tasks == lists[peers[0]] for tasks in lists.values())


@settings(max_examples=100, deadline=None)
@given(cases(schedules=("2bw",)))
def test_two_weight_versions_are_enough(case: tuple[Plan, Outline]) -> None:
    """Versions -1 and 0 are both the initial weights; what is not updated here is loaded when it is first read."""
    program = write_program(*case)
    for tasks in flattened(program, 4):
        spans: dict[int, dict[int, list[int]]] = defaultdict(dict)
        for index, task in enumerate(tasks):
            for buffer in reads(task, program.outline) + writes(task, program.outline):
                if buffer.kind == "weight":
                    ends = spans[buffer.owner].setdefault(buffer.number, [index, index])
                    ends[1] = index
        for versions in spans.values():
            for index in range(len(tasks)):
                live = {version for version, (begin, end) in versions.items() if begin <= index <= end}
                assert len(live) <= 2


@settings(max_examples=60, deadline=None)
@given(cases(schedules=("gpipe", "flush", "2bw")))
def test_stashes_in_flight(case: tuple[Plan, Outline]) -> None:
    plan, outline = case
    program = write_program(plan, outline)
    depth, units = len(plan.stages), plan.num_microbatches // plan.forward_group
    everywhere = flattened(program, 3)
    for position, replica in product(range(depth), range(plan.num_replicas)):
        tasks, stage = everywhere[plan.device(position, replica)], plan.stages[position]
        first = [task for task in tasks if isinstance(task, Forward) and task.first == stage.first]
        last = [task for task in tasks if isinstance(task, Backward) and task.first == stage.first]
        in_flight = peak = 0
        for task in tasks:
            in_flight += (task in first) - (task in last)
            peak = max(peak, in_flight)
        limit = depth - position
        expected = units if plan.schedule == "gpipe" else min(limit, units + (plan.schedule == "2bw"))
        assert peak == expected if first else not peak


@settings(max_examples=60, deadline=None)
@given(cases())
def test_backwards_ascend_on_every_layer(case: tuple[Plan, Outline]) -> None:
    """Gradients sum up as in a plain loop."""
    program = write_program(*case)
    for tasks in flattened(program, 3):
        found: dict[int, list[int]] = defaultdict(list)
        for task in tasks:
            if isinstance(task, Backward):
                found[task.first].append(task.microbatch)
        assert all(microbatches == sorted(microbatches) for microbatches in found.values())
