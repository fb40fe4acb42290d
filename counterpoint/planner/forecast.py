"""Profile x Machine x Plan -> Forecast: will it fit, how fast will it run, what will it wait for."""

from dataclasses import dataclass, replace

from counterpoint.core.costs import Costs
from counterpoint.core.machine import Machine
from counterpoint.core.plan import Plan
from counterpoint.core.profile import Profile
from counterpoint.core.program import Program, lane
from counterpoint.core.task import Backward, Forward
from counterpoint.core.timeline import Timeline
from counterpoint.planner.placement import Placement, kept_layers

__all__ = ["Forecast", "TierUse", "flushing", "forecast", "kept_layers", "run"]


@dataclass(frozen=True, slots=True)
class TierUse:
    """The most a tier holds, and what it may hold."""

    name: str
    peak_bytes: int
    capacity_bytes: int

    @property
    def fits(self) -> bool:
        """Only without swapping it may not."""
        return self.peak_bytes <= self.capacity_bytes


@dataclass(frozen=True, slots=True)
class Forecast:
    """One step in the steady state. Shares are in thousandths of all devices' time.

    `useful_permille` is spent on forwards and backwards, `repeated_permille` on recomputing, `updating_permille` on the
    optimizer, and the rest is idle, by cause. `link_bytes` are per step. A step takes `flush_step_ns` where the plan
    begins with some by flush.
    """

    model: str
    machine: str
    num_devices: int
    training_bytes: int
    device_bytes: int
    plan: Plan
    num_tasks: int
    step_ns: int
    tokens_per_sample: int
    useful_permille: int
    repeated_permille: int
    updating_permille: int
    idle_permille: tuple[tuple[str, int], ...]
    link_bytes: tuple[tuple[str, int], ...]
    tiers: tuple[TierUse, ...]
    flush_step_ns: int = 0

    @property
    def samples_per_s(self) -> float:
        return self.plan.minibatch_size * 1e9 / self.step_ns

    @property
    def tokens_per_s(self) -> float:
        return self.samples_per_s * self.tokens_per_sample


def run(profile: Profile, machine: Machine, plan: Plan, steps: int = 4) -> tuple[Program, Timeline]:
    return Placement(profile, machine, plan).fastest(steps)


def forecast(profile: Profile, machine: Machine, plan: Plan, program: Program, timeline: Timeline) -> Forecast:
    step_ns = max(timeline.step_ns, 1)
    all_ns = step_ns * plan.num_devices
    useful, repeated, updating = _busy_ns(machine, plan, Costs(profile, plan), program)
    peaks = timeline.peak_bytes()
    devices = [TierUse(f"device {i}", 0, machine.devices[i].capacity_bytes) for i in range(plan.num_devices)]
    known = devices + [TierUse(tier.name, 0, tier.capacity_bytes) for tier in machine.tiers]
    return Forecast(
        model=profile.name,
        machine=machine.name,
        num_devices=plan.num_devices,
        training_bytes=profile.weight_bytes + profile.grad_bytes + profile.state_bytes,
        device_bytes=sum(tier.capacity_bytes for tier in devices),
        plan=plan,
        num_tasks=program.num_tasks,
        step_ns=step_ns,
        tokens_per_sample=profile.tokens_per_sample,
        useful_permille=useful * 1000 // all_ns,
        repeated_permille=repeated * 1000 // all_ns,
        updating_permille=updating * 1000 // all_ns,
        idle_permille=tuple((cause, time * 1000 // all_ns) for cause, time in timeline.steady_idle_ns().items()),
        link_bytes=tuple((name, size) for name, size in timeline.steady_link_bytes if size),
        tiers=tuple(TierUse(tier.name, peaks.get(tier.name, 0), tier.capacity_bytes) for tier in known),
    )


def flushing(profile: Profile, machine: Machine, found: Forecast) -> tuple[Program, Forecast]:
    """The program of a 2bw plan's first steps by flush, on the same stages; and the forecast of both together."""
    program, timeline = run(profile, machine, replace(found.plan, schedule="flush", flush_steps=0))
    peaks = timeline.peak_bytes()
    tiers = tuple(replace(tier, peak_bytes=max(tier.peak_bytes, peaks.get(tier.name, 0))) for tier in found.tiers)
    return program, replace(found, tiers=tiers, flush_step_ns=max(timeline.step_ns, 1))


def _busy_ns(machine: Machine, plan: Plan, costs: Costs, program: Program) -> tuple[int, int, int]:
    """Time of a step, summed over the devices, for useful computation, recomputation and the optimizer on devices."""
    useful = repeated = updating = 0
    for part, device in zip(program.devices, machine.devices, strict=False):
        for task in part.body:
            if lane(task) != "compute":
                continue
            time = costs.duration_ns(task, device.speed_percent)
            match task:
                case Backward(first, last, microbatch, version, _, True, count) if not _is_fused(plan, last):
                    again = costs.duration_ns(
                        Forward(first, last, microbatch, version, count=count), device.speed_percent
                    )
                    repeated += again
                    useful += time - again
                case Forward() | Backward():
                    useful += time
                case _:
                    updating += time
    return useful, repeated, updating


def _is_fused(plan: Plan, last: int) -> bool:
    return plan.fused and last == plan.backward_packs[-1].last
