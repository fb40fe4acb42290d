"""Devices on several servers -> which plans can run there, and how stages and replicas may lie on them.

New weights reach a device by its own updates or through the home of its server, never over the network. So a layer is
updated on every server that uses it.
"""

from dataclasses import replace

from counterpoint.core.duties import duties_of
from counterpoint.core.machine import Machine
from counterpoint.core.plan import Plan
from counterpoint.core.program import Program

_ONE_SERVER = ("harmony_pp",)
"""Schedules that use a layer where they do not update it."""


def num_servers(machine: Machine) -> int:
    return len({device.server for device in machine.devices})


def refuse_schedule(schedule: str, servers: int) -> None:
    if schedule in _ONE_SERVER and servers > 1:
        raise ValueError(
            f"{schedule} needs devices that share a home, and these are on {servers} servers; across servers use "
            "flush, 2bw or gpipe, or harmony with the whole model on every device"
        )


def refuse_far_updates(plan: Plan, program: Program, machine: Machine) -> None:
    refuse_schedule(plan.schedule, num_servers(machine))
    found = duties_of(program).updated_elsewhere([device.server for device in machine.devices])
    if found is not None:
        layer, writer, reader = found
        raise ValueError(
            f"layer {layer} is updated on device {writer}, but device {reader} on another server uses it; across "
            "servers let every replica update for itself (no shard_updates), and shared weights on their devices"
        )


def arrangements(plan: Plan, machine: Machine) -> tuple[Plan, ...]:
    """The replicas of a stage side by side, or the stages of a replica: what is side by side shares a server."""
    if num_servers(machine) > 1 and plan.num_replicas > 1 and len(plan.stages) > 1:
        return replace(plan, replicas_apart=False), replace(plan, replicas_apart=True)
    return (plan,)
