"""Makespans of pipelines, exact against their closed forms; links shared fairly; timelines that keep to the edges."""

from fractions import Fraction

import pytest

from counterpoint.core.costs import Costs
from counterpoint.core.edges import unrolled
from counterpoint.core.machine import Device, Link, Machine
from counterpoint.core.plan import Plan, equal_packs
from counterpoint.core.profile import Curve, LayerCost, Profile, ValueCost
from counterpoint.schedules import write_program
from counterpoint.simulator import simulate
from counterpoint.simulator.network import Network

FORWARD_NS, BACKWARD_NS = 100, 200


def balanced_profile(depth: int) -> Profile:
    layers = tuple(
        LayerCost(f"layer {i}", Curve.constant(FORWARD_NS), Curve.constant(BACKWARD_NS), weight_bytes=8, grad_bytes=8)
        for i in range(depth)
    )
    return Profile("balanced", layers, tuple(ValueCost(i, (i + 1,), Curve.constant(4)) for i in range(depth - 1)))


def pipeline(schedule: str, depth: int, num_microbatches: int) -> Plan:
    stages = equal_packs(depth, 1)
    return Plan(schedule, num_microbatches, 1, stages, stages, ("keep",) * depth, num_devices=depth, stages=stages)


def instant_machine(depth: int) -> Machine:
    """Devices between which nothing takes time."""
    return Machine("instant", tuple(Device(f"device {i}", 10**9) for i in range(depth)))


@pytest.mark.parametrize(
    ("depth", "num_microbatches", "ratios"),
    [
        (4, 4, ("1.75", "1.75", "1.0375")),
        (8, 8, ("1.875", "1.875", "1.04375")),
        (16, 64, ("1.234375", "1.234375", "1.01171875")),
    ],
)
def test_makespan_over_twenty_steps(depth: int, num_microbatches: int, ratios: tuple[str, str, str]) -> None:
    steps = 20
    ideal = steps * num_microbatches * (FORWARD_NS + BACKWARD_NS)
    profile = balanced_profile(depth)
    for schedule, ratio in zip(("gpipe", "flush", "2bw"), ratios, strict=True):
        plan = pipeline(schedule, depth, num_microbatches)
        program = write_program(plan, profile.outline())
        timeline = simulate(program, Costs(profile, plan), instant_machine(depth), steps)
        assert Fraction(timeline.makespan_ns, ideal) == Fraction(ratio), schedule


@pytest.mark.parametrize("schedule", ["gpipe", "flush", "2bw"])
def test_spans_start_after_what_they_wait_for_and_twice_gives_the_same(schedule: str) -> None:
    profile, plan, steps = balanced_profile(4), pipeline(schedule, 4, 5), 3
    program, costs = write_program(plan, profile.outline()), Costs(profile, plan)
    timeline = simulate(program, costs, instant_machine(4), steps)
    assert timeline == simulate(program, costs, instant_machine(4), steps)
    run = unrolled(program, steps)
    when = {(span.device, span.lane, span.task): span for span in timeline.spans}
    spans = [when[d, name, task] for d, name, task in zip(run.devices, run.lanes, run.tasks, strict=True)]
    for span, before in zip(spans, run.predecessors, strict=True):
        assert all(spans[other].end_ns <= span.start_ns for other in before)
    for group in run.meetings:
        assert len({spans[member].start_ns for member in group}) == 1


def ends(links: tuple[Link, ...], flows: list[tuple[tuple[str, ...], int]]) -> list[int]:
    """When each of some transfers that begin together ends."""
    network = Network(Machine("wires", (Device("device", 1),), links))
    for key, (path, size) in enumerate(flows):
        network.add(key, path, size, 0)
    found, now = [0] * len(flows), 0
    while (end := network.next_end_ns(now)) is not None:
        found[network.finish()] = now = end
    return found


def test_one_transfer_has_the_link_to_itself() -> None:
    assert ends((Link("a", 10**9),), [(("a",), 1000)]) == [1000]


def test_two_transfers_share_a_link_and_the_rest_goes_faster() -> None:
    assert ends((Link("a", 10**9),), [(("a",), 1000), (("a",), 3000)]) == [2000, 4000]


def test_what_one_cannot_use_the_other_gets() -> None:
    links = (Link("shared", 10**9), Link("narrow", 10**8))
    narrow, wide = ends(links, [(("shared", "narrow"), 100), (("shared",), 900)])
    assert (narrow, wide) == (1000, 1000)
