"""Buffers that replicas mutate, each by its own microbatches -> those of the first replica, on all of them.

As DistributedDataParallel does, which broadcasts them from rank 0 before the first forward of a step.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from counterpoint.core.duties import Duties
from counterpoint.runtime.compute import Compute
from counterpoint.runtime.executor import Executor
from counterpoint.runtime.transport import Transport


class BufferExchange:
    """One message per step from the first device of each group that runs the same layers."""

    def __init__(self, executor: Executor, transport: Transport, compute: Compute, duties: Duties) -> None:
        self.executor, self.transport, self.compute = executor, transport, compute
        self._groups: dict[tuple[int, ...], list[str]] = {}
        for layer in compute.chain.layers:
            runners = duties.runners[layer.index]
            if layer.mutates and len(runners) > 1 and executor.device in runners:
                self._groups.setdefault(runners, []).extend(layer.mutates)

    def take_first(self) -> None:
        """Between steps, when no microbatch is under way."""
        for runners, names in self._groups.items():
            if self.executor.device == runners[0]:
                self.transport.spread(_packed([self.compute.buffers[name] for name in names]), runners[1:])
            else:
                self._take(names, runners[0])

    def _take(self, names: Sequence[str], owner: int) -> None:
        like = [self.compute.buffers[name] for name in names]
        hear = partial(self.transport.hear, sum(tensor.nbytes for tensor in like), owner)
        message = self.executor.aside(hear, owner, f"the buffers of {names[0]} and others from device {owner}")
        for name, tensor, part in zip(names, like, message.split([t.nbytes for t in like]), strict=True):
            self.compute.buffers[name] = self.compute.backend.here(part.clone().view(tensor.dtype).view(tensor.shape))


def _packed(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in tensors])
