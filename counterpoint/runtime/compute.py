"""Computations of a program into torch calls: forward, backward, norm, clip and update of packs of layers.

Every layer is differentiated by itself: its inputs and weights are leaves, and gradients pass from layer to layer by
hand, summed in the order in which autograd would have summed them over the whole model. So the bits do not depend on
how layers are packed.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from counterpoint.core.program import forward_values, weights_of
from counterpoint.core.task import (
    AllReduce,
    Backward,
    Buffer,
    Clip,
    Forward,
    Norm,
    Update,
    activation,
    activation_grad,
    constant,
    old,
    saved,
)
from counterpoint.decomposer.randomness import layer_seed
from counterpoint.runtime.frame import Frame
from counterpoint.runtime.gradients import Entrance, differentiate, discarding, targets_of
from counterpoint.runtime.headroom import Headroom
from counterpoint.runtime.optimizer import UpdateRule
from counterpoint.runtime.saved import SavedTensors, WeightName, saving
from counterpoint.runtime.step import Step
from counterpoint.runtime.store import Store
from counterpoint.runtime.strides import added, copied
from counterpoint.runtime.updates import Exchange, Total, Updates

__all__ = ["Compute", "Step"]


@dataclass(slots=True)
class _Graph:
    """One layer's run, waiting to be differentiated: an entrance per occurrence of an input, a leaf per weight."""

    inputs: list[Entrance]
    outputs: list[GradientEdge | None]
    parameters: dict[str, Tensor]


class Compute:
    """Runs computations on what the store holds. `buffers` are the model's, mutated once per microbatch."""

    def __init__(
        self,
        frame: Frame,
        store: Store,
        rule: UpdateRule | None,
        buffers: dict[str, Tensor],
        num_microbatches: int,
        seed: int = 0,
        autocast: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self.frame, self.chain, self.store = frame, frame.chain, store
        self.buffers, self.num_microbatches, self.seed = buffers, num_microbatches, seed
        self.autocast = autocast
        self.graphs: dict[tuple[int, int], _Graph] = {}
        self.forwarded: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.steps: dict[int, Step] = {}
        self.started: dict[Buffer, set[str]] = {}
        self.updates = Updates(frame, store, rule, max_grad_norm, self.started)
        self.training = True
        self.backend = store.backend
        self.num_losses = num_microbatches
        self.makings: tuple[str, ...] = ("whole",) * frame.num_layers  # of the gradients of each layer's weights
        self.on_losses: Callable[[Step], None] = lambda step: None  # nobody else waits for them
        self.headroom = Headroom.without_limit()

    def forward(self, task: Forward) -> None:
        """Run layers; leave the values that others read, and graphs where saved tensors are kept."""
        values: dict[int, Tensor] = {}
        keep = {self.frame.values[v] for v in forward_values(self.frame.outline, task.first, task.last, task.stashes)}
        saves = set(task.saves)
        for layer in range(task.first, task.last + 1):
            if layer in saves:
                outputs = self._run_saving(layer, task, values)
            else:
                with discarding() if self.training else torch.no_grad():
                    outputs = self._run(layer, task, values, leaves=self.training)[1]
            self._pass_on(layer, outputs, values, task.microbatch)
            self._forget_used(layer, values, keep)
            del outputs
            self.headroom.relieve()
        for value in keep:
            tensor = values[value]
            lent = self.store.is_lent(tensor) or self._is_weight(tensor, task)
            owned = copied(tensor) if lent else tensor
            self.store.put(activation(self.frame.numbers[value], task.microbatch), owned)

    def backward(self, task: Backward) -> None:
        """Recompute if asked to, then differentiate layer by layer, the last first."""
        if task.recompute:
            values: dict[int, Tensor] = {}
            for layer in range(task.first, task.last + 1):
                graph, outputs = self._run(layer, task, values, leaves=True, unread=layer == task.last)
                self.graphs[layer, task.microbatch] = graph
                self._pass_on(layer, outputs, values, task.microbatch)
                self._forget_used(layer, values, set())
                del outputs
                self.headroom.relieve()
        inside: dict[int, Tensor] = {}
        for layer in range(task.last, task.first - 1, -1):
            self._differentiate(layer, task, inside)
            self.forwarded.pop((layer, task.microbatch), None)
            self.headroom.relieve()

    def norm(self, task: Norm) -> None:
        self.updates.norm(task, self.steps[task.step])

    def clip(self, task: Clip, exchange: Exchange | None = None) -> None:
        self.updates.clip(self.steps[task.step], exchange)

    def reduce(self, task: AllReduce, total: Total) -> None:
        self.updates.reduce(task, total)

    def update(self, task: Update) -> None:
        self.updates.update(task, self.steps[task.step])

    def _batch(self, microbatch: int) -> Mapping[int, Tensor]:
        step = self.steps[microbatch // self.num_microbatches]
        return step.batches[microbatch % self.num_microbatches]

    def _run(
        self, layer: int, task: Forward | Backward, values: Mapping[int, Tensor], leaves: bool, unread: bool = False
    ) -> tuple[_Graph, tuple[Tensor, ...]]:
        """One layer on its inputs, and its outputs; a second run finds the buffers of the first and changes none.

        Of a layer whose outputs nobody will read they are not always made, the loss excepted.
        """
        spec, microbatch = self.chain.layers[layer], task.microbatch
        entrances = [Entrance() for _ in spec.inputs]
        inputs = [self._input(value, microbatch, values) for value in spec.inputs]
        if leaves:
            trains = [self.chain.values[value].needs_grad for value in spec.inputs]
            inputs = [e.enter(t) if train else t for e, t, train in zip(entrances, inputs, trains, strict=True)]
        parameters = self._parameters(layer, task, leaves)
        again = self.training and (layer, microbatch) in self.forwarded
        buffers = self.forwarded[layer, microbatch] if again else {name: self.buffers[name] for name in spec.buffers}
        with self.backend.autocast(self.autocast), self._randomness(layer, microbatch):
            outputs, mutated = spec.run(parameters, buffers, inputs, unread and self.chain.loss not in spec.outputs)
        if self.training and not again:
            self.forwarded[layer, microbatch] = buffers
            self.buffers.update({name: tensor.detach() for name, tensor in mutated.items()})
        edges = [get_gradient_edge(output) if output.requires_grad else None for output in outputs]
        return _Graph(entrances, edges, parameters), outputs

    def _randomness(self, layer: int, microbatch: int) -> contextlib.AbstractContextManager[None]:
        """The layer's own random numbers."""
        if not (self.chain.layers[layer].random and self.training):
            return contextlib.nullcontext()
        step = self.steps[microbatch // self.num_microbatches]
        local = microbatch % self.num_microbatches
        return self.backend.seeded(layer_seed(self.seed, step.number, local, layer))

    def _input(self, value: int, microbatch: int, values: Mapping[int, Tensor]) -> Tensor:
        if value in values:
            return values[value]
        if value in self.frame.numbers:
            return self.store.get(activation(self.frame.numbers[value], microbatch))
        return self._batch(microbatch)[value]

    def _parameters(self, layer: int, task: Forward | Backward, leaves: bool) -> dict[str, Tensor]:
        spec = self.chain.layers[layer]
        found: dict[str, Tensor] = {}
        owners = dict.fromkeys([layer, *(self.frame.owner(name) for name in spec.tied)])
        for owner in owners:
            if self.frame.weights[owner].slots:
                for name, tensor in self.store.tensors(weights_of(task, owner, self.frame.outline)).items():
                    found[name] = tensor.requires_grad_() if leaves else tensor
            if self.frame.constants[owner].slots:
                found.update(self.store.tensors(constant(owner)))
        return {name: found[name] for name in (*spec.parameters, *spec.tied)}

    def _pass_on(self, layer: int, outputs: Sequence[Tensor], values: dict[int, Tensor], microbatch: int) -> None:
        for value, output in zip(self.chain.layers[layer].outputs, outputs, strict=True):
            values[value] = output.detach()
            if value == self.chain.loss:
                self._take_loss(microbatch, output.detach())

    def _take_loss(self, microbatch: int, loss: Tensor) -> None:
        """Recomputations find it there already; whoever waits for the losses of this device's share is told."""
        step = self.steps[microbatch // self.num_microbatches]
        known = len(step.losses)
        step.losses[microbatch] = loss
        if known < len(step.losses) == self.num_losses:
            self.on_losses(step)

    def _forget_used(self, layer: int, values: dict[int, Tensor], keep: set[int]) -> None:
        for value in self.chain.layers[layer].inputs:
            if value in values and value not in keep and self.chain.values[value].consumers[-1] <= layer:
                del values[value]

    # ---- saved tensors

    def _run_saving(self, layer: int, task: Forward, values: Mapping[int, Tensor]) -> tuple[Tensor, ...]:
        kept, microbatch = SavedTensors(), task.microbatch
        self.store.saved[saved(layer, microbatch)] = kept
        weights = {address: (buffer, name) for name, address, buffer in self._weight_addresses(layer, task)}
        buffers = [self.buffers[name] for name in self.chain.layers[layer].buffers]
        apart = {t.untyped_storage().data_ptr() for t in (*self._batch(microbatch).values(), *buffers)}
        with saving(kept, weights, apart, self.store.is_lent, self._weight):
            graph, outputs = self._run(layer, task, values, leaves=True)
        for leaf in graph.parameters.values():
            if leaf.requires_grad:
                # Only the shape of a leaf matters from here on; its memory may be dropped or move.
                leaf.data = leaf.data.new_empty(1).expand(leaf.shape)
        self.graphs[layer, microbatch] = graph
        return tuple(output.detach() for output in outputs)

    def _is_weight(self, tensor: Tensor, task: Forward) -> bool:
        """Whether a tensor lies in the weights of a pack, which change and go."""
        address = tensor.untyped_storage().data_ptr()
        layers = range(task.first, task.last + 1)
        return any(address == found for i in layers for _, found, _ in self._weight_addresses(i, task))

    def _weight(self, found: WeightName) -> Tensor:
        """A weight that a forward read; by now a newer version may have taken its place and left a narrow copy."""
        buffer, name = found
        there = buffer in self.store.regions
        return self.store.tensors(buffer if there else old(buffer.owner, buffer.number))[name]

    def _weight_addresses(self, layer: int, task: Forward) -> Iterator[tuple[str, int, Buffer]]:
        spec = self.chain.layers[layer]
        for owner in dict.fromkeys([layer, *(self.frame.owner(name) for name in spec.tied)]):
            for flat, buffer in (
                (self.frame.weights[owner], weights_of(task, owner, self.frame.outline)),
                (self.frame.constants[owner], constant(owner)),
            ):
                for slot in self.store.flat(buffer).slots if flat.slots else ():
                    yield slot.name, self.store.regions[buffer].address + slot.offset_bytes, buffer

    # ---- gradients

    def _differentiate(self, layer: int, task: Backward, inside: dict[int, Tensor]) -> None:
        graph = self.graphs.pop((layer, task.microbatch))
        spec = self.chain.layers[layer]
        roots: list[GradientEdge] = []
        seeds: list[Tensor] = []
        for value, edge in zip(spec.outputs, graph.outputs, strict=True):
            seed = self._output_grad(value, task.microbatch, inside)
            if seed is not None and edge is not None:
                roots.append(edge)
                seeds.append(seed)
        if not roots:
            return
        targets = targets_of(graph.parameters, task.step, self.frame, self.store, self.started)
        entered = [entrance.leaf for entrance in graph.inputs if entrance.leaf is not None]
        relieve = self.headroom.relieve if self.headroom.tight else None
        differentiate(roots, seeds, graph.parameters, targets, entered, self.makings[layer], relieve)
        taken = {seed.untyped_storage().data_ptr() for seed in seeds}
        for value, entrance in reversed(list(zip(spec.inputs, graph.inputs, strict=True))):
            if entrance.grad is not None:
                # Gradients may be views of one another or of what came in, and they are added to in place.
                address = entrance.grad.untyped_storage().data_ptr()
                share = copied(entrance.grad) if address in taken else entrance.grad
                self._add_input_grad(value, share, task, inside)
                taken.add(address)

    def _output_grad(self, value: int, microbatch: int, inside: dict[int, Tensor]) -> Tensor | None:
        if value == self.chain.loss:
            loss = self.steps[microbatch // self.num_microbatches].losses[microbatch]
            return torch.ones_like(loss) / self.num_microbatches
        if value in inside:
            return inside.pop(value)
        if value not in self.frame.numbers:
            return None
        buffer = activation_grad(self.frame.numbers[value], microbatch)
        return self.store.get(buffer) if buffer in self.store.values else None

    def _add_input_grad(self, value: int, contribution: Tensor, task: Backward, inside: dict[int, Tensor]) -> None:
        """Later consumers came first; this one's share is added to theirs."""
        if value not in self.frame.numbers:
            return
        buffer = activation_grad(self.frame.numbers[value], task.microbatch)
        if self.chain.values[value].producer >= task.first:
            if value not in inside and buffer in self.store.values:
                inside[value] = copied(self.store.get(buffer))
            inside[value] = added(inside[value], contribution) if value in inside else contribution
        elif buffer in self.store.values:
            total = self.store.get(buffer)
            after = added(total, contribution)
            if after is not total:
                self.store.drop(buffer)
                self.store.put(buffer, after)
        else:
            self.store.put(buffer, contribution)
