"""The losses that each device computes -> all of a step's losses on every device, before its first update."""

import threading
from functools import partial

import torch

from counterpoint.core.duties import Duties
from counterpoint.runtime.compute import Compute
from counterpoint.runtime.executor import Executor
from counterpoint.runtime.step import Step
from counterpoint.runtime.transport import Transport


class LossExchange:
    """Hands out this device's losses as soon as it has them all, and asks for the others' when they are needed."""

    def __init__(self, executor: Executor, transport: Transport, compute: Compute, duties: Duties) -> None:
        self.executor, self.transport, self.compute, self.duties = executor, transport, compute, duties
        self._lock = threading.Lock()
        compute.num_losses = len(duties.losses.get(executor.device, ()))
        compute.on_losses = self._spread
        compute.updates.complete = self.hear

    def _spread(self, step: Step) -> None:
        found = [float(step.losses[key]) for key in sorted(step.losses)]
        self.transport.spread_losses(torch.tensor(found, dtype=torch.float64))

    def hear(self, number: int) -> None:
        """Complete the losses of a step, by its number since the pipeline was empty."""
        with self._lock:  # updates on the device and at home ask for them
            step = self.compute.steps[number]
            if not step.complete:
                self._hear(step, number)
                step.complete = True

    def _hear(self, step: Step, number: int) -> None:
        dtype = self.compute.chain.values[self.compute.chain.loss].dtype
        first = number * self.compute.num_microbatches
        for device, microbatches in self.duties.losses.items():
            if device != self.executor.device:
                hear = partial(self.transport.hear_losses, len(microbatches), device)
                found = self.executor.aside(hear, device, f"the losses of step {step.number} from device {device}")
                step.losses |= {first + k: loss.to(dtype) for k, loss in zip(microbatches, found, strict=True)}
