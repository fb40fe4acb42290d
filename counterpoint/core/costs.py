"""What a task takes and a buffer weighs, for one profile and microbatch size; memoised, for passes ask often."""

from functools import cache

from counterpoint.core.plan import Plan
from counterpoint.core.profile import Profile
from counterpoint.core.task import AllReduce, Backward, Buffer, Clip, Forward, Norm, Task, Update


class Costs:
    """Reads a profile at a plan's microbatch size. Gradient norms are counted as a tenth of an update."""

    def __init__(self, profile: Profile, plan: Plan) -> None:
        if plan.num_layers != len(profile.layers):
            raise ValueError(
                f"packs do not cover the chain: they end at layer {plan.num_layers - 1}, "
                f"profile {profile.name!r} at layer {len(profile.layers) - 1}"
            )
        self.profile = profile
        self.microbatch_size = plan.microbatch_size
        self.buffer_bytes_of = cache(self._buffer_bytes)
        self._compute_ns = cache(self._pack_ns)
        self._workspace = cache(self._pack_workspace)

    def buffer_bytes(self, buffer: Buffer) -> int:
        return self.buffer_bytes_of(buffer.kind, buffer.owner)

    def _buffer_bytes(self, kind: str, index: int) -> int:
        size = self.microbatch_size
        match kind:
            case "weight":
                return self.profile.layers[index].weight_bytes
            case "old":
                return self.profile.layers[index].old_bytes
            case "constant":
                return self.profile.layers[index].constant_bytes
            case "grad":
                return self.profile.layers[index].grad_bytes
            case "state":
                return self.profile.layers[index].state_bytes
            case "saved":
                return self.profile.layers[index].saved_bytes.at(size)
            case "activation" | "activation_grad":
                return self.profile.values[index].value_bytes.at(size)
            case _:
                return 0

    def workspace_bytes(self, task: Task) -> int:
        """Memory that a computation needs for its own duration."""
        match task:
            case Forward(first, last, _, _, _, _, count):
                return self._workspace(first, last, "forward", count)
            case Backward(first, last, _, _, _, recompute, count):
                return self._workspace(first, last, "recompute" if recompute else "backward", count)
            case _:
                return 0

    def _pack_workspace(self, first: int, last: int, kind: str, count: int) -> int:
        """Layers of a pack run one after another; recomputed ones keep what autograd saves until their turn."""
        layers, size = self.profile.layers[first : last + 1], self.microbatch_size * count
        if kind == "forward":
            return max(layer.forward_workspace_bytes.at(size) for layer in layers)
        backward = max(layer.backward_workspace_bytes.at(size) for layer in layers)
        if kind == "backward":
            return backward
        forward = max(layer.forward_workspace_bytes.at(size) for layer in layers)
        return sum(layer.saved_bytes.at(size) for layer in layers) + max(forward, backward)

    def large_bytes(self, task: Forward | Backward) -> int:
        """At most so much of a computation's memory lies in tensors that are too large for the heap."""
        size = self.microbatch_size * task.count
        return sum(layer.large_bytes.at(size) for layer in self.profile.layers[task.first : task.last + 1])

    def duration_ns(self, task: Task, speed_percent: int = 100) -> int:
        """Time of a computation; transfers are the simulator's business."""
        match task:
            case Forward(first, last, _, _, _, _, count):
                time = self._compute_ns(first, last, "forward", count)
            case Backward(first, last, _, _, _, recompute, count):
                time = self._compute_ns(first, last, "recompute" if recompute else "backward", count)
            case Update(first, last, _, host):
                return self._compute_ns(first, last, "host" if host else "update", 1) * 100 // speed_percent
            case Norm(first, last):
                time = self._compute_ns(first, last, "update", 1) // 10
            case _:
                return 0
        return time * 100 // speed_percent

    def _pack_ns(self, first: int, last: int, kind: str, count: int) -> int:
        layers, size = self.profile.layers[first : last + 1], self.microbatch_size * count
        match kind:
            case "forward":
                return sum(layer.forward_ns.at(size) for layer in layers)
            case "backward":
                return sum(layer.backward_ns.at(size) for layer in layers)
            case "recompute":
                whole = sum(layer.forward_ns.at(size) + layer.backward_ns.at(size) for layer in layers)
                return max(0, whole - layers[-1].unread_ns.at(size))
            case "update":
                return sum(layer.update_ns for layer in layers)
            case _:
                return sum(layer.host_update_ns for layer in layers)

    def reduced_bytes(self, task: AllReduce | Clip) -> int:
        """Bytes that each peer contributes to a collective."""
        if isinstance(task, Clip):
            return 8
        return sum(layer.grad_bytes for layer in self.profile.layers[task.first : task.last + 1])
