"""Bytes that planned residency moves against the least possible, by exhaustive search, for small random cases.

    python benchmarks/residency_optimality.py --cases 500 --seed 0

Then what it brings in time to move more than that: the placement that the planner takes after simulating several,
against the one that moves least, for the same cases on random machines and for some models.
"""

import argparse
import random
from collections import Counter
from collections.abc import Iterator, Sequence

from counterpoint.core.costs import Costs
from counterpoint.core.machine import GIB, Device, Home, Link, Machine, Tier
from counterpoint.core.plan import SCHEDULES, Plan, equal_packs
from counterpoint.core.profile import Curve, LayerCost, Profile, ValueCost
from counterpoint.core.program import Program
from counterpoint.core.task import Buffer
from counterpoint.core.units import format_bytes
from counterpoint.passes.body import Body, Gap
from counterpoint.passes.gaps import body_of
from counterpoint.passes.ladder import choose
from counterpoint.passes.lives import Life, collect, mark_shared
from counterpoint.passes.residency import smallest_budgets
from counterpoint.planner import catalog
from counterpoint.planner.defaults import PlanWishes, default_plan
from counterpoint.planner.machines import machine, with_budget
from counterpoint.planner.placement import AHEADS, Placement
from counterpoint.schedules import write_program

PIPELINES = ("model_parallel", "gpipe", "flush", "2bw")
MOST_GAPS, MOST_POSITIONS = 40, 32


def ratios(count: int, seed: int) -> Iterator[float]:
    """For each case the bytes moved over the least possible."""
    rng = random.Random(seed)
    for _ in range(count):
        program, device, costs, lives = _case(rng)
        body = body_of(program, device, costs, lives, frozenset(), 0)
        low, high = max(body.needs), max(body.occupied())
        budget = rng.randint(low, max(low, high - 1))
        least = least_traffic(body, budget)
        choose(body, budget)
        assert max(body.occupied()) <= budget
        yield body.traffic() / least if least else 1.0 + body.traffic()


def time_ratios(count: int, seed: int) -> Iterator[tuple[float, float]]:
    """For each case time and bytes of the placement that the planner takes, over those of the one that moves least."""
    rng = random.Random(seed)
    while count:
        num_layers = rng.randint(2, 6)
        profile, plan = random_profile(rng, num_layers), random_plan(rng, rng.choice(SCHEDULES), num_layers)
        program, costs = write_program(plan, profile.outline()), Costs(profile, plan)
        least = max(smallest_budgets(program, costs))
        budget = rng.randint(least, 2 * least)
        placement = Placement(profile, _machine(rng, plan.num_devices, budget), plan)
        moves_least, chosen = placement.simulated(0)[1], placement.fastest()[1]
        moved, more = (sum(size for _, size in t.steady_link_bytes) for t in (moves_least, chosen))
        if moved:
            count -= 1
            yield chosen.step_ns / moves_least.step_ns, more / moved


def _machine(rng: random.Random, num_devices: int, budget: int) -> Machine:
    """Links that move the bytes of a layer in about the time it computes."""
    links = tuple(Link(name, rng.randint(1, 20) * 10**9, 10) for name in ("down", "up", "peer"))
    home = Home("host", ("down",), ("up",))
    devices = (Device("device", budget, (home,), ("peer",), ("peer",)),) * num_devices
    return Machine("random", devices, links, (Tier("host", 10**9),))


MODELS = (
    ("gpt2-xl", "harmony", "laptop", 1, 8, 6), ("gpt2-10b", "harmony", "1080ti", 1, 8, 16),
    ("gpt2-10b", "harmony_pp", "1080ti", 4, 8, 10), ("gpt2-10b", "harmony", "1080ti", 4, 32, 10),
    ("bert96", "harmony", "1080ti", 1, 16, 4), ("llama-8b", "harmony", "4090", 1, 8, 22),
)  # fmt: skip
"""Model, schedule, machine, devices, minibatch and GiB per device."""


def model_table() -> None:
    print(f"\n{'':44}{'time and bytes of a step with room beside':>46}{'taken':>9}")
    print(f"{'':44}{'0 computations':>18}{'1':>18}{'2':>18}")
    for name, schedule, server, num_devices, minibatch, gib in MODELS:
        place_on = with_budget(machine(server, num_devices), gib * GIB)
        profile = catalog.profile(name, place_on)
        plan = default_plan(profile, place_on, PlanWishes(schedule, minibatch))
        placement = Placement(profile, place_on, plan)
        found = [placement.simulated(ahead)[1] for ahead in AHEADS]
        taken = placement.fastest()[1]
        cells = [f"{t.step_ns / 1e9:9.2f} s {format_bytes(sum(s for _, s in t.steady_link_bytes)):>8}" for t in found]
        title = f"{name}, {schedule}, {num_devices} x {server}, {gib} GiB"
        print(f"{title:44}{''.join(f'{cell:>20}' for cell in cells)}{AHEADS[found.index(taken)]:9}", flush=True)


def _case(rng: random.Random) -> tuple[Program, int, Costs, dict[Buffer, Life]]:
    """One device of a random small program whose body has something to choose."""
    while True:
        schedule = rng.choice(SCHEDULES)
        profile = random_profile(rng, rng.randint(2, 4))
        plan = random_plan(rng, schedule, len(profile.layers))
        program, costs = write_program(plan, profile.outline()), Costs(profile, plan)
        lives = [collect(program, device, costs) for device in range(len(program.devices))]
        mark_shared(program, lives)
        device = rng.randrange(len(lives))
        body = body_of(program, device, costs, lives[device], frozenset(), 0)
        if 1 < len(body.gaps) <= MOST_GAPS and body.num_positions <= MOST_POSITIONS:
            return program, device, costs, lives[device]


def random_profile(rng: random.Random, num_layers: int) -> Profile:
    layers = []
    for index in range(num_layers):
        size = rng.randint(100, 1500)
        saved, workspace = rng.randint(50, 600), rng.randint(0, 100)
        layers.append(
            LayerCost(
                f"layer {index}",
                Curve.constant(100),
                Curve.constant(200),
                10,
                10,
                size,
                size,
                2 * size,
                saved_bytes=Curve.constant(saved),
                backward_workspace_bytes=Curve.constant(workspace),
            )
        )
    values = [ValueCost(i, (i + 1,), Curve.constant(rng.randint(20, 400))) for i in range(num_layers - 1)]
    if num_layers > 2 and rng.random() < 0.3:
        values.append(ValueCost(0, (num_layers - 1,), Curve.constant(rng.randint(20, 400))))
    return Profile("random", tuple(layers), tuple(values))


def random_plan(rng: random.Random, schedule: str, num_layers: int) -> Plan:
    packs = equal_packs(num_layers, rng.randint(1, 2))
    policy = "recompute" if schedule == "harmony_pp" else rng.choice(("recompute", "evict"))
    stages = equal_packs(num_layers, 2) if schedule in PIPELINES else ()
    least = max(len(stages) - 1, 1)
    return Plan(
        schedule,
        rng.randint(least, least + 2),
        1,
        packs,
        packs[:-1] if schedule == "harmony" and policy == "recompute" else packs,
        (policy,) * len(packs),
        len(stages) if stages else 2 if schedule == "harmony_pp" else 1,
        stages=stages,
        host_layers=tuple(range(num_layers)) if rng.random() < 0.3 else (),
    )


def least_traffic(body: Body, budget: int) -> int:
    """Branch and bound over what to give up at the fullest position; every freed byte costs at least its load."""
    body.keep_all()
    search = _Search(body, budget)
    search.go(body.occupied(), 0)
    return search.least


class _Search:
    """`over` says which gaps cover a position, and how often: in a cyclic body one may lie over itself."""

    def __init__(self, body: Body, budget: int) -> None:
        self.budget, self.count = budget, body.num_positions
        gaps = [gap for gap in body.gaps if not gap.fixed]
        self.least = sum(2 * gap.size for gap in gaps) + 1
        self.over: list[list[tuple[Gap, int]]] = [[] for _ in range(self.count)]
        for gap in gaps:
            for position, times in Counter(self._positions(gap)).items():
                self.over[position].append((gap, times))
        self.decided: set[int] = set()
        self.written: Counter[int] = Counter()

    def _positions(self, gap: Gap) -> list[int]:
        return [offset % self.count for offset in range(gap.span_start, gap.span_start + gap.span_length)]

    def go(self, levels: list[int], cost: int) -> None:
        """Decide the most promising gap over the fullest position both ways."""
        worst = max(range(self.count), key=levels.__getitem__)
        if levels[worst] <= self.budget:
            self.least = min(self.least, cost)
            return
        if cost + max(self._bound(p, level - self.budget) for p, level in enumerate(levels)) >= self.least:
            return
        free = [gap for gap, _ in self.over[worst] if id(gap) not in self.decided]
        gap = max(free, key=lambda gap: gap.size * gap.span_length / self._cost(gap))
        self.decided.add(id(gap))
        self._without(gap, levels.copy(), cost)
        self.go(levels, cost)
        self.decided.remove(id(gap))

    def _without(self, gap: Gap, levels: list[int], cost: int) -> None:
        for position in self._positions(gap):
            levels[position] -= gap.size
        cost += self._cost(gap)
        self.written[gap.group] += gap.dirty
        self.go(levels, cost)
        self.written[gap.group] -= gap.dirty

    def _cost(self, gap: Gap) -> int:
        return gap.size * (2 if gap.dirty and not self.written[gap.group] else 1)

    def _bound(self, position: int, wanted: int) -> float:
        """The least that freeing so many bytes here can cost: the cheapest per byte first, the last one in part."""
        if wanted <= 0:
            return 0
        free = [
            (self._cost(gap), gap.size * times) for gap, times in self.over[position] if id(gap) not in self.decided
        ]
        total = 0.0
        for cost, size in sorted(free, key=lambda pair: pair[0] / pair[1]):
            taken = min(size, wanted)
            total += cost * taken / size
            wanted -= taken
        return total - 1e-6 if wanted <= 0 else self.least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    count, seed = arguments.cases, arguments.seed
    _summary("bytes over the least possible", list(ratios(count, seed)))
    times, traffic = zip(*time_ratios(count, seed), strict=True)
    _summary("time of the placement taken over that of least traffic", times)
    _summary("and its bytes over those of least traffic", traffic)
    model_table()


def _summary(title: str, found: Sequence[float]) -> None:
    ordered = sorted(found)
    within = [f"{share}% within {ordered[(len(ordered) - 1) * share // 100]:.3f}" for share in (50, 90, 99, 100)]
    print(f"{title}: {', '.join(within)}; 1 in {sum(r == 1.0 for r in ordered)} of {len(ordered)} cases", flush=True)


if __name__ == "__main__":
    main()
