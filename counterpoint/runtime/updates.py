"""Finished gradients into new weights: norm, clip and update of layers."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from counterpoint.core.errors import LossError
from counterpoint.core.program import narrows
from counterpoint.core.task import AllReduce, Buffer, Norm, Update, grad, old, state, weight
from counterpoint.runtime.frame import Frame
from counterpoint.runtime.home_update import HomeUpdate
from counterpoint.runtime.optimizer import UpdateRule
from counterpoint.runtime.step import Step
from counterpoint.runtime.store import Store

Exchange = Callable[[Tensor], Iterable[Tensor]]
"""This device's norms into those of all peers."""
Total = Callable[[list[Tensor], Tensor], Tensor]
"""Sums flat tensors over the peers in place; marks of the parts that this device has into those that any has."""


class Updates:
    """Updates what the store holds. `started` names, by gradient buffer, the parameters that a gradient has reached.

    `complete` brings a step's losses on other devices. Any finished gradient comes after all of them, so every device
    knows a bad one before its first update of the step.
    """

    def __init__(
        self,
        frame: Frame,
        store: Store,
        rule: UpdateRule | None,
        max_grad_norm: float | None,
        started: dict[Buffer, set[str]],
    ) -> None:
        self.frame, self.chain, self.store, self.rule = frame, frame.chain, store, rule
        self.max_grad_norm, self.started = max_grad_norm, started
        self.home: HomeUpdate | None = None
        self.complete: Callable[[int], None] = lambda step: None

    def norm(self, task: Norm, step: Step) -> None:
        for layer in range(task.first, task.last + 1):
            if self.frame.weights[layer].slots:
                for name, tensor in self.store.tensors(grad(layer, task.step)).items():
                    if name in self.started[grad(layer, task.step)]:
                        step.norms[name] = torch.linalg.vector_norm(tensor, 2.0)

    def norms(self, step: Step) -> Tensor:
        """This device's norms as a message: for every parameter whether it has one, and its value."""
        found = torch.zeros(2, len(self.chain.parameters), dtype=torch.float64)
        for index, name in enumerate(self.chain.parameters):
            if name in step.norms:
                found[0, index], found[1, index] = 1.0, step.norms[name]
        return found

    def take_norms(self, step: Step, message: Tensor) -> None:
        """The norms of another device, back in the dtype of their gradients."""
        for index, (name, spec) in enumerate(self.chain.parameters.items()):
            if message[0, index]:
                step.norms[name] = self.store.backend.here(message[1, index].to(spec.dtype))

    def clip(self, step: Step, exchange: Exchange | None = None) -> None:
        """The factor of torch.nn.utils.clip_grad_norm_, which takes the norm of norms dtype by dtype."""
        assert self.max_grad_norm is not None
        if exchange is not None:
            for message in exchange(self.norms(step)):
                self.take_norms(step, message)
        total = get_total_norm([step.norms[name] for name in self.chain.parameters if name in step.norms])
        step.clip = torch.clamp(self.max_grad_norm / (total + 1e-6), max=1.0)

    def reduce(self, task: AllReduce, total: Total) -> None:
        """Sum the gradients of some layers over the devices that `total` knows."""
        layers = [layer for layer in range(task.first, task.last + 1) if self.frame.weights[layer].slots]
        flats: list[Tensor] = []
        started: list[bool] = []
        for layer in layers:
            buffer = grad(layer, task.step)
            if self.store.make(buffer):
                self.started[buffer] = set()
            tensors = self.store.tensors(buffer)
            started += [name in self.started[buffer] for name in tensors]
            for name, tensor in tensors.items():
                if name not in self.started[buffer]:
                    tensor.zero_()
            dtypes = {tensor.dtype for tensor in tensors.values()}
            flats += [self.store.whole(buffer, *dtypes)] if len(dtypes) == 1 else [t.view(-1) for t in tensors.values()]
        marks = iter(total(flats, torch.tensor(started, dtype=torch.uint8)).tolist())
        for layer in layers:
            names = [slot.name for slot in self.frame.weights[layer].slots]
            self.started[grad(layer, task.step)] = {name for name in names if next(marks)}

    def update(self, task: Update, step: Step) -> None:
        """After a bad loss the step goes on, and nothing is changed: a new version is the same as the old one."""
        self.complete(task.step)
        bad = bad_loss(step) is not None
        assert self.rule is not None
        self.rule.groups = step.groups
        for layer in range(task.first, task.last + 1):
            if not self.frame.weights[layer].slots:
                continue
            if bad:
                self._keep(layer, task)
            elif task.host:
                assert self.home is not None
                self.home.update(layer, task, self.started.pop(grad(layer, task.step)), step.clip)
            else:
                self._update_layer(layer, task, step)

    def _update_layer(self, layer: int, task: Update, step: Step) -> None:
        assert self.rule is not None
        weights = self.store.tensors(self._target(layer, task))
        grads = self.store.tensors(grad(layer, task.step))
        states = self._states(layer, task.step)
        fresh = layer in self.store.fresh_states
        started = self.started.pop(grad(layer, task.step))
        for name, tensor in weights.items():
            if name in started:  # an optimizer leaves a parameter alone that no gradient has reached
                if step.clip is not None:
                    grads[name].mul_(step.clip)
                self.rule.update(name, tensor, grads[name], states[name], fresh)
            elif fresh:
                for unused in states[name].values():
                    unused.zero_()
        self.store.fresh_states.discard(layer)

    def _keep(self, layer: int, task: Update) -> None:
        """The weights stay as they are, also as the next version."""
        self.started.pop(grad(layer, task.step))
        if task.host:
            assert self.home is not None
            self.home.keep(layer, task)
        else:
            self._target(layer, task)

    def _target(self, layer: int, task: Update) -> Buffer:
        """The weights to change in place: a copy where the old ones are still read; or these become a narrow copy."""
        before, new, narrow = weight(layer, task.step), weight(layer, task.step + 1), old(layer, task.step)
        if not task.keeps_old:
            return before
        copy, target = (narrow, before) if narrows(task, layer, self.frame.outline) else (new, new)
        self.store.make(copy)
        weights = self.store.tensors(before)
        for name, tensor in self.store.tensors(copy).items():
            tensor.copy_(weights[name])
        return target

    def _states(self, layer: int, step: int) -> dict[str, dict[str, Tensor]]:
        found: dict[str, dict[str, Tensor]] = {slot.name: {} for slot in self.frame.weights[layer].slots}
        if self.store.states[layer].slots:
            for name, tensor in self.store.tensors(state(layer, step)).items():
                parameter, _, key = name.rpartition("\0")
                found[parameter][key] = tensor
        return found


def bad_loss(step: Step) -> LossError | None:
    for microbatch in sorted(step.losses):
        if not torch.isfinite(loss := step.losses[microbatch]):
            return LossError(
                f"the loss of microbatch {microbatch % len(step.batches)} in step {step.number} is "
                f"{loss.item()}; no weight was changed by this step: lower the learning rate, clip gradients, or "
                "look at the batch"
            )
    return None
