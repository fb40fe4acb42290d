"""Profile x Machine x Freedom -> Decision: the plan, its program and its forecast, for one device."""

from dataclasses import dataclass, replace
from typing import Any

from counterpoint.core.errors import BudgetError
from counterpoint.core.files import from_json, to_json
from counterpoint.core.homes import UPDATE_STAGING_BYTES
from counterpoint.core.machine import Machine
from counterpoint.core.plan import Plan
from counterpoint.core.profile import LayerCost, Profile
from counterpoint.core.program import Program
from counterpoint.core.text import dump, parse
from counterpoint.planner.forecast import Forecast, forecast, run
from counterpoint.planner.freed_memory import UNDECIDED_FRESH_PERCENT, Freed, beside_freed
from counterpoint.planner.search import Candidate, Freedom, search


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

    def to_json(self) -> Any:
        """Values as JSON, programs in their text form."""
        values = {name: to_json(getattr(self, name)) for name in ("machine", "plan", "forecast", "profile", "freed")}
        programs = {"program": dump(self.program), "flush": dump(self.flush) if self.flush else None}
        return values | programs

    @staticmethod
    def from_json(data: Any) -> "Decision":
        return Decision(
            from_json(Machine, data["machine"], "the machine"),
            from_json(Plan, data["plan"], "the plan"),
            parse(data["program"]),
            from_json(Forecast, data["forecast"], "the forecast"),
            from_json(Profile, data["profile"], "the profile"),
            data["freed"],
            parse(data["flush"]) if data["flush"] else None,
        )


def decide(profile: Profile, machine: Machine, freedom: Freedom, plan: Plan | None) -> Decision:
    """Search for a plan, or take the one that is given; BudgetError if none fits."""
    profile = with_home_updates(profile, machine)
    undecided = profile.with_fresh(UNDECIDED_FRESH_PERCENT)
    if plan is not None:
        machine = beside_staging(machine, plan.host_layers)
        program, _ = run(undecided, machine, plan, steps=3)
    else:
        machine, found = _found(undecided, machine, freedom)
        plan, program = found.plan, found.program
    profile, program, timeline, freed = beside_freed(profile, machine, plan, program)
    return Decision(machine, plan, program, forecast(profile, machine, plan, program, timeline), profile, freed)


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
        layers.append(replace(cost, host_update_ns=cost.host_update_ns + moved * 10**9 // speed))
    return replace(profile, layers=tuple(layers))
