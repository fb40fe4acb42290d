"""Bytes over the host link per step: Harmony's formulas against our programs, then two measured models.

    python benchmarks/swap_volume.py

A uniform chain, much larger than memory, on N = 4 devices with m = 32 microbatches each (data parallel) or together
(pipeline); then BERT96 and GPT-2 XL on four GTX 1080 Ti. Bytes are counted in the body of the placed program.
"""

from collections import Counter
from dataclasses import dataclass, replace

from counterpoint.core.costs import Costs
from counterpoint.core.homes import fill_homes
from counterpoint.core.machine import Machine
from counterpoint.core.plan import Pack, Plan, equal_packs
from counterpoint.core.profile import Curve, LayerCost, Profile, ValueCost
from counterpoint.core.task import Evict, Load
from counterpoint.core.units import format_bytes
from counterpoint.passes.residency import place, smallest_budgets
from counterpoint.planner import catalog
from counterpoint.planner.machines import machine, with_budget
from counterpoint.planner.partition import balanced
from counterpoint.schedules import write_program

DEVICES, MICROBATCHES, LAYERS = 4, 32, 64
MIB = 2**20
KINDS = {"weights": ("weight",), "grads": ("grad",), "state": ("state",)}
KINDS["activations"] = ("activation", "activation_grad", "saved")


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table. Formulas are in multiples of the model's weight and state bytes."""

    title: str
    plan: Plan
    formula: tuple[int, int, int]
    writes_clean: bool = False


def uniform(num_layers: int) -> Profile:
    layer = LayerCost(
        "layer", Curve.proportional(10**6), Curve.proportional(2 * 10**6), 10**5, 10**6,
        64 * MIB, 64 * MIB, 128 * MIB, saved_bytes=Curve.proportional(4 * MIB),
    )  # fmt: skip
    values = tuple(ValueCost(i, (i + 1,), Curve.proportional(MIB)) for i in range(num_layers - 1))
    return Profile("uniform chain", (layer,) * num_layers, values)


def cases(profile: Profile, m: int, size: int, pack: int) -> list[Case]:
    """`m` microbatches of `size` for a device on its own, or for a pipeline."""
    num_layers, n = len(profile.layers), DEVICES
    single, packs = equal_packs(num_layers, 1), equal_packs(num_layers, pack)
    stages = balanced([c.forward_ns.at(size) + c.backward_ns.at(size) for c in profile.layers], n)

    def plan(schedule: str, backward: tuple[Pack, ...], **more: object) -> Plan:
        forward = more.pop("forward_packs", backward)
        policies = ("recompute",) * len(backward)
        return Plan(schedule, m, size, backward, forward, policies, num_devices=n, **more)  # type: ignore[arg-type]

    replicated, staged = {"num_replicas": n}, {"stages": stages}
    data, pipe = plan("plain", single, **replicated), plan("flush", single, **staged)
    lru = {"residency": "lru"}
    return [
        Case("DP + lru, writes clean pages", replace(data, **lru), ((4 * m + 2) * n, 2 * m * n, 2 * n), True),
        Case("DP + lru, drops clean pages", replace(data, **lru), ((2 * m + 2) * n, 2 * m * n, 2 * n)),
        Case("PP + lru, writes clean pages", replace(pipe, **lru), (4 * m + 2, 2 * m, 2), True),
        Case("PP + lru, drops clean pages", replace(pipe, **lru), (2 * m + 2, 2 * m, 2)),
        Case("Harmony-DP, last pack not fused", plan("harmony", packs, **replicated), (3 * n, 0, 2 * n)),
        Case("Harmony-DP", plan("harmony", packs, forward_packs=packs[:-1], **replicated), (3 * n, 0, 2 * n)),
        Case("Harmony-PP, last pack not fused", plan("harmony_pp", packs), (3, 0, 2)),
        Case("Harmony-PP", plan("harmony_pp", packs, forward_packs=packs[:-1]), (3, 0, 2)),
        Case(
            "Harmony-PP, optimizer on the host",
            plan("harmony_pp", packs, forward_packs=packs[:-1], host_update=True),
            (2, 1, 0),
        ),
    ]


def moved_bytes(profile: Profile, server: Machine, case: Case) -> dict[str, int]:
    """Bytes of loads and evicts of one step, by kind."""
    costs = Costs(profile, case.plan)
    program = write_program(case.plan, profile.outline())
    budgets = tuple(device.capacity_bytes for device in server.devices)
    homes = fill_homes(server, profile, DEVICES)
    policy, clean = case.plan.residency, case.writes_clean
    placed = place(program, costs, budgets, homes, policy, ahead=0, writes_clean=clean)
    found: Counter[str] = Counter()
    for part in placed.devices:
        for task in part.body:
            if isinstance(task, (Load, Evict)):
                found[task.buffer.kind] += costs.buffer_bytes(task.buffer)
    return {name: sum(found[kind] for kind in kinds) for name, kinds in KINDS.items()}


def formula_table() -> None:
    """Everything in multiples of the weights |W| (of the state |K| for state), each as formula and as counted."""
    profile = uniform(LAYERS)
    rows = cases(profile, MICROBATCHES, 1, 2)
    need = max(smallest_budgets(write_program(rows[-2].plan, profile.outline()), Costs(profile, rows[-2].plan)))
    server = with_budget(machine("1080ti", DEVICES), need * 5 // 4)
    print(
        f"{LAYERS} equal layers, N = {DEVICES}, m = {MICROBATCHES}, {format_bytes(profile.weight_bytes)} of weights, "
        f"{format_bytes(server.devices[0].capacity_bytes)} per device; in |W|, for state in |K|: formula, ours"
    )
    print(f"{'':36}{'weights':>14}{'grads':>14}{'state':>12}{'activations':>14}{'weights, lru / this':>22}")
    moved = {case.title: moved_bytes(profile, server, case) for case in rows}
    most = moved[rows[0].title]["weights"]
    for case in rows:
        print(_formula_row(profile, case, moved[case.title], most), flush=True)
    for name, width in (("Harmony-DP", DEVICES), ("Harmony-PP", 1)):
        apart, fused = (moved[title]["weights"] for title in (f"{name}, last pack not fused", name))
        stays = 3 * width - apart / profile.weight_bytes
        print(f"{name}: what stays saves {stays:.2f} |W|, fusing {(apart - fused) / profile.weight_bytes:.2f} |W| more")


def _formula_row(profile: Profile, case: Case, moved: dict[str, int], most: int) -> str:
    """Stashes are the inputs of backward packs, once out and once in."""
    w, k, plan = profile.weight_bytes, profile.state_bytes, case.plan
    starts = [pack.first - 1 for pack in plan.backward_packs[1:]]
    stashes = sum(profile.values[value].value_bytes.at(plan.microbatch_size) for value in starts)
    stashed = 2 * stashes * plan.num_microbatches * plan.num_replicas
    weights, grads, state = case.formula
    return (
        f"{case.title:36}{weights:7}{moved['weights'] / w:7.1f}{grads:8}{moved['grads'] / w:6.1f}"
        f"{state:6}{moved['state'] / k:6.1f}{stashed / w:8.2f}{moved['activations'] / w:6.2f}"
        f"{most / max(moved['weights'], 1):20.1f} x"
    )


def measured_table(name: str, minibatch: int, size: int, pack: int) -> None:
    server = machine("1080ti", DEVICES)
    profile = catalog.profile(name, server)
    print(f"\n{name}, minibatch {minibatch}, microbatches of {size}, {DEVICES} x 10 GiB; bytes per step")
    print(f"{'':36}{'weights':>12}{'grads':>12}{'state':>12}{'activations':>13}{'together':>12}")
    for case in cases(profile, minibatch // size, size, pack):
        plan = case.plan
        if plan.num_replicas > 1:
            plan = replace(plan, num_microbatches=minibatch // size // plan.num_replicas)
        moved = moved_bytes(profile, server, replace(case, plan=plan))
        texts = [format_bytes(moved[kind]) for kind in KINDS]
        total = format_bytes(sum(moved.values()))
        print(f"{case.title:36}{texts[0]:>12}{texts[1]:>12}{texts[2]:>12}{texts[3]:>13}{total:>12}", flush=True)


if __name__ == "__main__":
    formula_table()
    measured_table("bert96-1080ti", 64, 4, 4)
    measured_table("gpt2-xl-1080ti", 64, 2, 2)
