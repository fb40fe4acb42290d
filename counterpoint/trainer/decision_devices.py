"""A profile, several devices and wishes -> the plan that all of them run, the fastest of a few in simulation."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from counterpoint.core.errors import BudgetError
from counterpoint.core.machine import Device, Home, Link, Machine
from counterpoint.core.plan import Plan
from counterpoint.core.profile import Profile
from counterpoint.core.program import Program
from counterpoint.core.timeline import Timeline
from counterpoint.planner.defaults import REPLICATED, Wishes, default_plan
from counterpoint.planner.forecast import forecast, run
from counterpoint.planner.search import Freedom
from counterpoint.trainer.decision import Decision, this_machine
from counterpoint.trainer.freed_memory import beside_freed

LOOPBACK_BYTES_PER_S = 1_000_000_000  # of gloo between processes of one machine
_LOOPBACK_NS = 100_000


def decide_for_devices(
    profile: Profile, budgets: Sequence[int], folder: Path, freedom: Freedom, plan: Plan | None, replicas: int | None
) -> Decision:
    """Simulate the candidates, or take the plan that is given; BudgetError if none fits."""
    machine = these_devices(budgets, folder)
    best: tuple[Plan, Program, Timeline] | None = None
    refusal: BudgetError | ValueError | None = None
    for candidate in [plan] if plan is not None else _candidates(profile, machine, freedom, replicas):
        if isinstance(candidate, ValueError):
            refusal = refusal or candidate
            continue
        try:
            program, timeline = run(profile, machine, candidate, steps=4)
        except (BudgetError, ValueError) as error:
            refusal = error if refusal is None or isinstance(error, BudgetError) else refusal
            continue
        if best is None or timeline.step_ns < best[2].step_ns:
            best = candidate, program, timeline
    if best is None:
        assert refusal is not None
        raise refusal
    profile, program, timeline, freed = beside_freed(profile, machine, *best)
    found = forecast(profile, machine, best[0], program, timeline)
    return Decision(machine, min(budgets), best[0], program, found, profile, freed)


def these_devices(budgets: Sequence[int], folder: Path) -> Machine:
    """Processes of this machine: each has its budget and a wire to the others, all share the disk."""
    single = this_machine(max(min(budgets), 1), folder)
    home = Home("disk", ("disk read", "disk"), ("disk write", "disk"))
    devices, links = [], list(single.links)
    for index, budget in enumerate(budgets):
        links += [Link(f"{way} {index}", LOOPBACK_BYTES_PER_S, _LOOPBACK_NS) for way in ("send", "receive")]
        path = ((f"send {index}",), (f"receive {index}",))
        devices.append(Device(f"cpu {index}", max(budget, 1), (home,), *path, *path))
    return Machine(f"{len(budgets)} processes", tuple(devices), tuple(links), single.tiers)


def _candidates(
    profile: Profile, machine: Machine, freedom: Freedom, replicas: int | None
) -> Iterator[Plan | ValueError]:
    """Microbatch sizes, activation policies, packs, and with replicas who updates."""
    schedule = freedom.schedules[0]
    automatic = (None,) if len(freedom.pack_sizes) > 1 else ()
    packs = (*automatic, *(freedom.pack_sizes if schedule in REPLICATED or not automatic else ()))
    for size in freedom.microbatch_sizes:
        for policy in freedom.activations:
            for pack in packs:
                wishes = Wishes(
                    schedule, freedom.minibatch_size, size, replicas, policy, pack, False, freedom.clipping,
                    freedom.residency,
                )  # fmt: skip
                try:
                    found = default_plan(profile, machine, wishes)
                except ValueError as error:
                    yield error
                    continue
                yield found
                if found.num_replicas > 1 and schedule in REPLICATED:
                    yield replace(found, shard_updates=True)
