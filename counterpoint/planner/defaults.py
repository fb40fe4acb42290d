"""A profile, a machine and a schedule's name into a sensible Plan, without a search."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from counterpoint.core.costs import Costs
from counterpoint.core.machine import Machine
from counterpoint.core.outline import Outline
from counterpoint.core.plan import SCHEDULES, Pack, Plan, equal_packs
from counterpoint.core.profile import Profile
from counterpoint.core.program import reads, renames, writes
from counterpoint.core.task import Backward, Forward, Task
from counterpoint.planner.names import nearest
from counterpoint.planner.partition import balanced, packs_within
from counterpoint.planner.servers import num_servers, refuse_schedule

PIPELINES = ("model_parallel", "gpipe", "flush", "2bw")
"""Schedules that give each device a stage of its own."""
REPLICATED = ("plain", "harmony")
"""Schedules that give each device the whole chain and a share of the minibatch."""

TASK_PERCENT = 40
"""What a task may need of its device's budget: what comes next and what leaves need room as well."""
PACKS_PER_DEVICE = 4
SIZES = (16, 8, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class PlanWishes:
    """What a person asked for; None leaves the choice to us."""

    schedule: str = "harmony_pp"
    minibatch: int = 64
    microbatch: int | None = None
    replicas: int | None = None
    activations: str | None = None
    layers_per_pack: int | None = None
    host_update: bool = False
    clipping: bool = False
    residency: str = "planned"


def default_plan(profile: Profile, machine: Machine, wishes: PlanWishes) -> Plan:
    """Stages balanced by time, packs that leave room for prefetch, recompute where keeping does not fit."""
    if wishes.schedule not in SCHEDULES:
        near = nearest(wishes.schedule, SCHEDULES)
        raise ValueError(f"unknown schedule {wishes.schedule!r}{near}; known are {', '.join(SCHEDULES)}")
    refuse_schedule(wishes.schedule, num_servers(machine))
    num_devices = len(machine.devices)
    replicas = wishes.replicas or (num_devices if wishes.schedule in REPLICATED else 1)
    if num_devices % replicas:
        raise ValueError(f"{num_devices} devices do not divide into {replicas} replicas")
    size = wishes.microbatch or _microbatch_size(profile, machine, wishes, replicas)
    if wishes.minibatch % (size * replicas):
        raise ValueError(
            f"a minibatch of {wishes.minibatch} does not divide into microbatches of {size} on {replicas} replicas; "
            f"use a multiple of {size * replicas}"
        )
    num_microbatches = wishes.minibatch // (size * replicas)
    return _Draft(profile, machine, wishes, replicas, size, num_microbatches).plan()


def task_bytes(task: Task, costs: Costs, outline: Outline) -> int:
    """Device memory that must be there at once for a task: what it reads, what it writes, and its workspace."""
    touched = dict.fromkeys((*reads(task, outline), *writes(task, outline)))
    for old, _ in renames(task, outline):
        touched.pop(old)
    return sum(costs.buffer_bytes(buffer) for buffer in touched) + costs.workspace_bytes(task)


def _microbatch_size(profile: Profile, machine: Machine, wishes: PlanWishes, replicas: int) -> int:
    """The largest size that fits comfortably and leaves as many microbatches as there are positions."""
    positions = 1 if wishes.schedule in REPLICATED else len(machine.devices) // replicas
    room = min(device.capacity_bytes for device in machine.devices) // 2
    for size in SIZES:
        fits = _Draft(profile, machine, wishes, replicas, size, 1).largest_layer_bytes() <= room
        divides = wishes.minibatch % (size * replicas) == 0
        if fits and divides and wishes.minibatch // (size * replicas) >= positions:
            return size
    return 1


def _limit(machine: Machine) -> int:
    return min(device.capacity_bytes for device in machine.devices) * TASK_PERCENT // 100


@dataclass(frozen=True)
class _Draft:
    """A plan in the making: the batch is decided, packs and policies are not."""

    profile: Profile
    machine: Machine
    wishes: PlanWishes
    replicas: int
    size: int
    num_microbatches: int

    def plan(self) -> Plan:
        stages = self.stages()
        policy = self.wishes.activations or self.policy(stages)
        backward = self.packs(stages, policy)
        fused = self.wishes.schedule.startswith("harmony") and policy == "recompute"
        return Plan(
            schedule=self.wishes.schedule,
            num_microbatches=self.num_microbatches,
            microbatch_size=self.size,
            backward_packs=backward,
            forward_packs=self.forward_packs(backward) if fused else backward,
            activations=(policy,) * len(backward),
            num_devices=self.num_positions * self.replicas,
            num_replicas=self.replicas,
            stages=stages,
            host_layers=tuple(range(len(self.profile.layers))) if self.wishes.host_update else (),
            clipping=self.wishes.clipping,
            residency=self.wishes.residency,
        )

    @cached_property
    def costs(self) -> Costs:
        whole = (Pack(0, len(self.profile.layers) - 1),)
        return Costs(self.profile, Plan("plain", 1, self.size, whole, whole, ("keep",)))

    @cached_property
    def outline(self) -> Outline:
        return self.profile.outline()

    @cached_property
    def times_ns(self) -> list[int]:
        """Forward and backward of each layer."""
        layers = self.profile.layers
        return [layer.forward_ns.at(self.size) + layer.backward_ns.at(self.size) for layer in layers]

    @property
    def num_positions(self) -> int:
        return 1 if self.wishes.schedule in REPLICATED else len(self.machine.devices) // self.replicas

    def policy(self, stages: tuple[Pack, ...]) -> str:
        """The wrap-around pipeline runs forward and backward of a pack on different devices, so it recomputes."""
        wraps = self.wishes.schedule == "harmony_pp" and self.num_positions > 1
        return "keep" if not wraps and self.keeping_fits(stages) else "recompute"

    def stages(self) -> tuple[Pack, ...]:
        return balanced(self.times_ns, self.num_positions) if self.wishes.schedule in PIPELINES else ()

    def packs(self, stages: tuple[Pack, ...], policy: str) -> tuple[Pack, ...]:
        whole = stages or (Pack(0, len(self.profile.layers) - 1),)
        count = self.wishes.layers_per_pack
        if count:
            return tuple(pack for stage in whole for pack in _chopped(stage, count))
        needs = partial(self.backward_bytes, recompute=policy == "recompute")
        packs = tuple(pack for stage in whole for pack in packs_within(stage, _limit(self.machine), needs))
        return self.evened(packs, needs) if self.wishes.schedule == "harmony_pp" else packs

    def evened(self, packs: tuple[Pack, ...], needs: Callable[[int, int], int]) -> tuple[Pack, ...]:
        """Packs of equal time, as many for each device, cut further where memory asks for it."""
        positions, num_layers = self.num_positions, len(self.profile.layers)
        count = max(len(packs), PACKS_PER_DEVICE * positions)
        even = balanced(self.times_ns, min(-(-count // positions) * positions, num_layers))
        return tuple(part for pack in even for part in packs_within(pack, _limit(self.machine), needs))

    def forward_packs(self, backward: tuple[Pack, ...]) -> tuple[Pack, ...]:
        """Forwards keep no graph, so their packs may be larger; the last backward pack needs none."""
        end = backward[-1].first
        if not end:
            return ()
        if self.wishes.layers_per_pack or self.wishes.schedule == "harmony_pp":
            return backward[:-1]
        return packs_within(Pack(0, end - 1), _limit(self.machine), self.forward_bytes)

    def forward_bytes(self, first: int, last: int) -> int:
        return task_bytes(Forward(first, last, 0, 0), self.costs, self.outline)

    def backward_bytes(self, first: int, last: int, recompute: bool = True) -> int:
        """A backward, and the updates that follow it while the other layers' weights and gradients are there."""
        backward = task_bytes(Backward(first, last, 0, 0, 0, recompute), self.costs, self.outline)
        return backward if self.wishes.host_update else max(backward, self.update_bytes(first, last))

    def update_bytes(self, first: int, last: int) -> int:
        layers = self.profile.layers[first : last + 1]
        return sum(c.weight_bytes + c.grad_bytes for c in layers) + max(c.state_bytes for c in layers)

    def largest_layer_bytes(self) -> int:
        return max(self.backward_bytes(layer, layer) for layer in range(len(self.profile.layers)))

    def keeping_fits(self, stages: tuple[Pack, ...]) -> bool:
        """Whether weights, gradients, state and all that autograd saves of microbatches in flight fit comfortably."""
        capacity = min(device.capacity_bytes for device in self.machine.devices)
        if stages:
            held = max(self.held_bytes(stage, self.in_flight(position)) for position, stage in enumerate(stages))
        else:
            whole = Pack(0, len(self.profile.layers) - 1)
            held = self.held_bytes(whole, self.in_flight(0)) // self.num_positions
        return held + self.largest_layer_bytes() <= capacity

    def in_flight(self, position: int) -> int:
        """Microbatches whose backward is still to come when the most of them are under way."""
        match self.wishes.schedule:
            case "plain" | "model_parallel":
                return 1
            case "flush" | "2bw":
                return min(self.num_microbatches, self.num_positions - position)
            case _:
                return self.num_microbatches

    def held_bytes(self, stage: Pack, in_flight: int) -> int:
        delayed = self.wishes.schedule == "2bw"
        layers = self.profile.layers[stage.first : stage.last + 1]
        weights = sum(c.two_versions_bytes if delayed else c.weight_bytes for c in layers)
        fixed = weights + sum(c.grad_bytes + c.state_bytes + c.constant_bytes for c in layers)
        return fixed + in_flight * sum(c.saved_bytes.at(self.size) for c in layers)


def _chopped(stage: Pack, count: int) -> tuple[Pack, ...]:
    packs = equal_packs(stage.last - stage.first + 1, count)
    return tuple(Pack(stage.first + pack.first, stage.first + pack.last) for pack in packs)
