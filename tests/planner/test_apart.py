"""A decision made in another process is the one that would have been made here, and so are its refusals."""

import json
from dataclasses import replace

import pytest

from counterpoint.core.errors import BudgetError, ExecutionError
from counterpoint.core.machine import Device, Home, Link, Machine, Tier
from counterpoint.core.profile import Curve, LayerCost, Profile, ValueCost
from counterpoint.planner import apart
from counterpoint.planner.apart import Question, decide_apart
from counterpoint.planner.decision import Decision
from counterpoint.planner.search import Freedom

MIB, MS = 2**20, 10**6


def profile() -> Profile:
    cost = LayerCost(
        "layer", Curve.proportional(8 * MS), Curve.proportional(16 * MS), MS, MS, 4 * MIB, 4 * MIB, 8 * MIB,
        saved_bytes=Curve.proportional(2 * MIB), forward_fresh_ns=Curve.proportional(MS),
    )  # fmt: skip
    values = tuple(ValueCost(i, (i + 1,), Curve.proportional(MIB)) for i in range(5))
    return Profile("six", (cost,) * 6, values)


def machine(num_devices: int, capacity_bytes: int) -> Machine:
    home = Home("disk", ("read",), ("write",))
    wires = [Link(f"{way} {i}", 10**9) for i in range(num_devices) for way in ("send", "receive")]
    devices = (
        Device(f"cpu {i}", capacity_bytes, (home,), (f"send {i}",), (f"receive {i}",)) for i in range(num_devices)
    )
    links = (Link("read", 10**9), Link("write", 10**9), *wires)
    return Machine("some", tuple(devices), links, (Tier("disk", 10**12),))


FREEDOM = Freedom(8, (1, 2), host_layers=tuple(range(6)))
ONE = Question(profile(), machine(1, 40 * MIB), FREEDOM)
SEVERAL = Question(profile(), machine(2, 64 * MIB), replace(FREEDOM, schedules=("2bw",)), flush_steps=2)


@pytest.mark.parametrize("question", [ONE, SEVERAL, replace(ONE, plan=ONE.answer().plan)])
def test_the_answer_is_the_same(question: Question) -> None:
    found = decide_apart(question)
    assert found == question.answer()
    assert Decision.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_several_devices_may_begin_by_flush() -> None:
    assert decide_apart(SEVERAL).flush is not None


def test_refusals_come_through() -> None:
    with pytest.raises(BudgetError) as found:
        decide_apart(replace(ONE, machine=machine(1, MIB)))
    smallest = found.value.smallest_bytes
    assert smallest is not None
    decide_apart(replace(ONE, machine=machine(1, smallest)))
    with pytest.raises(ValueError, match="does not divide"):
        decide_apart(replace(SEVERAL, freedom=replace(SEVERAL.freedom, microbatch_sizes=(3,))))


def test_a_process_that_dies_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "to_json", lambda value: {"profile": 1})
    monkeypatch.setattr(apart.sys, "executable", "/bin/false")
    with pytest.raises(ExecutionError, match="ended with code 1"):
        decide_apart(ONE)
