"""Where loads and drops stand in a placed body: by need, out of the way of what is still being written."""

from dataclasses import replace
from itertools import pairwise

import pytest

from counterpoint.core.check import check
from counterpoint.core.costs import Costs
from counterpoint.core.homes import fill_homes
from counterpoint.core.machine import Device, Home, Link, Machine, Tier
from counterpoint.core.plan import Plan, equal_packs
from counterpoint.core.profile import Curve, LayerCost, Profile, ValueCost
from counterpoint.core.program import Program, lane, unroll
from counterpoint.core.task import Buffer, Drop, Evict, Load, Task
from counterpoint.passes.lives import device_reads, device_writes
from counterpoint.passes.residency import place, smallest_budgets
from counterpoint.schedules import write_program
from counterpoint.simulator import simulate

MB, MS = 10**6, 10**6


def chain(num_layers: int, first: int = 4) -> Profile:
    """Layers of equal size, the first one, like an embedding, some times as large and quick to compute."""
    layers = tuple(
        LayerCost(
            f"layer {i}", Curve.constant(MS if size > 1 else 20 * MS), Curve.constant(MS if size > 1 else 40 * MS),
            MS, MS, size * MB, size * MB, 2 * size * MB,
        )
        for i, size in enumerate([first] + [1] * (num_layers - 1))
    )  # fmt: skip
    values = tuple(ValueCost(i, (i + 1,), Curve.constant(MB // 20)) for i in range(num_layers - 1))
    return Profile("chain", layers, values)


def server(num_devices: int, capacity: int, bytes_per_s: int) -> Machine:
    homes = (Home("disk", ("read",), ("write",)),)
    devices = tuple(Device(f"device {d}", capacity, homes, ("bus",), ("bus",)) for d in range(num_devices))
    links = (Link("read", bytes_per_s), Link("write", bytes_per_s), Link("bus", 10**10))
    return Machine("server", devices, links, (Tier("disk", 10**12),))


def harmony(num_devices: int, num_layers: int = 24, m: int = 4) -> Plan:
    packs, policies = equal_packs(num_layers, 1), ("recompute",) * num_layers
    schedule = "harmony_pp" if num_devices > 1 else "harmony"
    return Plan(schedule, m, 1, packs, packs[:-1], policies, num_devices)


def placed(
    plan: Plan, spare_percent: int, ahead: int, bytes_per_s: int, knows_speed: bool = True
) -> tuple[Program, int]:
    """The program with a little more memory than it needs, and how long a step of it takes in simulation."""
    profile = chain(plan.num_layers)
    costs, order = Costs(profile, plan), write_program(plan, profile.outline())
    capacity = max(smallest_budgets(order, costs)) * (100 + spare_percent) // 100
    machine = server(plan.num_devices, capacity, bytes_per_s)
    homes = fill_homes(machine, profile, plan.num_devices)
    assert homes.evict_bytes_per_s == (bytes_per_s,) * plan.num_devices
    homes = homes if knows_speed else replace(homes, evict_bytes_per_s=())
    program = place(order, costs, (capacity,) * plan.num_devices, homes, ahead=ahead)
    assert not check(program, costs)
    return program, simulate(program, costs, machine, 4).step_ns


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("spare_percent", [0, 10, 30])
def test_loads_come_in_the_order_of_need_also_around_the_end_of_a_step(num_devices: int, spare_percent: int) -> None:
    program, _ = placed(harmony(num_devices), spare_percent, 0, 10**8)
    for device, part in enumerate(program.devices):
        tasks = list(unroll(program, device, 4))
        begin = len(part.prologue)
        needs = []
        for position in range(begin, begin + 2 * len(part.body)):
            task = tasks[position]
            if isinstance(task, Load):
                later = range(position + 1, len(tasks))
                needs.append(next(p for p in later if task.buffer in _touched(program, tasks[p])))
        assert needs, "nothing moves: this tests nothing"
        assert all(a <= b for a, b in pairwise(needs))


def _touched(program: Program, task: Task) -> list[Buffer]:
    if lane(task) != "compute":
        return []
    return [*device_reads(task, program.outline), *device_writes(task, program.outline)]


def test_what_is_written_last_goes_in_the_next_step() -> None:
    """The first layer's state is updated at the end of a step: the next one begins beside its evict."""
    program, _ = placed(harmony(1), 20, 0, 10**8)
    body = program.devices[0].body
    updates = [p for p, task in enumerate(body) if lane(task) == "compute"]
    end = body[updates[-1] :]
    written = [task.buffer for task in end if isinstance(task, Evict)]
    assert written
    dropped = [task.buffer for task in end if isinstance(task, Drop)]
    assert not set(written) & set(dropped)
    names = [b._replace(number=b.number - 1) for b in written]
    assert all(any(isinstance(task, Drop) and task.buffer == name for task in body) for name in names)


@pytest.mark.parametrize(("num_devices", "ahead"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_loads_that_keep_out_of_the_way_of_evicts_make_steps_faster(num_devices: int, ahead: int) -> None:
    plan = harmony(num_devices)
    _, before = placed(plan, 10, ahead, 2 * 10**8, knows_speed=False)
    _, after = placed(plan, 10, ahead, 2 * 10**8)
    assert after < before
