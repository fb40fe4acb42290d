"""Seconds to write, place and simulate large programs on one core: 100,000 tasks, and 1,000 layers on 64 devices.

python benchmarks/simulator_speed.py
"""

import time
from itertools import pairwise

from counterpoint.core.costs import Costs
from counterpoint.core.homes import fill_homes
from counterpoint.core.machine import GIB
from counterpoint.core.profile import Curve, LayerCost, Profile, ValueCost
from counterpoint.passes.residency import place
from counterpoint.planner.defaults import PlanWishes, default_plan
from counterpoint.planner.machines import machine, with_budget
from counterpoint.schedules import write_program
from counterpoint.simulator import simulate

MS, MIB = 10**6, 2**20


def uniform(num_layers: int) -> Profile:
    """Layers of 100 MiB of weights and 8 MiB of activations."""
    layer = LayerCost(
        "layer", Curve.proportional(4 * MS), Curve.proportional(8 * MS), 5 * MS, 20 * MS,
        100 * MIB, 100 * MIB, 200 * MIB, saved_bytes=Curve.proportional(64 * MIB),
    )  # fmt: skip
    values = tuple(ValueCost(i, (i + 1,), Curve.proportional(8 * MIB)) for i in range(num_layers - 1))
    return Profile(f"{num_layers} layers", (layer,) * num_layers, values)


def measure(title: str, goal_s: int, num_layers: int, num_devices: int, wishes: PlanWishes, steps: int) -> None:
    profile, server = uniform(num_layers), with_budget(machine("v100", num_devices), 8 * GIB)
    plan = default_plan(profile, server, wishes)
    costs, marks = Costs(profile, plan), [time.process_time()]
    program = write_program(plan, profile.outline())
    marks.append(time.process_time())
    budgets = tuple(device.capacity_bytes for device in server.devices)
    program = place(program, costs, budgets, fill_homes(server, profile, num_devices))
    marks.append(time.process_time())
    timeline = simulate(program, costs, server, steps)
    marks.append(time.process_time())
    written, placed, simulated = (b - a for a, b in pairwise(marks))
    print(f"{title}: {plan.schedule}, {len(timeline.spans):,} tasks in {steps} steps")
    print(f"  write {written:.1f} s, place {placed:.1f} s, simulate {simulated:.1f} s")
    print(f"  together {marks[-1] - marks[0]:.1f} s of processor time, goal {goal_s} s", flush=True)


if __name__ == "__main__":
    few = PlanWishes("harmony_pp", minibatch=140, microbatch=1, layers_per_pack=1)
    measure("100,000 tasks", 5, 50, 4, few, 1)
    many = PlanWishes("flush", minibatch=64, microbatch=1, layers_per_pack=4, activations="recompute")
    measure("1,000 layers on 64 devices", 20, 1000, 64, many, 1)
