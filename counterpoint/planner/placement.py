"""Profile x Machine x Plan -> its program, placed in the way whose simulation is fastest.

Least traffic and most overlap are at odds: room for transfers beside computations is room where something could have
stayed. How much of it is worth while depends on the machine, so a few amounts are simulated.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from counterpoint.core.costs import Costs
from counterpoint.core.homes import Homes, fill_homes
from counterpoint.core.machine import Machine
from counterpoint.core.plan import Plan
from counterpoint.core.profile import Profile
from counterpoint.core.program import Program
from counterpoint.core.task import Evict, Load
from counterpoint.core.timeline import Timeline
from counterpoint.passes.residency import place
from counterpoint.planner.servers import num_servers, refuse_far_updates
from counterpoint.schedules import write_program
from counterpoint.simulator import simulate

AHEADS = (0, 1, 2, 4, 6)  # computations beside which transfers have room, least traffic first
USUAL_AHEAD = 1
STEPS = 3  # to simulate: the last of them is as all that follow
MOST_TASKS = 6_000  # larger programs are placed in the usual way only
WORTH_PERMILLE = 10  # by which a placement must be faster to move more bytes
_MORE_THAN_ENOUGH = 2**60


@dataclass(frozen=True)
class Placement:
    """A plan on a machine, ready to be placed; `quick` chooses what stays with less care."""

    profile: Profile
    machine: Machine
    plan: Plan
    quick: bool = False

    @cached_property
    def costs(self) -> Costs:
        return Costs(self.profile, self.plan)

    @cached_property
    def order(self) -> Program:
        order = write_program(self.plan, self.profile.outline())
        if num_servers(self.machine) > 1:
            refuse_far_updates(self.plan, order, self.machine)
        return order

    @cached_property
    def homes(self) -> Homes:
        return fill_homes(self.machine, self.profile, self.plan.num_devices)

    @property
    def budgets(self) -> tuple[int, ...]:
        return tuple(device.capacity_bytes for device in self.machine.devices[: self.plan.num_devices])

    def placed(self, ahead: int = USUAL_AHEAD) -> Program:
        """The program within the devices' capacities; without swapping, whatever memory it takes."""
        plan, order, costs, homes = self.plan, self.order, self.costs, self.homes
        if plan.residency == "none":
            return replace(place(order, costs, (_MORE_THAN_ENOUGH,) * plan.num_devices, homes), budgets=())
        return place(
            order, costs, self.budgets, homes, plan.residency, kept_layers(plan), ahead=ahead, quick=self.quick
        )

    def simulated(self, ahead: int = USUAL_AHEAD, steps: int = STEPS) -> tuple[Program, Timeline]:
        program = self.placed(ahead)
        return program, simulate(program, self.costs, self.machine, steps)

    def fastest(self, steps: int = STEPS) -> tuple[Program, Timeline]:
        """The least traffic, or what is faster than that by a margin; `steps` are those of the timeline."""
        if self.plan.residency != "planned" or self.order.num_tasks > MOST_TASKS:
            return self.simulated(USUAL_AHEAD, steps)
        found = [self.simulated(AHEADS[0])]
        if _moves(found[0][0]):
            found += [self.simulated(ahead) for ahead in AHEADS[1:]]
        enough = min(timeline.step_ns for _, timeline in found) * (1000 + WORTH_PERMILLE) // 1000
        program, timeline = next(pair for pair in found if pair[1].step_ns <= enough)
        return program, timeline if steps == STEPS else simulate(program, self.costs, self.machine, steps)


def kept_layers(plan: Plan) -> frozenset[int]:
    """Layers whose saved tensors must stay on the device."""
    packs = zip(plan.backward_packs, plan.activations, strict=True)
    return frozenset(i for pack, policy in packs if policy == "keep" for i in range(pack.first, pack.last + 1))


def _moves(program: Program) -> bool:
    return any(isinstance(task, (Load, Evict)) for part in program.devices for task in part.body)
