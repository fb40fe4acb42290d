"""Bytes over the host link per step: Harmony's formulas against our programs, then two measured models.

    python benchmarks/swap_volume.py

First a chain of equal layers on devices that hold the working set of one layer, where every byte can be accounted for:
what a program moves is the formula, less what a fused last pack saves, less what finds itself still there. Then BERT96
and GPT-2 XL on four GTX 1080 Ti. Bytes are counted in the body of the placed program.
"""

from collections import Counter
from collections.abc import Sequence
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
KINDS: dict[str, tuple[str, ...]] = {"weights": ("weight",), "grads": ("grad",), "state": ("state",)}
KINDS["activations"] = ("activation", "activation_grad", "saved")


@dataclass(frozen=True, slots=True)
class Case:
    """A system: its plan, and whether its virtual memory writes clean pages back."""

    title: str
    plan: Plan
    writes_clean: bool = False


@dataclass(frozen=True, slots=True)
class Account:
    """A step's transfers, counted in layers: of weights and gradients as the formula has them, and the shares saved.

    `fused` and `stays` are weights, `grads_stay` gradients.
    """

    weights: int
    grads: int
    state: int
    fused: int = 0
    stays: int = 0
    grads_stay: int = 0

    @property
    def expected(self) -> tuple[int, int, int]:
        """Weights, gradients and state that remain to be moved, in layers."""
        return self.weights - self.fused - self.stays, self.grads - self.grads_stay, self.state


def bare(num_layers: int) -> Profile:
    """Equal layers of which only weights, gradients and state take memory."""
    layer = LayerCost(
        "layer", Curve.proportional(10**6), Curve.proportional(2 * 10**6), 10**5, 10**6, 64 * MIB, 64 * MIB, 128 * MIB
    )
    values = tuple(ValueCost(i, (i + 1,), Curve.constant(0)) for i in range(num_layers - 1))
    return Profile("equal layers", (layer,) * num_layers, values)


def cases(profile: Profile, n: int, m: int, size: int = 1, pack: int = 1) -> list[Case]:
    """`m` microbatches of `size` for a device on its own, or for a pipeline of `n`."""
    num_layers = len(profile.layers)
    single, packs = equal_packs(num_layers, 1), equal_packs(num_layers, pack)
    stages = balanced([c.forward_ns.at(size) + c.backward_ns.at(size) for c in profile.layers], n)

    def plan(schedule: str, backward: tuple[Pack, ...], **more: object) -> Plan:
        forward = more.pop("forward_packs", backward)
        policies = ("recompute",) * len(backward)
        return Plan(schedule, m, size, backward, forward, policies, num_devices=n, **more)  # type: ignore[arg-type]

    data = plan("plain", single, num_replicas=n, residency="lru")
    pipe = plan("flush", single, stages=stages, residency="lru")
    fused = {"forward_packs": packs[:-1]}
    return [
        Case("DP + lru, writes clean pages", data, True),
        Case("DP + lru, drops clean pages", data),
        Case("PP + lru, writes clean pages", pipe, True),
        Case("PP + lru, drops clean pages", pipe),
        Case("Harmony-DP, last pack not fused", plan("harmony", packs, num_replicas=n)),
        Case("Harmony-DP", plan("harmony", packs, num_replicas=n, **fused)),
        Case("Harmony-PP, last pack not fused", plan("harmony_pp", packs)),
        Case("Harmony-PP", plan("harmony_pp", packs, **fused)),
        Case(
            "Harmony-PP, optimizer on the host",
            plan("harmony_pp", packs, host_layers=tuple(range(num_layers)), **fused),
        ),
    ]


def account(case: Case, spare: int = 0) -> Account:
    """What a system moves on devices that hold one layer's working set and the weights of `spare` layers more.

    For packs of one layer and stages of at least five; `spare` counts for Harmony-DP only. The working set is that of
    an update: weights, gradient and state, or four times the weights.
    """
    plan = case.plan
    n, m, layers = plan.num_devices, plan.num_microbatches, plan.num_layers
    per_visit = 2 if case.writes_clean else 1
    weights = (4 * m + 2 if case.writes_clean else 2 * m + 2) * layers
    match plan.schedule:
        case "plain":
            found = _turns(m, m - 1) + 1
            return Account(n * weights, n * 2 * m * layers, n * 2 * layers, 0, n * per_visit * found, n * 2)
        case "flush":
            stays = sum(_stage_visits(stage, n, m) for stage in range(n)) + layers
            return Account(weights, 2 * m * layers, 2 * layers, 0, per_visit * stays, 2 * layers)
        case "harmony":
            turn = 0 if plan.fused else 1
            return Account(n * 3 * layers, 0, n * 2 * layers, n * plan.fused, n * (1 + turn + 3 * spare))
        case _:
            return _wrapped(plan)


def _turns(at_the_top: int, at_the_bottom: int) -> int:
    """Visits to weights that are still there: where the order turns, it finds those of the last two layers."""
    return 2 * at_the_top + 2 * at_the_bottom


def _stage_visits(stage: int, n: int, m: int) -> int:
    """A stage turns at the top in each pair of a forward and a backward, at the bottom between pairs.

    With the last backwards come updates, which take all memory: a turn there finds one layer, and so does the next
    step's first forward.
    """
    ahead = min(n - 1 - stage, m)
    pairs = max(m - ahead, 1)
    return _turns(pairs, pairs - 1) - (ahead == 0 or m == 1) + 1


def _wrapped(plan: Plan) -> Account:
    """Harmony-PP: a layer finds its weights where its forward and its backward meet on a device, updates apart.

    Tasks are dealt in a row: forwards 0, 1, ..., then backwards. The turn is a backward that is dealt to a device right
    after the same layer's forward. Across steps, it is a device's last update and a forward before its first one.
    """
    n, layers, forwards = plan.num_devices, plan.num_layers, len(plan.forward_packs)
    turns = wraps = 0
    for layer in range(layers):
        backward = forwards + layers - 1 - layer
        turns += layer < forwards and backward - layer == n
        wraps += layer < min(n, forwards) and (backward - layer) % n == 0
    if plan.host_layers:
        return Account(2 * layers, layers, 0, layers - forwards, turns)
    return Account(3 * layers, 0, 2 * layers, layers - forwards, turns + wraps)


def moved_bytes(profile: Profile, server: Machine, case: Case, budgets: Sequence[int]) -> dict[str, int]:
    """Bytes of loads and evicts of one step, by kind."""
    costs = Costs(profile, case.plan)
    program = write_program(case.plan, profile.outline())
    homes = fill_homes(server, profile, case.plan.num_devices)
    policy, clean = case.plan.residency, case.writes_clean
    placed = place(program, costs, budgets, homes, policy, ahead=0, writes_clean=clean)
    found: Counter[str] = Counter()
    for part in placed.devices:
        for task in part.body:
            if isinstance(task, (Load, Evict)):
                found[task.buffer.kind] += costs.buffer_bytes(task.buffer)
    return {name: sum(found[kind] for kind in kinds) for name, kinds in KINDS.items()}


def moved_layers(profile: Profile, case: Case, spare: int = 0) -> tuple[int, int, int]:
    """Weights, gradients and state that a step moves within the working set of one layer, in layers."""
    layer, n = profile.layers[0], case.plan.num_devices
    least = max(smallest_budgets(write_program(case.plan, profile.outline()), Costs(profile, case.plan)))
    server = with_budget(machine("1080ti", n), least + spare * layer.weight_bytes)
    moved = moved_bytes(profile, server, case, [device.capacity_bytes for device in server.devices])
    sizes = (layer.weight_bytes, layer.grad_bytes, layer.state_bytes)
    whole = [divmod(moved[kind], size) for kind, size in zip(KINDS, sizes, strict=False)]
    assert not any(rest for _, rest in whole)
    return whole[0][0], whole[1][0], whole[2][0]


def formula_table() -> None:
    """Weights in multiples of |W|: the formula, the two shares, and what our program moves."""
    profile = bare(LAYERS)
    print(
        f"{LAYERS} equal layers, N = {DEVICES}, m = {MICROBATCHES}, {format_bytes(profile.weight_bytes)} of weights; "
        "per device the working set of one layer"
    )
    print(f"{'':36}{'weights / |W|':^33}{'grads / |W|':^17}{'state / |K|':^15}{'weights,':>12}")
    heads = f"{'formula':>8}{'fused':>8}{'stays':>8}{'moved':>9}{'formula  moved':>17}{'formula  moved':>15}"
    print(f"{'':36}{heads}{'lru / this':>12}")
    most = 0
    for case in cases(profile, DEVICES, MICROBATCHES):
        promised, moved = account(case), moved_layers(profile, case)
        most = most or moved[0]
        print(_formula_row(case.title, promised, moved, most), flush=True)


def _formula_row(title: str, promised: Account, moved: tuple[int, int, int], most: int) -> str:
    weights = (promised.weights, -promised.fused, -promised.stays, moved[0])
    cells = [f"{count / LAYERS:{width}.2f}" for count, width in zip(weights, (8, 8, 8, 9), strict=True)]
    others = (promised.grads, moved[1], promised.state, moved[2])
    cells += [
        f"{count / LAYERS:{width}.{digits}f}"
        for count, width, digits in zip(others, (9, 8, 8, 7), (0, 2, 0, 2), strict=True)
    ]
    note = "" if moved == promised.expected else "  not as accounted for"
    return f"{title:36}{''.join(cells)}{most / moved[0]:10.1f} x{note}"


def measured_table(name: str, minibatch: int, size: int, pack: int) -> None:
    server = machine("1080ti", DEVICES)
    profile = catalog.profile(name, server)
    print(f"\n{name}, minibatch {minibatch}, microbatches of {size}, {DEVICES} x 10 GiB; bytes per step")
    print(f"{'':36}{'weights':>12}{'grads':>12}{'state':>12}{'activations':>13}{'together':>12}")
    for case in cases(profile, DEVICES, minibatch // size, size, pack):
        plan = case.plan
        if plan.num_replicas > 1:
            plan = replace(plan, num_microbatches=minibatch // size // plan.num_replicas)
        budgets = [device.capacity_bytes for device in server.devices]
        moved = moved_bytes(profile, server, replace(case, plan=plan), budgets)
        texts = [format_bytes(moved[kind]) for kind in KINDS]
        total = format_bytes(sum(moved.values()))
        print(f"{case.title:36}{texts[0]:>12}{texts[1]:>12}{texts[2]:>12}{texts[3]:>13}{total:>12}", flush=True)


if __name__ == "__main__":
    formula_table()
    measured_table("bert96-1080ti", 64, 4, 4)
    measured_table("gpt2-xl-1080ti", 64, 2, 2)
