"""Idle time by cause, shared links and memory over time, on programs small enough to reckon by hand.

Links move one byte per nanosecond unless said otherwise.
"""

from dataclasses import replace

import pytest

from counterpoint.core.costs import Costs
from counterpoint.core.machine import Device, Home, Link, Machine, Tier
from counterpoint.core.outline import chain_outline
from counterpoint.core.plan import Plan, equal_packs
from counterpoint.core.profile import Curve, LayerCost, Profile, ValueCost
from counterpoint.core.program import DeviceProgram, Program
from counterpoint.core.task import (
    AllReduce,
    Backward,
    Clip,
    Drop,
    Evict,
    Forward,
    Load,
    Norm,
    Receive,
    Send,
    Task,
    Update,
    activation,
    grad,
    weight,
)
from counterpoint.core.timeline import Timeline, Wait
from counterpoint.simulator import simulate

WEIGHT, ACTIVATION, SAVED, WORKSPACE = 100, 50, 30, 7
FORWARD, BACKWARD, UPDATE, HOST_UPDATE = 10, 20, 5, 300


def profile(num_layers: int) -> Profile:
    layer = LayerCost(
        "layer",
        Curve.constant(FORWARD),
        Curve.constant(BACKWARD),
        UPDATE,
        HOST_UPDATE,
        WEIGHT,
        WEIGHT,
        saved_bytes=Curve.constant(SAVED),
        forward_workspace_bytes=Curve.constant(WORKSPACE),
    )
    values = tuple(ValueCost(i, (i + 1,), Curve.constant(ACTIVATION)) for i in range(num_layers - 1))
    return Profile("small", (layer,) * num_layers, values)


def machine(num_devices: int, shared: bool = False) -> Machine:
    """Each device has links to and from the host of its own, or all share one pair."""
    numbers = [0 if shared else index for index in range(num_devices)]
    names = [f"{way} {number}" for number in dict.fromkeys(numbers) for way in ("down", "up", "peer")]
    devices = tuple(
        Device(f"device {i}", 10**6, (Home("host", (f"down {n}",), (f"up {n}",)),), (f"peer {n}",), ())
        for i, n in enumerate(numbers)
    )
    return Machine("wires", devices, tuple(Link(name, 10**9) for name in names), (Tier("host", 10**6),))


def timeline(lists: list[list[Task]], num_layers: int, on: Machine, m: int = 1, steps: int = 1) -> Timeline:
    packs = equal_packs(num_layers, 1)
    costs = Costs(profile(num_layers), Plan("plain", m, 1, packs, packs, ("keep",) * num_layers))
    devices = tuple(DeviceProgram((), tuple(tasks), ()) for tasks in lists)
    return simulate(Program(chain_outline(num_layers), m, devices), costs, on, steps)


def test_waiting_for_a_load() -> None:
    tasks: list[Task] = [Load(weight(0, 0), "host"), Forward(0, 0, 0, 0, (0,)), Backward(0, 0, 0, 0, 0, False)]
    found = timeline([tasks], 1, machine(1))
    assert found.waits() == (Wait(0, 0, 100, "load"),)
    assert found.steady_idle_ns() == {"load": 100}
    assert found.step_ns == 100 + FORWARD + BACKWARD


def test_a_load_beside_a_computation_costs_nothing_until_it_takes_longer() -> None:
    """The second layer's weights come in during the first one's forward: 100 ns for 10."""
    tasks: list[Task] = [
        Load(weight(0, 0), "host"), Load(weight(1, 0), "host"), Forward(0, 0, 0, 0), Forward(1, 1, 0, 0),
    ]  # fmt: skip
    found = timeline([tasks], 2, machine(1))
    assert found.waits() == (Wait(0, 0, 100, "load"), Wait(0, 110, 200, "load"))
    assert found.makespan_ns == 210


def test_waiting_for_memory_that_an_evict_frees() -> None:
    """The second forward allocates, so it waits for the drop before it, and that for its evict."""
    tasks: list[Task] = [
        Load(weight(0, 0), "host"), Forward(0, 0, 0, 0), Evict(activation(0, 0), "host"), Drop(activation(0, 0)),
        Forward(0, 0, 1, 0),
    ]  # fmt: skip
    found = timeline([tasks], 2, machine(1), 2)
    assert found.waits() == (Wait(0, 0, 100, "load"), Wait(0, 110, 160, "evict"))
    assert found.steady_idle_ns() == {"load": 100, "evict": 50}


def test_waiting_for_a_peer_or_for_its_computation() -> None:
    """A transfer of 50 ns after a forward of 10 ns is the cause; after one of 200 ns it is the forward."""
    lists: list[list[Task]] = [
        [Forward(0, 0, 0, 0), Send(activation(0, 0), 1)],
        [Receive(activation(0, 0), 0), Forward(1, 1, 0, 0)],
    ]
    assert timeline(lists, 2, machine(2)).waits() == (Wait(1, 0, 60, "peer"),)
    slow = replace(machine(2), devices=tuple(replace(device, speed_percent=5) for device in machine(2).devices))
    assert timeline(lists, 2, slow).waits() == (Wait(1, 0, 250, "start"),)


def test_waiting_for_an_all_reduce() -> None:
    """Two peers move the whole gradient over each direction of their ring, when both are there."""
    both: list[Task] = [Forward(0, 0, 0, 0, (0,)), Backward(0, 0, 0, 0, 0, False), AllReduce(0, 0, 0, (0, 1))]
    found = timeline([[*both, Update(0, 0, 0)], [*both, Update(0, 0, 0)]], 1, machine(2))
    assert found.waits() == (Wait(0, 30, 130, "peer"), Wait(1, 30, 130, "peer"))
    assert found.step_ns == 135
    assert dict(found.link_bytes)["peer 0"] == dict(found.link_bytes)["peer 1"] == 100


def test_waiting_for_the_optimizer_on_the_host() -> None:
    """Gradient out 100, update 300, new weights in 100: the update is the longest part of the wait."""
    tasks: list[Task] = [
        Load(weight(0, 0), "host"), Forward(0, 0, 0, 0, (0,)), Backward(0, 0, 0, 0, 0, False), Drop(weight(0, 0)),
        Evict(grad(0, 0), "host"), Drop(grad(0, 0)), Update(0, 0, 0, host=True),
    ]  # fmt: skip
    found = timeline([tasks], 1, machine(1), steps=3)
    assert found.waits()[1] == Wait(0, 130, 630, "optimizer")
    assert found.step_ns == 500 + FORWARD + BACKWARD
    assert found.steady_idle_ns() == {"optimizer": 500}


def test_waiting_for_the_clip() -> None:
    """Device 0 waits for a backward more on device 1, and both until norms of 8 bytes are exchanged."""
    head: list[Task] = [Forward(0, 0, 0, 0, (0,)), Backward(0, 0, 0, 0, 0, False)]
    tail: list[Task] = [Norm(0, 0, 0), Clip(0, (0, 1)), Update(0, 0, 0, clipped=True)]
    found = timeline([head + tail, [*head, Backward(0, 0, 0, 0, 0, False), *tail]], 1, machine(2))
    assert found.waits() == (Wait(0, 30, 58, "start"), Wait(1, 50, 58, "optimizer"))


@pytest.mark.parametrize(("shared", "starts"), [(False, [100] * 4), (True, [400] * 4)])
def test_devices_share_a_link_fairly(shared: bool, starts: list[int]) -> None:
    tasks: list[Task] = [Load(weight(0, 0), "host"), Forward(0, 0, 0, 0)]
    found = timeline([tasks] * 4, 1, machine(4, shared))
    assert [span.start_ns for span in found.spans if span.lane == "compute"] == starts


def test_a_transfer_that_joins_later_gets_its_half_from_then_on() -> None:
    """Alone for 10 ns, then two for as long as both last: 90 left of the first take 180, of the second 10 remain."""
    first: list[Task] = [Load(weight(0, 0), "host"), Forward(0, 0, 0, 0)]
    late: list[Task] = [Forward(1, 1, 0, 0), Load(weight(0, 0), "host"), Forward(0, 0, 0, 0)]
    found = timeline([first, late], 2, machine(2, shared=True))
    loads = {span.device: (span.start_ns, span.end_ns) for span in found.spans if span.lane == "load"}
    assert loads == {0: (0, 190), 1: (10, 200)}
    assert dict(found.link_bytes)["down 0"] == 200


def curve(found: Timeline, tier: str) -> dict[int, int]:
    """Bytes held from each moment on."""
    return {point.time_ns: point.held_bytes for point in found.memory if point.tier == tier}


def test_memory_of_each_tier_over_time() -> None:
    """Weights in from 0 on, a forward's workspace and result, the result out to the host and back in."""
    tasks: list[Task] = [
        Load(weight(0, 0), "host"), Forward(0, 0, 0, 0), Evict(activation(0, 0), "host"), Drop(activation(0, 0)),
        Load(activation(0, 0), "host"), Drop(weight(0, 0)),
    ]  # fmt: skip
    found = timeline([tasks], 2, machine(1))
    assert curve(found, "device 0") == {
        0: 100,
        100: 100 + ACTIVATION + WORKSPACE,
        110: 100 + ACTIVATION,
        160: ACTIVATION,
    }
    assert curve(found, "host") == {0: 100, 110: 100 + ACTIVATION, 210: 100}
    assert found.peak_bytes() == {"device 0": 100 + ACTIVATION + WORKSPACE, "host": 150}
