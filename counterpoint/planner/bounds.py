"""Profile x Machine x Plan -> what a step takes at least, without a simulation; for plans of one device."""

from collections import Counter

from counterpoint.core.costs import Costs
from counterpoint.core.machine import Machine
from counterpoint.core.plan import Plan
from counterpoint.core.profile import Profile
from counterpoint.core.task import Backward, Forward


def least_ns(profile: Profile, machine: Machine, plan: Plan) -> int:
    """All its computations in a row, or all that must cross the busiest link if that takes longer."""
    return max(_compute_ns(profile, machine, plan), _link_ns(profile, machine, plan))


def num_tasks(plan: Plan) -> int:
    """Computations of a step, about."""
    forwards = len(plan.forward_packs) // plan.forward_group
    backwards = len(plan.backward_packs) // plan.backward_group
    return plan.num_microbatches * (forwards + backwards) + len(plan.backward_packs)


def _compute_ns(profile: Profile, machine: Machine, plan: Plan) -> int:
    costs, speed = Costs(profile, plan), machine.devices[0].speed_percent
    total = 0
    for pack in plan.forward_packs:
        task = Forward(pack.first, pack.last, 0, 0, count=plan.forward_group)
        total += costs.duration_ns(task, speed) * (plan.num_microbatches // plan.forward_group)
    for pack, policy in zip(plan.backward_packs, plan.activations, strict=True):
        fused = plan.fused and pack == plan.backward_packs[-1]
        again = Backward(pack.first, pack.last, 0, 0, 0, fused or policy == "recompute", plan.backward_group)
        total += costs.duration_ns(again, speed) * (plan.num_microbatches // plan.backward_group)
    at_home = set(plan.host_layers)
    updates = sum(cost.update_ns for layer, cost in enumerate(profile.layers) if layer not in at_home)
    return total + updates * 100 // speed


def _link_ns(profile: Profile, machine: Machine, plan: Plan) -> int:
    """Weights and state that find no place are loaded and written back in every step."""
    device = machine.devices[0]
    at_home = set(plan.host_layers)
    held = [c.weight_bytes + c.state_bytes for layer, c in enumerate(profile.layers) if layer not in at_home]
    moved = max(0, sum(held) - device.capacity_bytes)
    if not moved or not device.homes or plan.residency == "none":
        return 0
    crossings: list[Counter[str]] = [Counter((*home.load, *home.evict)) for home in device.homes]
    return min(max(moved * n * 10**9 // machine.link(name).bytes_per_s for name, n in c.items()) for c in crossings)
