"""A task -> what it is about to bring into memory, within the pool and outside, for which there must be headroom."""

from counterpoint.core.costs import Costs
from counterpoint.core.program import writes
from counterpoint.core.task import PER_LAYER, Backward, Buffer, Forward, saved
from counterpoint.runtime.headroom import Headroom
from counterpoint.runtime.store import Store


class Outside:
    """Device memory outside the pool, where torch makes values.

    It `stows` what autograd keeps in the pool where the heap is to keep its size: near a limit, pages that go to and
    fro between the two would cost more than a copy.
    """

    def __init__(self, store: Store, costs: Costs, headroom: Headroom) -> None:
        self.store, self.costs, self.headroom = store, costs, headroom
        self.stows = False
        self.buffers: dict[Buffer, int] = {}

    def before_computation(self, task: Forward | Backward) -> None:
        outside, born, made = sum(self.buffers.values()), 0, 0
        for buffer in writes(task, self.store.frame.outline):
            if buffer.kind in PER_LAYER:
                made += 0 if buffer in self.store.regions else self.costs.buffer_bytes(buffer)
            elif buffer not in self.store.values:
                self.buffers[buffer] = self.costs.buffer_bytes(buffer)
                born += self.buffers[buffer]
        needed = born + self.headroom.workspace_bytes(task)
        self.headroom.compute(needed, self._fresh_bytes(task, needed), made, outside)

    def after_forward(self, task: Forward) -> None:
        """What autograd keeps has been made outside; it may go on into the pool."""
        if not self.stows:
            return
        for buffer in (saved(layer, task.microbatch) for layer in task.saves):
            if buffer in self.store.saved and self.store.saved[buffer].sizes:
                self.before_load(buffer)
                self.store.stow(buffer)
                self.headroom.landed(buffer)
                self.dropped(buffer)

    def before_load(self, buffer: Buffer) -> None:
        self.headroom.load(buffer, self.costs.buffer_bytes(buffer))

    def before_arrival(self, buffer: Buffer) -> None:
        """What comes from a peer lies outside the pool."""
        self.buffers[buffer] = self.costs.buffer_bytes(buffer)
        self.headroom.receive(buffer, self.buffers[buffer])

    def dropped(self, buffer: Buffer) -> None:
        self.buffers.pop(buffer, None)

    def forget(self) -> None:
        """Nothing lies outside the pool any more, or is on its way."""
        self.buffers.clear()
        self.headroom.forget()

    def _fresh_bytes(self, task: Forward | Backward, needed_bytes: int) -> int:
        """What of a computation's memory cannot come from the heap: tensors that are too large for it."""
        return min(self.costs.large_bytes(task), needed_bytes) if self.headroom.maps_large else 0
