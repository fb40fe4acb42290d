"""A profile and a memory budget -> the plan, its program and its forecast; or the smallest budget that would do."""

from dataclasses import dataclass, replace
from pathlib import Path

from counterpoint.core.costs import Costs
from counterpoint.core.errors import BudgetError
from counterpoint.core.machine import Device, Home, Link, Machine, Tier
from counterpoint.core.plan import Plan
from counterpoint.core.profile import LayerCost, Profile
from counterpoint.core.program import Program
from counterpoint.core.units import format_bytes
from counterpoint.passes.residency import smallest_budgets
from counterpoint.planner.forecast import Forecast, forecast, run
from counterpoint.planner.search import Candidate, Freedom, search
from counterpoint.runtime.disk_file import free_bytes
from counterpoint.runtime.home_update import UPDATE_STAGING_BYTES
from counterpoint.runtime.probe import DiskSpeed, probe_disk
from counterpoint.schedules import write_program
from counterpoint.trainer.freed_memory import Freed, beside_freed

_MARGIN_PERCENT, MARGIN_BYTES = 4, 48 << 20  # for what an allocator keeps beyond what is asked of it
_SLACK_BYTES = 32 << 20  # by which the process itself may differ from one start to the next
_PROBE_BYTES = 256 << 20


def margin_bytes(memory_bytes: int) -> int:
    """The part of the memory which is not planned with."""
    return max(MARGIN_BYTES, memory_bytes * _MARGIN_PERCENT // 100)


@dataclass(frozen=True, slots=True)
class Decision:
    """The capacity of the machine's devices is what programs may use: memory without the process and a margin.

    `profile` is what the program was placed by; where freed tensors wait, its workspaces have room for them. `flush`
    is the program of the first steps, where the plan has some by flush.
    """

    machine: Machine
    plan: Plan
    program: Program
    forecast: Forecast
    profile: Profile
    freed: Freed
    flush: Program | None = None


def decide(
    profile: Profile,
    memory_bytes: int,
    base_bytes: int,
    model_bytes: int,
    folder: Path,
    freedom: Freedom,
    plan: Plan | None,
) -> Decision:
    """Search for a plan, or take the one that is given; `model_bytes` of the base are the user's own weights."""
    budget = usable_bytes(memory_bytes, base_bytes)
    machine = this_machine(budget, folder)
    profile = with_home_updates(profile, machine)
    try:
        if plan is not None:
            machine = beside_staging(machine, plan.host_layers)
            program, timeline = run(profile, machine, plan, steps=3)
        else:
            machine, found = _found(profile, machine, freedom)
            plan, program, timeline = found.plan, found.program, found.timeline
    except BudgetError as error:
        raise _too_small(profile, memory_bytes, base_bytes, model_bytes, plan, error) from error
    profile, program, timeline, freed = beside_freed(profile, machine, plan, program, timeline)
    shown = forecast(profile, machine, plan, program, timeline)
    return Decision(machine, plan, program, shown, profile, freed)


def _found(profile: Profile, machine: Machine, freedom: Freedom) -> tuple[Machine, Candidate]:
    """The fastest plan; layers whose update would take half the memory may be updated at home if `freedom` allows."""
    budget = machine.devices[0].capacity_bytes
    found: list[tuple[Machine, Candidate]] = []
    smallest: list[int] = []
    for host_layers in dict.fromkeys(((), large_updates(profile, budget, freedom))):
        smaller = beside_staging(machine, host_layers)
        try:
            found.append((smaller, search(profile, smaller, replace(freedom, host_layers=host_layers))))
        except BudgetError as error:
            smallest += [(error.smallest_bytes or 0) + (UPDATE_STAGING_BYTES if host_layers else 0)]
    if not found:
        raise BudgetError("no plan fits, with updates on the device or at home", min(smallest))
    return min(found, key=lambda pair: pair[1].timeline.step_ns)


def large_updates(profile: Profile, budget: int, freedom: Freedom) -> tuple[int, ...]:
    """Layers that may be updated at home, and would take half the budget on a device."""
    return tuple(i for i, c in enumerate(profile.layers) if _update_bytes(c) * 2 > budget and i in freedom.host_layers)


def _update_bytes(cost: LayerCost) -> int:
    return cost.weight_bytes + cost.grad_bytes + cost.state_bytes


def beside_staging(machine: Machine, host_layers: tuple[int, ...]) -> Machine:
    """What is left of the budget when updates at home have their memory."""
    if not host_layers:
        return machine
    devices = (replace(d, capacity_bytes=max(1, d.capacity_bytes - UPDATE_STAGING_BYTES)) for d in machine.devices)
    return replace(machine, devices=tuple(devices))


def with_home_updates(profile: Profile, machine: Machine) -> Profile:
    """An update at home reads weights, gradient and state and writes weights and state."""
    home = machine.devices[0].homes[0]
    speed = min(machine.link(name).bytes_per_s for name in (*home.load, *home.evict))
    layers = []
    for cost in profile.layers:
        moved = 2 * _update_bytes(cost) - cost.grad_bytes
        layers.append(replace(cost, host_update_ns=cost.update_ns + moved * 10**9 // speed))
    return replace(profile, layers=tuple(layers))


def usable_bytes(memory_bytes: int, base_bytes: int) -> int:
    """What programs may use of the memory that is given."""
    return max(1, memory_bytes - base_bytes - margin_bytes(memory_bytes))


def this_machine(budget: int, folder: Path) -> Machine:
    """This machine as the planner sees it: RAM under a budget, and a disk whose two directions share its bandwidth."""
    speed = _disk_speed(folder.stat().st_dev, folder)
    home = Home("disk", ("disk read", "disk"), ("disk write", "disk"))
    links = (
        Link("disk read", speed.read_bytes_per_s, 100_000),
        Link("disk write", speed.write_bytes_per_s, 100_000),
        Link("disk", max(speed.read_bytes_per_s, speed.write_bytes_per_s, speed.both_bytes_per_s)),
    )
    held = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    return Machine("this machine", (Device("cpu", budget, (home,)),), links, (Tier("disk", free_bytes(folder) + held),))


_SPEEDS: dict[int, DiskSpeed] = {}


def _disk_speed(device: int, folder: Path) -> DiskSpeed:
    """Measured once for each file system."""
    if device not in _SPEEDS:
        _SPEEDS[device] = probe_disk(folder, min(_PROBE_BYTES, free_bytes(folder) // 2))
    return _SPEEDS[device]


def _too_small(
    profile: Profile, memory_bytes: int, base_bytes: int, model_bytes: int, plan: Plan | None, error: BudgetError
) -> BudgetError:
    """The same error in terms of the memory that the user gives."""
    smallest = error.smallest_bytes
    if smallest is None and plan is not None:
        smallest = smallest_budgets(write_program(plan, profile.outline()), Costs(profile, plan))[0]
    if smallest is None:
        return error
    live = smallest + base_bytes + _SLACK_BYTES
    needed = max(live + MARGIN_BYTES, live * 100 // (100 - _MARGIN_PERCENT))
    needed = -(-needed // 2**20) * 2**20
    own = (
        f" ({format_bytes(model_bytes)} of it the model's weights: build it on the meta device)" if model_bytes else ""
    )
    return BudgetError(
        f"{format_bytes(memory_bytes)} of memory cannot train this model: the process itself takes "
        f"{format_bytes(base_bytes)}{own}, and no plan fits into the rest; the smallest memory that works is "
        f"{needed >> 20}MiB",
        needed,
    )
