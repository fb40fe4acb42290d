"""A program -> what each device has to do with the others: who updates and runs which layer, who computes losses."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from counterpoint.core.program import Program, lane, reads
from counterpoint.core.task import AllReduce, Backward, Clip, Forward, Send, Task, Update


@dataclass(frozen=True)
class Duties:
    """`writers` and `users` are the devices that update and that use each layer's weights, in order.

    `losses` are, by device, the microbatches of a step whose loss it computes. `two_versions` if an update leaves the
    version before in place. `runners` are the devices that run a layer forward. `senders` are pairs of devices of which
    the first sends values to the second, `reducers` devices that sum gradients together.
    """

    num_devices: int
    writers: tuple[tuple[int, ...], ...]
    users: tuple[tuple[int, ...], ...]
    runners: tuple[tuple[int, ...], ...]
    losses: dict[int, tuple[int, ...]]
    lanes: tuple[tuple[str, ...], ...]
    two_versions: bool
    senders: tuple[tuple[int, int], ...] = ()
    reducers: tuple[tuple[int, ...], ...] = ()

    @property
    def copied(self) -> frozenset[int]:
        """Layers that several devices update, each for itself: each has its own home copy."""
        return frozenset(layer for layer, writers in enumerate(self.writers) if len(writers) > 1)

    def owner(self, layer: int) -> int:
        """The device that answers for a layer's content: saves it, and says what its buffers are."""
        known = self.writers[layer] or self.runners[layer]
        return known[0] if known else 0

    def fills(self, layer: int, device: int, servers: tuple[str, ...]) -> bool:
        """Whether a device puts a layer home: each of its copies once, on every server that uses it."""
        if layer in self.copied:
            return device in self.writers[layer]
        same = [d for d in self.users[layer] if servers[d] == servers[device]]
        writers = [d for d in self.writers[layer] if d in same]
        return bool(same) and device == (writers or same)[0]

    def updated_elsewhere(self, servers: Sequence[object]) -> tuple[int, int, int] | None:
        """A layer, a device that updates it, and one that uses it on a server where nobody does, if there is one."""
        for layer, (writers, users) in enumerate(zip(self.writers, self.users, strict=True)):
            known = {servers[device] for device in writers}
            for device in users:
                if known and servers[device] not in known:
                    return layer, writers[0], device
        return None


def duties_of(program: Program) -> Duties:
    count, m = program.outline.num_layers, program.num_microbatches
    writers: defaultdict[int, dict[int, None]] = defaultdict(dict)
    users: defaultdict[int, dict[int, None]] = defaultdict(dict)
    runners: defaultdict[int, dict[int, None]] = defaultdict(dict)
    losses: defaultdict[int, dict[int, None]] = defaultdict(dict)
    lanes: list[tuple[str, ...]] = []
    senders: dict[tuple[int, int], None] = {}
    reducers: dict[tuple[int, ...], None] = {}
    for device, part in enumerate(program.devices):
        tasks = (*part.prologue, *part.body, *part.epilogue)
        lanes.append(tuple(dict.fromkeys(_lane(task) for task in tasks)))
        for task in tasks:
            if isinstance(task, Send):
                senders[device, task.peer] = None
            if isinstance(task, AllReduce) and len(task.peers) > 1:
                reducers[task.peers] = None
            if isinstance(task, Forward | Backward | Update):
                for buffer in reads(task, program.outline):
                    if buffer.kind in ("weight", "old", "constant"):
                        users[buffer.owner][device] = None
            if isinstance(task, Update):
                for layer in range(task.first, task.last + 1):
                    writers[layer][device] = None
            if isinstance(task, Forward | Backward):
                if isinstance(task, Forward) or task.recompute:
                    for layer in range(task.first, task.last + 1):
                        runners[layer][device] = None
                if task.last == count - 1:
                    for microbatch in range(task.microbatch, task.microbatch + task.count):
                        losses[device][microbatch % m] = None
    forward = _forward_runners(program)
    return Duties(
        len(program.devices),
        tuple(tuple(sorted(writers[i])) if program.outline.layers[i].has_weights else () for i in range(count)),
        tuple(tuple(sorted(users[i])) for i in range(count)),
        tuple(forward.get(i) or tuple(sorted(runners[i])) for i in range(count)),
        {device: tuple(sorted(found)) for device, found in sorted(losses.items())},
        tuple(lanes),
        any(isinstance(t, Update) and t.keeps_old for part in program.devices for t in (*part.body, *part.epilogue)),
        tuple(sorted(senders)),
        tuple(sorted(reducers)),
    )


def _forward_runners(program: Program) -> dict[int, tuple[int, ...]]:
    """Devices whose forward of a layer is its first run; a fused layer has none."""
    found: defaultdict[int, dict[int, None]] = defaultdict(dict)
    for device, part in enumerate(program.devices):
        for task in (*part.prologue, *part.body, *part.epilogue):
            if isinstance(task, Forward):
                for layer in range(task.first, task.last + 1):
                    found[layer][device] = None
    return {layer: tuple(sorted(devices)) for layer, devices in found.items()}


def _lane(task: Task) -> str:
    """A collective of one device alone is a computation."""
    alone = isinstance(task, AllReduce | Clip) and len(task.peers) == 1
    return "compute" if alone else lane(task)
