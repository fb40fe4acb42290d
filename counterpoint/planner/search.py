"""Profile x Machine -> the Plan whose simulation is fastest: packs, microbatch size and activation policy."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from counterpoint.core.costs import Costs
from counterpoint.core.errors import BudgetError
from counterpoint.core.homes import fill_homes
from counterpoint.core.machine import Machine
from counterpoint.core.plan import Pack, Plan, equal_packs
from counterpoint.core.profile import Profile
from counterpoint.core.program import Program
from counterpoint.core.timeline import Timeline
from counterpoint.core.units import format_bytes
from counterpoint.passes.residency import place, smallest_budgets
from counterpoint.planner.forecast import kept_layers
from counterpoint.schedules import write_program
from counterpoint.simulator import simulate


@dataclass(frozen=True, slots=True)
class Freedom:
    """What the search may choose from; a single entry is a choice made by hand."""

    minibatch_size: int
    microbatch_sizes: Sequence[int]
    schedules: Sequence[str] = ("harmony",)
    pack_sizes: Sequence[int] = (1, 2, 4)
    activations: Sequence[str] = ("evict", "recompute")
    clipping: bool = False
    residency: str = "planned"
    host_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    plan: Plan
    program: Program
    timeline: Timeline


def search(profile: Profile, machine: Machine, freedom: Freedom) -> Candidate:
    """Simulate every combination that fits and take the fastest; BudgetError names the smallest budget that fits."""
    best: Candidate | None = None
    smallest: int | None = None
    for plan in _plans(profile, freedom):
        costs = Costs(profile, plan)
        program = write_program(plan, profile.outline())
        try:
            candidate = _try(profile, machine, plan, program, costs)
        except BudgetError as error:
            need = max(error.smallest_bytes or 0, smallest_budgets(program, costs)[0])
            smallest = need if smallest is None else min(smallest, need)
            continue
        if best is None or candidate.timeline.step_ns < best.timeline.step_ns:
            best = candidate
    if best is None:
        budget = machine.devices[0].capacity_bytes
        raise BudgetError(
            f"no plan fits {machine.devices[0].name} (need {format_bytes(smallest or 0)}, budget "
            f"{format_bytes(budget)}); smallest budget that fits: {smallest or 0} bytes",
            smallest,
        )
    return best


def _plans(profile: Profile, freedom: Freedom) -> Iterator[Plan]:
    num_layers = len(profile.layers)
    for size in freedom.microbatch_sizes:
        if freedom.minibatch_size % size:
            continue
        for schedule in freedom.schedules:
            for pack_size in freedom.pack_sizes:
                for policy in freedom.activations:
                    yield plan_of(num_layers, schedule, freedom, size, pack_size, policy)


def plan_of(
    num_layers: int, schedule: str, freedom: Freedom, microbatch_size: int, pack_size: int, policy: str
) -> Plan:
    """Packs of equal size, the last one layer alone and fused where the schedule allows."""
    fused = schedule == "harmony" and num_layers > 1
    packs = equal_packs(num_layers - 1, pack_size) if fused else equal_packs(num_layers, pack_size)
    backward = (*packs, Pack(num_layers - 1, num_layers - 1)) if fused else packs
    return Plan(
        schedule,
        freedom.minibatch_size // microbatch_size,
        microbatch_size,
        backward,
        packs,
        (policy,) * len(packs) + (("recompute",) if fused else ()),
        host_layers=freedom.host_layers,
        clipping=freedom.clipping,
        residency=freedom.residency,
    )


def _try(profile: Profile, machine: Machine, plan: Plan, program: Program, costs: Costs) -> Candidate:
    homes = fill_homes(machine, profile, 1)
    budget = machine.devices[0].capacity_bytes
    placed = place(program, costs, (budget,), homes, plan.residency, kept_layers(plan), quick=True)
    return Candidate(plan, placed, simulate(placed, costs, machine, steps=3))
