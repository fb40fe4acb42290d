"""Where sends and receives stand: after their producers, in one order per pair and one common to all devices."""

import pytest

from counterpoint.core.errors import ProgramError
from counterpoint.core.notation import dump_task
from counterpoint.core.outline import Outline, Value, chain_outline
from counterpoint.core.plan import Pack, Plan, equal_packs
from counterpoint.core.program import Program
from counterpoint.core.task import Forward
from counterpoint.core.text import parse
from counterpoint.passes.transfers import transfers
from counterpoint.schedules import gpipe, harmony_pp, two_bw


def lines(program: Program, device: int, section: str = "body") -> list[str]:
    return [dump_task(task).removesuffix(" recompute") for task in getattr(program.devices[device], section)]


def plan(schedule: str, count: int, m: int, num_devices: int, stages: tuple[Pack, ...] = ()) -> Plan:
    packs = equal_packs(count, 1)
    return Plan(schedule, m, 1, packs, packs, ("recompute",) * count, num_devices, stages=stages)


def with_skip(count: int, producer: int, consumers: tuple[int, ...], has_grad: bool = True) -> Outline:
    chain = chain_outline(count)
    return Outline(chain.layers, (Value(producer, consumers, has_grad),))


def test_one_device_needs_none() -> None:
    program = parse("layers 1\nmicrobatches 1\ndevice 0\nbody\n  F0.m0@0\n  B0.m0@0/0\n  U0@0\n")
    assert transfers(program) == program


def test_receives_stand_where_their_producers_end() -> None:
    """The second gradient comes while the first is used; neither stands before a forward that it depends on."""
    program = transfers(gpipe.write(plan("gpipe", 2, 2, 2, equal_packs(2, 1)), chain_outline(2)))
    assert lines(program, 0) == [
        "F0.m0@0 stashes=0",
        "S a0.m0 >1",
        "F0.m1@0 stashes=0",
        "S a0.m1 >1",
        "R d0.m0 <1",
        "R d0.m1 <1",
        "B0.m0@0/0",
        "B0.m1@0/0",
        "U0@0",
    ]
    assert lines(program, 1) == [
        "R a0.m0 <0",
        "R a0.m1 <0",
        "F1.m0@0 stashes=1",
        "F1.m1@0 stashes=1",
        "B1.m0@0/0",
        "S d0.m0 >0",
        "B1.m1@0/0",
        "S d0.m1 >0",
        "U1@0",
    ]


def test_gradients_of_a_value_with_several_consumers_hop_down_the_chain() -> None:
    outline = with_skip(4, 0, (1, 3))
    program = transfers(gpipe.write(plan("gpipe", 4, 1, 4, equal_packs(4, 1)), outline))
    moved = [[line for line in lines(program, device) if line[:2] in ("S ", "R ")] for device in range(4)]
    assert moved == [
        ["S a0.m0 >1", "S a0.m0 >3", "R d0.m0 <1"],
        ["R a0.m0 <0", "R d0.m0 <3", "S d0.m0 >0"],
        [],
        ["R a0.m0 <0", "S d0.m0 >1"],
    ]
    assert lines(program, 1).index("R d0.m0 <3") < lines(program, 1).index("B1.m0@0/0")


def test_values_without_gradient_come_forward_only() -> None:
    program = transfers(gpipe.write(plan("gpipe", 2, 1, 2, equal_packs(2, 1)), with_skip(2, 0, (1,), False)))
    assert [line for line in lines(program, 0) if "d0" in line] == []
    assert "R a0.m0 <0" in lines(program, 1)


def test_a_sum_that_comes_back_is_dropped_in_between() -> None:
    """Layers 3, 2 and 1 consume value 0; their backwards run on devices 0, 1, 0: the sum goes there and back."""
    program = transfers(harmony_pp.write(plan("harmony_pp", 4, 1, 2), with_skip(4, 0, (1, 2, 3))))
    moved = [[line for line in lines(program, device) if "d0" in line] for device in range(2)]
    assert moved == [
        ["S d0.m0 >1", "D d0.m0", "R d0.m0 <1", "S d0.m0 >1"],
        ["R d0.m0 <0", "S d0.m0 >0", "D d0.m0", "R d0.m0 <0"],
    ]


def test_a_stash_travels_to_where_its_backward_runs() -> None:
    """On three devices the forward of layer 1 runs on device 1, the backward of layer 2 on device 0."""
    program = transfers(harmony_pp.write(plan("harmony_pp", 3, 1, 3), chain_outline(3)))
    assert [line for line in lines(program, 1) if line.startswith("S a1")] == ["S a1.m0 >0", "S a1.m0 >2"]
    assert lines(program, 0).index("R a1.m0 <1") < lines(program, 0).index("B2.m0@0/0")


def test_what_is_ready_early_is_received_early() -> None:
    """Device 0 makes skips faster than device 2 needs them: they are taken as they come, so none blocks device 0."""
    outline = Outline(chain_outline(3).layers, (*chain_outline(3).values, Value(0, (2,))))
    program = transfers(harmony_pp.write(plan("harmony_pp", 3, 4, 3), outline))
    first = lines(program, 2).index("F2.m0@0 stashes=2")
    assert [line for line in lines(program, 2)[:first] if line.startswith("R a2")] == [
        "R a2.m0 <0",
        "R a2.m1 <0",
        "R a2.m2 <0",
    ]


def test_sections_receive_what_they_send() -> None:
    """2BW runs ahead: what the prologue sends for the first body is received in the prologue."""
    program = transfers(two_bw.write(plan("2bw", 3, 3, 3, equal_packs(3, 1)), chain_outline(3)))
    assert lines(program, 2, "prologue") == ["R a1.m0 <1"]
    assert lines(program, 1, "prologue") == ["R a0.m0 <0", "R a0.m1 <0", "F1.m0@-1 stashes=1 old", "S a1.m0 >2"]
    for section in ("prologue", "body", "epilogue"):
        sent = [line[2:].split(" >") for line in lines(program, 0, section) if line.startswith("S")]
        received = [line[2:].split(" <")[0] for line in lines(program, 1, section) if line.startswith("R a0")]
        assert [name for name, _ in sent] == received


def test_orders_that_deadlock_are_refused() -> None:
    program = parse(
        "layers 2\nvalues 0>1\nmicrobatches 2\n"
        "device 0\nbody\n  F0.m0@0\n  B0.m0@0/0\n  F0.m1@0\n  B0.m1@0/0\n  U0@0\n"
        "device 1\nbody\n  F1.m1@0\n  B1.m1@0/0\n  F1.m0@0\n  B1.m0@0/0\n  U1@0\n"
    )
    with pytest.raises(ProgramError, match="9 of 10 tasks wait for one another"):
        transfers(program)


def test_durations_move_receives() -> None:
    """Where the second stage is slow, its next input is ready long before it is needed, and comes in meanwhile."""
    written = gpipe.write(plan("gpipe", 2, 3, 2, equal_packs(2, 1)), chain_outline(2))
    slow = transfers(written, lambda task: 100 if isinstance(task, Forward) and task.first == 1 else 1)
    assert [line.split(" stashes")[0] for line in lines(slow, 1)][:4] == [
        "R a0.m0 <0",
        "R a0.m1 <0",
        "R a0.m2 <0",
        "F1.m0@0",
    ]
