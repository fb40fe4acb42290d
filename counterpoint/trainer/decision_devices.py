"""A profile, several devices and wishes -> the plan that all of them run, the fastest of a few in simulation."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from counterpoint.core.errors import BudgetError
from counterpoint.core.machine import Device, Home, Link, Machine, Tier
from counterpoint.core.plan import Plan
from counterpoint.core.profile import Profile
from counterpoint.planner.defaults import PIPELINES, REPLICATED, PlanWishes, default_plan
from counterpoint.planner.forecast import flushing, forecast, run
from counterpoint.planner.placement import Placement
from counterpoint.planner.search import Freedom
from counterpoint.planner.servers import arrangements, num_servers
from counterpoint.trainer.decision import Decision, beside_staging, large_updates, this_machine, with_home_updates
from counterpoint.trainer.freed_memory import beside_freed

LOOPBACK_BYTES_PER_S = 1_000_000_000  # of gloo between processes of one machine
_LOOPBACK_NS = 100_000
NETWORK_BYTES_PER_S = 1_250_000_000  # 10 Gbit/s, unless the user says how fast it is
_NETWORK_NS = 200_000


def decide_for_devices(
    profile: Profile, machine: Machine, freedom: Freedom, plan: Plan | None, replicas: int | None
) -> Decision:
    """Simulate the candidates, or take the plan that is given; BudgetError if none fits."""
    profile = with_home_updates(profile, machine)
    best: tuple[Plan, int] | None = None
    refusal: BudgetError | ValueError | None = None
    for candidate in [plan] if plan is not None else _candidates(profile, machine, freedom, replicas):
        if isinstance(candidate, ValueError):
            refusal = refusal or candidate
            continue
        try:
            _, timeline = Placement(profile, beside_staging(machine, candidate.host_layers), candidate).simulated()
        except (BudgetError, ValueError) as error:
            refusal = error if refusal is None or isinstance(error, BudgetError) else refusal
            continue
        if best is None or timeline.step_ns < best[1]:
            best = candidate, timeline.step_ns
    if best is None:
        assert refusal is not None
        raise refusal
    chosen, machine = best[0], beside_staging(machine, best[0].host_layers)
    profile, program, timeline, freed = beside_freed(profile, machine, chosen, *run(profile, machine, chosen, steps=4))
    found = forecast(profile, machine, chosen, program, timeline)
    return Decision(machine, chosen, program, found, profile, freed)


def with_flush_steps(decision: Decision, flush_steps: int) -> Decision:
    """The same for a run whose first steps are by flush: on the same stages, within the same budgets."""
    if not flush_steps:
        return decision
    plan = replace(decision.plan, flush_steps=flush_steps)
    program, found = flushing(decision.profile, decision.machine, replace(decision.forecast, plan=plan))
    return replace(decision, plan=plan, forecast=found, flush=program)


def these_devices(
    budgets: Sequence[int], folder: Path, servers: Sequence[str] = (), network_bytes_per_s: int | None = None
) -> Machine:
    """Processes, each with its budget and a wire to the others; those of one server share its disk.

    `servers` names the server of each, by default one for all. The others' disks are taken to be as fast as this one,
    and one network of so many bytes per second joins each server to the rest.
    """
    single = this_machine(max(min(budgets), 1), folder)
    names = list(dict.fromkeys(servers)) or [""]
    count, speed = len(names), network_bytes_per_s or NETWORK_BYTES_PER_S
    links = [link for server in range(count) for link in _links_of_server(single, server, count, speed)]
    for index in range(len(budgets)):
        links += [Link(f"{way} {index}", LOOPBACK_BYTES_PER_S, _LOOPBACK_NS) for way in ("send", "receive")]
    places = [names.index(name) for name in servers] or [0] * len(budgets)
    devices = [_device(index, budget, places[index], count) for index, budget in enumerate(budgets)]
    tiers = [
        Tier(_at(tier.name, server, count), tier.capacity_bytes) for server in range(count) for tier in single.tiers
    ]
    text = f"{len(budgets)} processes" + (f" on {count} servers" if count > 1 else "")
    return Machine(text, tuple(devices), tuple(links), tuple(tiers))


def _device(index: int, budget: int, server: int, num_servers: int) -> Device:
    read, write, disk = (_at(name, server, num_servers) for name in ("disk read", "disk write", "disk"))
    out, into = ((f"from server {server}",), (f"to server {server}",)) if num_servers > 1 else ((), ())
    home = Home(disk, (read, disk), (write, disk))
    return Device(f"cpu {index}", max(budget, 1), (home,), (f"send {index}",), (f"receive {index}",), out, into, server)


def _links_of_server(single: Machine, server: int, num_servers: int, network_bytes_per_s: int) -> list[Link]:
    """A server's disk, and its wires to other servers if there are any."""
    links = [replace(link, name=_at(link.name, server, num_servers)) for link in single.links]
    if num_servers > 1:
        links += [Link(f"{way} server {server}", network_bytes_per_s, _NETWORK_NS) for way in ("from", "to")]
    return links


def _at(text: str, server: int, num_servers: int) -> str:
    return text if num_servers == 1 else f"{text} of server {server}"


def _candidates(
    profile: Profile, machine: Machine, freedom: Freedom, replicas: int | None
) -> Iterator[Plan | ValueError]:
    """Microbatch sizes, activation policies, packs, where large layers and where replicas are updated."""
    schedule = freedom.schedules[0]
    large = large_updates(profile, min(device.capacity_bytes for device in machine.devices), freedom)
    automatic = (None,) if len(freedom.pack_sizes) > 1 else ()
    packs = (*automatic, *(freedom.pack_sizes if schedule not in PIPELINES or not automatic else ()))
    for size in freedom.microbatch_sizes:
        for policy in freedom.activations:
            for pack in packs:
                wishes = PlanWishes(
                    schedule, freedom.minibatch_size, size, replicas, policy, pack, False, freedom.clipping,
                    freedom.residency,
                )  # fmt: skip
                try:
                    found = default_plan(profile, machine, wishes)
                except ValueError as error:
                    yield error
                    continue
                for host_layers in dict.fromkeys(((), large)):
                    yield from arrangements(replace(found, host_layers=host_layers), machine)
                if found.num_replicas > 1 and schedule in REPLICATED and num_servers(machine) == 1:
                    yield replace(found, shard_updates=True)
