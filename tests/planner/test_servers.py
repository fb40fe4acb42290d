"""Devices on several servers: what cannot run there is refused, and what crosses the network is what costs less."""

from dataclasses import replace

import pytest

from counterpoint.core.machine import Machine
from counterpoint.core.plan import SCHEDULES, Plan
from counterpoint.planner import catalog
from counterpoint.planner.defaults import PlanWishes, default_plan
from counterpoint.planner.forecast import run
from counterpoint.planner.servers import arrangements

MIB = 2**20


def two_servers(num_devices: int = 4, network_bytes_per_s: int = 100 * MIB) -> Machine:
    return catalog.machine("3090", num_devices, "fp32", servers=2, network_bytes_per_s=network_bytes_per_s)


def test_devices_are_spread_evenly_and_the_network_is_as_fast_as_told() -> None:
    machine = two_servers()
    assert [device.server for device in machine.devices] == [0, 0, 1, 1]
    assert machine.path(1, 2) == ("from server 0", "to server 1")
    assert {machine.link(name).bytes_per_s for name in machine.path(1, 2)} == {100 * MIB}
    assert not set(machine.path(0, 1)) & set(machine.path(1, 2))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"servers": 3}, "4 devices do not divide over 3 servers"),
        ({"servers": 2}, "say how fast the network between servers is"),
        ({"name": "laptop", "servers": 2}, "a laptop is one server"),
    ],
)
def test_servers_that_cannot_be(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        catalog.machine(**{"name": "4090", "num_devices": 4, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_but_one_has_a_plan_across_servers(schedule: str) -> None:
    machine = two_servers()
    profile = catalog.profile("tiny", machine)
    if schedule == "harmony_pp":
        with pytest.raises(ValueError, match=r"harmony_pp needs devices that share a home, and these are on 2 servers"):
            default_plan(profile, machine, PlanWishes(schedule))
        return
    assert run(profile, machine, default_plan(profile, machine, PlanWishes(schedule)))[1].step_ns > 0


def test_an_update_for_another_server_is_refused() -> None:
    machine = two_servers()
    profile = catalog.profile("tiny", machine)
    sharded = replace(default_plan(profile, machine, PlanWishes("harmony")), shard_updates=True)
    with pytest.raises(ValueError, match=r"layer 0 is updated on device \d, but device \d on another server uses it"):
        run(profile, machine, sharded)
    run(profile, catalog.machine("3090", 4, "fp32"), sharded)
    shared = default_plan(profile, machine, PlanWishes("flush", host_update=True))
    with pytest.raises(ValueError, match="on another server uses it"):
        run(profile, machine, shared)


def network_bytes(model: str, minibatch: int, microbatch: int, plan_number: int) -> tuple[int, int, Plan]:
    """What leaves the first server in a step of this arrangement, how long the step takes, and the plan."""
    machine = two_servers()
    profile = catalog.profile(model, machine)
    wishes = PlanWishes("gpipe", minibatch, microbatch, replicas=2)
    plan = arrangements(default_plan(profile, machine, wishes), machine)[plan_number]
    timeline = run(profile, machine, plan)[1]
    return dict(timeline.steady_link_bytes)["from server 0"], timeline.step_ns, plan


def test_heavy_weights_stay_on_a_server_and_activations_cross() -> None:
    together, apart = (network_bytes("llama-7b", 4, 2, number) for number in (0, 1))
    assert (together[2].replicas_apart, apart[2].replicas_apart) == (False, True)
    assert together[0] * 10 < apart[0]
    assert together[1] < apart[1]


def test_heavy_activations_stay_on_a_server_and_gradients_cross() -> None:
    together, apart = (network_bytes("tiny", 4096, 256, number) for number in (0, 1))
    assert apart[0] * 3 < together[0]
    assert apart[1] < together[1]


def test_one_server_has_one_arrangement() -> None:
    machine = catalog.machine("3090", 4, "fp32")
    profile = catalog.profile("tiny", machine)
    plan = default_plan(profile, machine, PlanWishes("gpipe", 64, 2, replicas=2))
    assert arrangements(plan, machine) == (plan,)
