"""A trainer's options -> what the planner may choose from, refused by name where they cannot be."""

from dataclasses import dataclass
from pathlib import Path

import torch

from counterpoint.core.plan import POLICIES, SCHEDULES, Plan
from counterpoint.core.units import parse_bytes
from counterpoint.passes.residency import RESIDENCIES
from counterpoint.planner.search import PACK_SIZES, Freedom
from counterpoint.planner.servers import refuse_schedule
from counterpoint.runtime.backend import CPU, Backend
from counterpoint.runtime.memory_process import memory_limit_bytes
from counterpoint.trainer.tiered_home import host_room_bytes

PRECISIONS: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}
SCHEDULES_OF_ONE = ("harmony", "plain")
_DOUBLING_PERMILLE = 20  # seen: equal by the profile, and a tenth slower for twice the microbatch
HOST_SHARE_PERCENT = 60  # of the machine's memory, beside an accelerator


@dataclass(frozen=True, slots=True)
class Wishes:
    """How a model is to be trained; `plan` overrules the freedom, without `disk` a folder is made and removed."""

    memory_bytes: int
    freedom: Freedom
    plan: Plan | None
    disk: Path | None
    autocast: torch.dtype | None
    max_grad_norm: float | None
    seed: int
    replicas: int | None = None
    network_bytes_per_s: int | None = None
    flush_steps: int = 0
    host_bytes: int = 0


def read_wishes(
    *,
    minibatch_size: int,
    memory: str | int | None,
    disk: str | Path | None,
    max_grad_norm: float | None,
    microbatch: int | None,
    precision: str,
    seed: int,
    schedule: str,
    activations: str | None,
    pack: int | None,
    residency: str,
    plan: Plan | None,
    replicas: int | None = None,
    network: str | int | None = None,
    flush_steps: int = 0,
    host_memory: str | int | None = None,
    backend: Backend = CPU,
    num_devices: int = 1,
    num_servers: int = 1,
) -> Wishes:
    _refuse_unknown("precision", precision, tuple(PRECISIONS))
    _refuse_schedule(schedule, num_devices, replicas)
    refuse_schedule(schedule if plan is None else plan.schedule, num_servers)
    _refuse_unknown("residency", residency, RESIDENCIES)
    _refuse_unknown("activations", activations, (None, *POLICIES))
    _refuse_bad_sizes(minibatch_size, microbatch, pack, max_grad_norm, plan)
    _refuse_flush_steps(flush_steps, schedule, plan)
    _refuse_other_plan(plan, minibatch_size, num_devices, max_grad_norm is not None)
    freedom = Freedom(
        minibatch_size,
        (microbatch,) if microbatch else tuple(d for d in (1, 2, 4, 8, 16, 32) if minibatch_size % d == 0),
        (schedule,),
        (pack,) if pack else PACK_SIZES,
        (activations,) if activations else ("evict", "recompute"),
        max_grad_norm is not None,
        residency,
        doubling_permille=_DOUBLING_PERMILLE,
    )
    memory_bytes = backend.default_memory_bytes() if memory is None else parse_bytes(memory)
    host_bytes = _host_bytes(host_memory, backend)
    folder = None if disk is None else Path(disk)
    speed = None if network is None else parse_bytes(network)
    if speed == 0:
        raise ValueError("network must be more than 0 bytes per second; leave it out to use the usual one")
    dtype, first = PRECISIONS[precision], flush_steps if plan is None else plan.flush_steps
    return Wishes(memory_bytes, freedom, plan, folder, dtype, max_grad_norm, seed, replicas, speed, first, host_bytes)


def _host_bytes(host_memory: str | int | None, backend: Backend) -> int:
    """What of the machine's memory is home to what an accelerator has no room for, on all of its devices together."""
    if backend.is_process:
        if host_memory is not None:
            raise ValueError(
                "host_memory is for accelerators; without one the machine's memory is the device's: memory"
            )
        return 0
    if host_memory is None:
        return min(memory_limit_bytes() * HOST_SHARE_PERCENT // 100, host_room_bytes())
    return parse_bytes(host_memory)


def _refuse_unknown(option: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise ValueError(f"unknown {option} {value!r}; known are {', '.join(str(k) for k in known if k is not None)}")


def _refuse_bad_sizes(
    minibatch_size: int, microbatch: int | None, pack: int | None, max_grad_norm: float | None, plan: Plan | None
) -> None:
    if microbatch is not None and (microbatch < 1 or minibatch_size % microbatch):
        raise ValueError(f"microbatches of {microbatch} do not divide a minibatch of {minibatch_size} samples")
    if pack is not None and pack < 1:
        raise ValueError(f"a pack has at least 1 layer, not {pack}")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be positive, not {max_grad_norm}; leave it out to clip nothing")


def _refuse_schedule(schedule: str, num_devices: int, replicas: int | None) -> None:
    if num_devices == 1 and schedule in SCHEDULES and schedule not in SCHEDULES_OF_ONE:
        raise ValueError(
            f"{schedule} needs several devices and this is one process; start it with torchrun or counterpoint train "
            "--devices"
        )
    _refuse_unknown("schedule", schedule, SCHEDULES_OF_ONE if num_devices == 1 else SCHEDULES)
    if replicas is not None and (replicas < 1 or num_devices % replicas):
        raise ValueError(f"{num_devices} devices do not divide into {replicas} replicas")


def _refuse_flush_steps(flush_steps: int, schedule: str, plan: Plan | None) -> None:
    if flush_steps < 0:
        raise ValueError(f"flush_steps must be at least 0, not {flush_steps}")
    if plan is not None and flush_steps not in (0, plan.flush_steps):
        raise ValueError(f"the plan has {plan.flush_steps} steps by flush, not {flush_steps}; leave flush_steps to it")
    if plan is None and flush_steps and schedule != "2bw":
        raise ValueError(f"flush_steps are the first steps of 2bw, and the schedule is {schedule}; leave them out")


def _refuse_other_plan(plan: Plan | None, minibatch_size: int, num_devices: int, clipping: bool) -> None:
    if plan is None:
        return
    known = SCHEDULES_OF_ONE if num_devices == 1 else SCHEDULES
    if plan.minibatch_size != minibatch_size:
        raise ValueError(f"the plan is for minibatches of {plan.minibatch_size}, the example has {minibatch_size}")
    if plan.schedule not in known or plan.num_devices != num_devices:
        has = "one" if num_devices == 1 else str(num_devices)
        raise ValueError(f"the plan is for {plan.schedule} on {plan.num_devices} devices; this trainer has {has}")
    if plan.clipping != clipping:
        raise ValueError("the plan and max_grad_norm disagree about clipping; give both or neither")
    if plan.forward_group > 1 or plan.backward_group > 1:
        raise ValueError("groups of microbatches can only be simulated; give larger microbatches instead")
