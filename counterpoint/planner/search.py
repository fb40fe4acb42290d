"""Profile x Machine -> the Plan whose simulation is fastest: microbatches, packs, and a policy for each pack.

First a grid of microbatch sizes, pack sizes and one policy for all packs; then, from the best of it on, variants: a
policy of its own for each pack, and larger packs for forwards. What cannot be faster than what was found is not tried.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from counterpoint.core.errors import BudgetError
from counterpoint.core.machine import Machine
from counterpoint.core.plan import Pack, Plan, equal_packs
from counterpoint.core.profile import Profile
from counterpoint.core.program import Program
from counterpoint.core.timeline import Timeline
from counterpoint.core.units import format_bytes
from counterpoint.passes.residency import smallest_budgets
from counterpoint.planner.bounds import least_ns, num_tasks
from counterpoint.planner.placement import Placement
from counterpoint.planner.variants import ended_variants, forward_variants, policy_variants

PACK_SIZES = (1, 2, 3, 4)
WORTH_PERMILLE = 5  # by which a plan must be able to win to be tried
MOST_TASKS = 8_000  # to simulate for the grid, and again for the variants; then what was found is good enough
HOPELESS_PERCENT = 140  # of the best is a policy's best if it is not tried any further


@dataclass(frozen=True, slots=True)
class Freedom:
    """What the search may choose from; a single entry is a choice made by hand.

    `activations` are chosen from for each pack. Forward packs are as backward packs, or join them up to one of
    `forward_pack_sizes`. Each doubling of the microbatch must make a step faster by `doubling_permille`: larger
    computations take and give back more memory, which costs what a simulation does not see.
    """

    minibatch_size: int
    microbatch_sizes: tuple[int, ...]
    schedules: tuple[str, ...] = ("harmony",)
    pack_sizes: tuple[int, ...] = PACK_SIZES
    activations: tuple[str, ...] = ("evict", "recompute")
    clipping: bool = False
    residency: str = "planned"
    host_layers: tuple[int, ...] = ()
    forward_pack_sizes: tuple[int, ...] = (2, 4, 8)
    doubling_permille: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    plan: Plan
    program: Program
    timeline: Timeline


def search(profile: Profile, machine: Machine, freedom: Freedom) -> Candidate:
    """The fastest plan for the machine's first device; BudgetError names the smallest budget that fits."""
    trials = _Trials(profile, machine, freedom.doubling_permille)
    _try_grid(trials, [_ordered(profile, machine, _plans(profile, freedom, policy)) for policy in freedom.activations])
    if trials.best is None:
        raise trials.refusal()
    trials.tasks_left = MOST_TASKS
    for middle, width in ((50, 25), (None, 12), (None, 6)) if len(freedom.activations) > 1 else ():
        for plan in policy_variants(trials.best.plan, profile, freedom.activations, middle, width):
            trials.take(plan)
    for plan in ended_variants(trials.best.plan, profile) if len(freedom.pack_sizes) > 1 else ():
        trials.take(plan)
    for plan in forward_variants(trials.best.plan, freedom.forward_pack_sizes):
        trials.take(plan)
    plan = trials.best.plan
    return Candidate(plan, *Placement(profile, machine, plan).fastest())


def _try_grid(trials: "_Trials", columns: list[list[Plan]]) -> None:
    """The policies' plans in turn: a policy that is far behind by then is left at that."""
    fastest = [0] * len(columns)
    for row in zip_longest(*columns):
        for number, plan in enumerate(row):
            best = trials.best
            if plan is None or (best and fastest[number] * 100 > best.timeline.step_ns * HOPELESS_PERCENT):
                continue
            step_ns = trials.take(plan)
            if step_ns:
                fastest[number] = min(fastest[number] or step_ns, step_ns)


class _Trials:
    """Plans tried so far: the best of them, and the smallest budget of those that do not fit."""

    def __init__(self, profile: Profile, machine: Machine, doubling_permille: int = 0) -> None:
        self.profile, self.machine, self.doubling_permille = profile, machine, doubling_permille
        self.best: Candidate | None = None
        self.smallest: int | None = None
        self.tasks_left = MOST_TASKS

    def take(self, plan: Plan) -> int:
        """Try a plan if it may win; its step time, 0 if it was not tried or does not fit."""
        if self.best is None or (self.tasks_left > 0 and self._may_win(plan, self.best)):
            return self._try(plan)
        return 0

    def _may_win(self, plan: Plan, best: Candidate) -> bool:
        least = least_ns(self.profile, self.machine, plan)
        return least * (1000 + WORTH_PERMILLE) < best.timeline.step_ns * 1000

    def _try(self, plan: Plan) -> int:
        placement = Placement(self.profile, self.machine, plan, quick=True)
        try:
            program, timeline = placement.simulated()
        except BudgetError as error:
            need = max(error.smallest_bytes or 0, smallest_budgets(placement.order, placement.costs)[0])
            self.smallest = need if self.smallest is None else min(self.smallest, need)
            return 0
        self.tasks_left -= program.num_tasks
        found = Candidate(plan, program, timeline)
        if self.best is None or self._handicapped_ns(found) < self._handicapped_ns(self.best):
            self.best = found
        return timeline.step_ns

    def _handicapped_ns(self, candidate: Candidate) -> int:
        doublings = candidate.plan.microbatch_size.bit_length() - 1
        return candidate.timeline.step_ns * (1000 + self.doubling_permille * doublings) // 1000

    def refusal(self) -> BudgetError:
        device, need = self.machine.devices[0], self.smallest or 0
        return BudgetError(
            f"no plan fits {device.name} (need {format_bytes(need)}, budget {format_bytes(device.capacity_bytes)}); "
            f"smallest budget that fits: {need} bytes",
            self.smallest,
        )


def _ordered(profile: Profile, machine: Machine, plans: Iterator[Plan]) -> list[Plan]:
    """Most promising first; of those alike in percent, the ones with fewer tasks, for they take less time to try."""
    found = [(least_ns(profile, machine, plan), plan) for plan in plans]
    lowest = max(1, min((bound for bound, _ in found), default=1))
    found.sort(key=lambda pair: (pair[0] * 100 // lowest, num_tasks(pair[1])))
    return [plan for _, plan in found]


def _plans(profile: Profile, freedom: Freedom, policy: str) -> Iterator[Plan]:
    for size in freedom.microbatch_sizes:
        if freedom.minibatch_size % size:
            continue
        for schedule in freedom.schedules:
            for pack_size in freedom.pack_sizes:
                yield plan_of(len(profile.layers), schedule, freedom, size, pack_size, policy)


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
