"""What was decided: how a chain is cut, grouped, replicated and updated, and by which schedule."""

from collections.abc import Iterator
from dataclasses import dataclass

SCHEDULES = ("plain", "model_parallel", "harmony", "harmony_pp", "gpipe", "flush", "2bw")
POLICIES = ("recompute", "keep", "evict")


@dataclass(frozen=True, slots=True, order=True)
class Pack:
    """Consecutive layers, `first` to `last`, both included."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last:
            raise ValueError(f"a pack needs 0 <= first <= last, not {self.first} to {self.last}")


@dataclass(frozen=True, slots=True)
class Plan:
    """One decision for a whole run.

    `num_microbatches` counts those of one replica in one step, each of `microbatch_size` samples; a forward runs
    `forward_group` of them as one batch, a backward `backward_group`. `forward_packs` may stop short of the last
    backward pack, which then runs forward and backward in one task (fused). `activations` is the policy of each
    backward pack. `stages` are the layers of each pipeline position, for schedules that have positions. With
    `shard_updates` one replica updates a layer for all and the others load the result. `host_layers` are updated at
    home, where their optimizer state stays. Devices are numbered stage by stage, the replicas of a stage side by side;
    with `replicas_apart` pipeline by pipeline. The first `flush_steps` steps of 2bw are run as flush runs them.
    """

    schedule: str
    num_microbatches: int
    microbatch_size: int
    backward_packs: tuple[Pack, ...]
    forward_packs: tuple[Pack, ...]
    activations: tuple[str, ...]
    num_devices: int = 1
    num_replicas: int = 1
    stages: tuple[Pack, ...] = ()
    forward_group: int = 1
    backward_group: int = 1
    host_layers: tuple[int, ...] = ()
    clipping: bool = False
    shard_updates: bool = False
    residency: str = "planned"
    replicas_apart: bool = False
    flush_steps: int = 0

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise ValueError(f"plan for {self.schedule!r}: " + "; ".join(problems))

    @property
    def num_layers(self) -> int:
        return self.backward_packs[-1].last + 1

    @property
    def minibatch_size(self) -> int:
        return self.num_microbatches * self.microbatch_size * self.num_replicas

    def device(self, position: int, replica: int) -> int:
        """Where a replica's pipeline position is."""
        return replica * len(self.stages) + position if self.replicas_apart else position * self.num_replicas + replica

    @property
    def fused(self) -> bool:
        """The last backward pack has no forward of its own."""
        return not self.forward_packs or self.forward_packs[-1].last < self.backward_packs[-1].last

    def policy(self, pack: Pack) -> str:
        return self.activations[self.backward_packs.index(pack)]


def equal_packs(num_layers: int, size: int) -> tuple[Pack, ...]:
    """Packs of `size` layers; the last may be smaller.

    >>> equal_packs(5, 2)
    (Pack(first=0, last=1), Pack(first=2, last=3), Pack(first=4, last=4))
    """
    return tuple(Pack(i, min(i + size, num_layers) - 1) for i in range(0, num_layers, size))


def _problems(plan: Plan) -> Iterator[str]:
    if plan.schedule not in SCHEDULES:
        yield f"unknown schedule; known are {', '.join(SCHEDULES)}"
    if plan.residency not in ("planned", "lru", "none"):
        yield f"unknown residency {plan.residency!r}; known are planned, lru, none"
    if min(plan.num_microbatches, plan.microbatch_size, plan.num_devices, plan.num_replicas) < 1:
        yield "microbatches, their size, devices and replicas must be at least 1"
    if plan.flush_steps < 0:
        yield f"flush_steps must be at least 0, not {plan.flush_steps}"
    if plan.flush_steps and plan.schedule != "2bw":
        yield f"the first {plan.flush_steps} steps by flush are for 2bw"
    if not plan.backward_packs:
        yield "there must be at least one backward pack"
        return
    yield from _pack_problems(plan)
    yield from _host_problems(plan)
    yield from _group_problems(plan)
    yield from _stage_problems(plan)


def _pack_problems(plan: Plan) -> Iterator[str]:
    yield from _gaps("backward packs", plan.backward_packs, plan.num_layers)
    covered = plan.backward_packs[-1].first if plan.fused else plan.num_layers
    yield from _gaps("forward packs", plan.forward_packs, covered)
    if len(plan.activations) != len(plan.backward_packs):
        yield f"{len(plan.backward_packs)} backward packs need as many activation policies, not {len(plan.activations)}"
        return
    unknown = sorted(set(plan.activations) - set(POLICIES))
    if unknown:
        yield f"unknown activation policies {', '.join(unknown)}; known are {', '.join(POLICIES)}"
    ends = {pack.last for pack in plan.forward_packs}
    for pack, policy in zip(plan.backward_packs, plan.activations, strict=True):
        crosses = any(end in ends for end in range(pack.first, pack.last))
        if policy != "recompute" and crosses:
            yield f"pack {pack.first}-{pack.last} keeps what autograd saves, so it cannot cross a forward pack's end"


def _host_problems(plan: Plan) -> Iterator[str]:
    strangers = [layer for layer in plan.host_layers if not 0 <= layer < plan.num_layers]
    if strangers:
        yield f"host layers {', '.join(map(str, strangers))} are not among the {plan.num_layers} layers"


def _group_problems(plan: Plan) -> Iterator[str]:
    for name, group in (("forward", plan.forward_group), ("backward", plan.backward_group)):
        if group < 1 or plan.num_microbatches % group:
            yield f"{name} groups of {group} do not divide {plan.num_microbatches} microbatches"
    if plan.forward_group != plan.backward_group and set(plan.activations) - {"recompute"}:
        yield "forward and backward groups may differ only if every pack recomputes"


def _stage_problems(plan: Plan) -> Iterator[str]:
    if not plan.stages:
        return
    yield from _gaps("stages", plan.stages, plan.num_layers)
    ends = {pack.last for pack in plan.backward_packs}
    if any(stage.last not in ends for stage in plan.stages):
        yield "every stage must end where a pack ends"
    if len(plan.stages) * plan.num_replicas != plan.num_devices:
        yield (
            f"{len(plan.stages)} stages of {plan.num_replicas} replicas need "
            f"{len(plan.stages) * plan.num_replicas} devices, not {plan.num_devices}"
        )


def _gaps(what: str, packs: tuple[Pack, ...], num_layers: int) -> Iterator[str]:
    expected = 0
    for pack in packs:
        if pack.first != expected:
            yield f"{what} do not cover the chain: layer {expected} expected, pack {pack.first}-{pack.last} found"
            return
        expected = pack.last + 1
    if expected != num_layers:
        yield f"{what} end at layer {expected - 1}, the chain at layer {num_layers - 1}"
