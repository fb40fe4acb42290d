"""The orders that the papers print, and the errors of plans that a schedule cannot follow."""

import re

import pytest

from counterpoint.core.outline import LayerOutline, Outline, Value, chain_outline
from counterpoint.core.plan import Pack, Plan, equal_packs
from counterpoint.core.program import Program, unroll
from counterpoint.core.task import AllReduce, Backward, Clip, Forward, Norm, Task, Update
from counterpoint.schedules import write_program

SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def pipeline(schedule: str, depth: int = 4, m: int = 4, replicas: int = 1, **more: bool) -> Plan:
    """One layer per stage."""
    packs = equal_packs(depth, 1)
    policies = ("recompute",) * depth
    return Plan(schedule, m, 1, packs, packs, policies, depth * replicas, replicas, packs, **more)  # type: ignore[arg-type]


def trace(program: Program, device: int, steps: int) -> str:
    """As SEEDS.md writes it: microbatches from 1, the version as superscript, updates by what they make."""
    words = []
    for task in unroll(program, device, steps):
        match task:
            case Forward(microbatch=k, version=v) | Backward(microbatch=k, version=v):
                op = "F" if isinstance(task, Forward) else "B"
                words.append(f"{op}{k + 1}" + str(max(v, 0)).translate(SUPERSCRIPTS))
            case Update(step=step):
                words.append(f"U→W{step + 1}")
            case _:
                pass
    return " ".join(words)


def computed(program: Program, device: int) -> list[Task]:
    ops = (Forward, Backward, Norm, Clip, Update, AllReduce)
    return [task for task in program.devices[device].body if isinstance(task, ops)]


def test_2bw_first_stage() -> None:
    program = write_program(pipeline("2bw"), chain_outline(4))
    assert trace(program, 0, 4).startswith(
        "F1⁰ F2⁰ F3⁰ F4⁰ B1⁰ F5⁰ B2⁰ F6⁰ B3⁰ F7⁰ B4⁰ U→W1 F8⁰ B5⁰ F9¹ B6⁰ F10¹ B7⁰ F11¹ B8⁰ U→W2 F12¹ B9¹ F13² B10¹"
    )
    assert trace(program, 0, 2) == ("F1⁰ F2⁰ F3⁰ F4⁰ B1⁰ F5⁰ B2⁰ F6⁰ B3⁰ F7⁰ B4⁰ U→W1 F8⁰ B5⁰ B6⁰ B7⁰ B8⁰ U→W2")


def test_2bw_last_stage() -> None:
    program = write_program(pipeline("2bw"), chain_outline(4))
    assert trace(program, 3, 3) == (
        "F1⁰ B1⁰ F2⁰ B2⁰ F3⁰ B3⁰ F4⁰ B4⁰ U→W1 F5⁰ B5⁰ F6⁰ B6⁰ F7⁰ B7⁰ F8⁰ B8⁰ U→W2 "
        "F9¹ B9¹ F10¹ B10¹ F11¹ B11¹ F12¹ B12¹ U→W3"
    )


def test_2bw_with_clipping_computes_in_the_same_order_and_updates_late() -> None:
    at_once = write_program(pipeline("2bw"), chain_outline(4))
    late = write_program(pipeline("2bw", clipping=True), chain_outline(4))
    for device in range(4):
        words = [re.sub(r"U→W\d+ ?", "", trace(program, device, 4)).strip() for program in (at_once, late)]
        assert words[0] == words[1]
    assert trace(late, 0, 2) == ("F1⁰ F2⁰ F3⁰ F4⁰ B1⁰ F5⁰ B2⁰ F6⁰ B3⁰ F7⁰ B4⁰ F8⁰ B5⁰ U→W1 B6⁰ B7⁰ B8⁰ U→W2")
    assert [type(task) for task in computed(late, 3)][:2] == [Norm, Forward]


def test_2bw_overlaps_the_all_reduce_with_the_next_minibatch() -> None:
    program = write_program(pipeline("2bw", replicas=2, clipping=True), chain_outline(4))
    kinds = [type(task).__name__[0] for task in computed(program, 6)]
    assert "".join(kinds) == "AFBFBNFBFBCU"
    assert computed(program, 6)[0] == AllReduce(3, 3, 0, (6, 7))
    assert computed(program, 6)[-2] == Clip(0, (0, 2, 4, 6))


def test_a_pack_is_updated_layer_by_layer_what_has_no_weights_left_out() -> None:
    layers = (LayerOutline(), LayerOutline(), LayerOutline(has_weights=False), LayerOutline())
    outline = Outline(layers, chain_outline(4).values)
    packs = equal_packs(4, 2)
    for clipping, updated in ((False, [3, 1, 0]), (True, [0, 1, 3])):
        plan = Plan("harmony", 2, 1, packs, packs[:1], ("recompute",) * 2, clipping=clipping)
        updates = [task for task in computed(write_program(plan, outline), 0) if isinstance(task, Update)]
        assert updates == [Update(layer, layer, 0, clipped=clipping) for layer in updated]


def test_flush_runs_ahead_by_the_stages_that_follow() -> None:
    program = write_program(pipeline("flush"), chain_outline(4))
    assert trace(program, 1, 1) == "F1⁰ F2⁰ F3⁰ B1⁰ F4⁰ B2⁰ B3⁰ B4⁰ U→W1"
    assert trace(write_program(pipeline("flush", m=2), chain_outline(4)), 0, 1) == "F1⁰ F2⁰ B1⁰ B2⁰ U→W1"


def test_gpipe_and_model_parallel() -> None:
    outline = chain_outline(4)
    assert trace(write_program(pipeline("gpipe", m=2), outline), 2, 1) == "F1⁰ F2⁰ B1⁰ B2⁰ U→W1"
    assert trace(write_program(pipeline("model_parallel", m=2), outline), 2, 1) == "F1⁰ B1⁰ F2⁰ B2⁰ U→W1"


def harmony(schedule: str, num_devices: int, replicas: int, **more: bool) -> Plan:
    packs = equal_packs(4, 1)
    policies = ("recompute",) * 4
    return Plan(schedule, 2, 1, packs, packs[:-1], policies, num_devices, replicas, **more)  # type: ignore[arg-type]


def test_harmony_updates_each_pack_after_its_backward_and_fuses_the_last() -> None:
    tasks = computed(write_program(harmony("harmony", 1, 1), chain_outline(4)), 0)
    assert "".join(type(task).__name__[0] for task in tasks) == "FFFFFF" + "BBU" * 4
    assert [task.first for task in tasks if isinstance(task, Update)] == [3, 2, 1, 0]


def test_harmony_with_clipping_updates_in_ascending_order_at_the_end() -> None:
    tasks = computed(write_program(harmony("harmony", 2, 2, clipping=True), chain_outline(4)), 1)
    assert "".join(type(task).__name__[0] for task in tasks) == "FFFFFF" + "BBAN" * 4 + "CUUUU"
    assert [task.first for task in tasks if isinstance(task, Update)] == [0, 1, 2, 3]
    assert [task for task in tasks if isinstance(task, Clip)] == [Clip(0, (1,))]
    assert [task.microbatch for task in tasks if isinstance(task, Backward)] == [2, 3] * 4


def test_sharded_updates_are_dealt_to_replicas_by_pack() -> None:
    program = write_program(harmony("harmony", 2, 2, shard_updates=True), chain_outline(4))
    owners = [[task.first for task in computed(program, d) if isinstance(task, Update)] for d in range(2)]
    assert owners == [[2, 0], [3, 1]]


def test_harmony_pp_deals_packs_round_robin() -> None:
    program = write_program(harmony("harmony_pp", 3, 1), chain_outline(4))
    dealt = [
        [(type(t).__name__[0], t.first) for t in computed(program, d) if isinstance(t, Forward | Backward)]
        for d in range(3)
    ]
    assert [list(dict.fromkeys(device)) for device in dealt] == [
        [("F", 0), ("B", 3), ("B", 0)],
        [("F", 1), ("B", 2)],
        [("F", 2), ("B", 1)],
    ]


def tied_outline() -> Outline:
    """The head (layer 3) uses the weights of the embedding (layer 0)."""
    layers = (LayerOutline(), LayerOutline(), LayerOutline(), LayerOutline(tied=(0,)))
    return Outline(layers, tuple(Value(layer, (layer + 1,)) for layer in range(3)))


def test_tied_weights_are_reduced_and_updated_on_every_stage_that_uses_them() -> None:
    program = write_program(pipeline("flush", replicas=2, clipping=True), tied_outline())
    first, last = computed(program, 0), computed(program, 6)
    everyone = AllReduce(0, 0, 0, (0, 1, 6, 7))
    assert first[-4:] == [everyone, Norm(0, 0, 0), Clip(0, (0, 2, 4, 6)), Update(0, 0, 0, clipped=True)]
    assert last[-6:] == [
        AllReduce(3, 3, 0, (6, 7)),
        Norm(3, 3, 0),
        everyone,
        Clip(0, (0, 2, 4, 6)),
        Update(0, 0, 0, clipped=True),
        Update(3, 3, 0, clipped=True),
    ]


def test_harmony_pp_updates_a_tied_layer_where_it_runs() -> None:
    program = write_program(harmony("harmony_pp", 3, 1), tied_outline())
    updates = [[task.first for task in computed(program, d) if isinstance(task, Update)] for d in range(3)]
    assert updates == [[3, 0], [2], [1]]
    assert not any(isinstance(task, AllReduce) for d in range(3) for task in computed(program, d))
    spread = write_program(harmony("harmony_pp", 2, 1), tied_outline())
    sums = [[task for task in computed(spread, d) if isinstance(task, AllReduce)] for d in range(2)]
    assert sums == [[AllReduce(0, 0, 0, (0, 1))]] * 2
    updates = [[task.first for task in computed(spread, d) if isinstance(task, Update)] for d in range(2)]
    assert updates == [[2, 0], [3, 1]]


def test_a_host_update_of_a_tied_layer_happens_once() -> None:
    program = write_program(pipeline("flush", host_layers=tuple(range(tied_outline().num_layers))), tied_outline())
    assert [task for task in computed(program, 3) if isinstance(task, Update)] == [Update(3, 3, 0, host=True)]


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (
            pipeline("2bw", m=2),
            "m = 2 microbatches cannot feed 4 stages without bubbles: "
            "2bw needs at least 3; use flush or more microbatches",
        ),
        (harmony("harmony", 3, 2), "3 devices need as many replicas, not 2"),
        (harmony("harmony_pp", 4, 2), "harmony_pp has no replicas, not 2; use harmony for data parallelism"),
        (harmony("gpipe", 2, 1), "gpipe needs stages"),
        (
            Plan("gpipe", 1, 1, equal_packs(4, 2), (Pack(0, 3),), ("recompute",) * 2, 2, 1, equal_packs(4, 2)),
            "forward pack 0-3 crosses the end of stage 0-1",
        ),
        (
            Plan("harmony_pp", 1, 1, equal_packs(4, 1), equal_packs(4, 1), ("keep",) * 4, 3),
            "pack 1-1 keeps what autograd saves, but its forward runs on device 1 and its backward on device 0",
        ),
        (
            Plan("plain", 4, 1, (Pack(0, 3),), (Pack(0, 3),), ("recompute",), forward_group=2, backward_group=4),
            "forward groups of 2 and backward groups of 4 microbatches must be equal",
        ),
        (Plan("plain", 1, 1, (Pack(0, 4),), (), ("recompute",)), "they end at layer 4, the outline at layer 3"),
    ],
)
def test_plans_that_a_schedule_cannot_follow(plan: Plan, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        write_program(plan, chain_outline(4))
