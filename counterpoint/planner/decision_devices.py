"""A profile, several devices and wishes -> the plan that all of them run, the fastest of a few in simulation."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from counterpoint.core.errors import BudgetError
from counterpoint.core.machine import Machine
from counterpoint.core.plan import Plan
from counterpoint.core.profile import Profile
from counterpoint.planner.decision import Decision, beside_staging, large_updates, with_home_updates
from counterpoint.planner.defaults import PIPELINES, REPLICATED, PlanWishes, default_plan
from counterpoint.planner.forecast import flushing, forecast
from counterpoint.planner.freed_memory import UNDECIDED_FRESH_PERCENT, beside_freed
from counterpoint.planner.placement import Placement
from counterpoint.planner.search import Freedom
from counterpoint.planner.servers import arrangements, num_servers
from counterpoint.planner.variants import ended_variants

_PLACED_WITH_CARE = 3


def decide_for_devices(
    profile: Profile, machine: Machine, freedom: Freedom, plan: Plan | None, replicas: int | None
) -> Decision:
    """Simulate the candidates, or take the plan that is given; BudgetError if none fits."""
    profile = with_home_updates(profile, machine)
    undecided = profile.with_fresh(UNDECIDED_FRESH_PERCENT)
    candidates = [plan] if plan is not None else _candidates(undecided, machine, freedom, replicas)
    found: list[Decision] = []
    for candidate in _promising(undecided, machine, candidates):
        smaller = beside_staging(machine, candidate.host_layers)
        program, _ = Placement(undecided, smaller, candidate).fastest()
        placed_by, program, timeline, freed = beside_freed(profile, smaller, candidate, program, steps=4)
        expected = forecast(placed_by, smaller, candidate, program, timeline)
        found.append(Decision(smaller, candidate, program, expected, placed_by, freed))
    return min(found, key=lambda decision: decision.forecast.step_ns)


def _promising(profile: Profile, machine: Machine, candidates: Iterable[Plan | ValueError]) -> list[Plan]:
    """The few that are fastest when placed in the usual way, quickly; an error if none fits."""
    found: list[tuple[int, int, Plan]] = []
    refusal: BudgetError | ValueError | None = None
    for number, candidate in enumerate(candidates):
        if isinstance(candidate, ValueError):
            refusal = refusal or candidate
            continue
        placement = Placement(profile, beside_staging(machine, candidate.host_layers), candidate, quick=True)
        try:
            found.append((placement.simulated()[1].step_ns, number, candidate))
        except (BudgetError, ValueError) as error:
            refusal = error if refusal is None or isinstance(error, BudgetError) else refusal
    if not found:
        assert refusal is not None
        raise refusal
    return [candidate for _, _, candidate in sorted(found, key=lambda row: row[:2])[:_PLACED_WITH_CARE]]


def with_flush_steps(decision: Decision, flush_steps: int) -> Decision:
    """The same for a run whose first steps are by flush: on the same stages, within the same budgets."""
    if not flush_steps:
        return decision
    plan = replace(decision.plan, flush_steps=flush_steps)
    program, found = flushing(decision.profile, decision.machine, replace(decision.forecast, plan=plan))
    return replace(decision, plan=plan, forecast=found, flush=program)


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
                for plan in (found, *(ended_variants(found, profile) if automatic else ())):
                    for host_layers in dict.fromkeys(((), large)):
                        yield from arrangements(replace(plan, host_layers=host_layers), machine)
                if found.num_replicas > 1 and schedule in REPLICATED and num_servers(machine) == 1:
                    yield replace(found, shard_updates=True)
