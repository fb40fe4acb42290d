"""The chain: a model as a sequence of layers, the values that pass between them, and how to run it all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from counterpoint.core.errors import ModelError

MODEL_INPUT = -1
NO_LAYER = -1

Batch = Mapping[str, Tensor] | Sequence[Tensor] | Tensor


@dataclass(frozen=True, slots=True)
class Extent:
    """One dimension of a value: a fixed part and a part per sample of the batch.

    >>> Extent(fixed=1, per_sample=16).at(4)
    65
    """

    fixed: int
    per_sample: int = 0

    def at(self, batch_size: int) -> int:
        return self.fixed + self.per_sample * batch_size

    def batch_size(self, size: int) -> int:
        """The batch size at which this dimension has the given size."""
        return (size - self.fixed) // self.per_sample


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that leaves the layer that made it, or comes with the batch (producer -1).

    It may be non-contiguous; whoever stores it should keep its strides, for kernels may round differently otherwise.
    """

    index: int
    name: str
    producer: int
    consumers: tuple[int, ...]
    shape: tuple[Extent, ...]
    dtype: torch.dtype
    needs_grad: bool

    def shape_at(self, batch_size: int) -> tuple[int, ...]:
        return tuple(extent.at(batch_size) for extent in self.shape)

    def bytes_at(self, batch_size: int) -> int:
        return prod(self.shape_at(batch_size)) * self.dtype.itemsize


class Body(Protocol):
    """What a layer computes: a pure function of weights, buffers and inputs."""

    def run(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]: ...


@dataclass(frozen=True, slots=True)
class Layer:
    """The smallest unit that is loaded, run and updated.

    `parameters` are those it owns (it is their first user), `tied` those it uses and another layer owns.
    `inputs` may name a value twice: each occurrence is one use of it. Whoever differentiates the layer by itself gives
    each occurrence its own leaf and adds their gradients from the last occurrence to the first; then a value with
    several consumers gets its gradient summed in the order of plain autograd, bit for bit.
    Layers with equal `signature` cost the same: they have the same graph, shapes and dtypes. `hollow` is a body for
    runs whose outputs nobody reads, None if there is nothing to save by that: autograd keeps the same as ever.
    """

    index: int
    name: str
    parameters: tuple[str, ...]
    tied: tuple[str, ...]
    buffers: tuple[str, ...]
    mutates: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    random: bool
    signature: str
    body: Body = field(repr=False, compare=False)
    hollow: Body | None = field(default=None, repr=False, compare=False)

    def run(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        inputs: Sequence[Tensor],
        unread: bool = False,
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Outputs, and the new values of the buffers it mutates. Its arguments are only read.

        Outputs that will be `unread` have their places in autograd's graph, but not always their content.
        """
        body = self.hollow if unread and self.hollow is not None else self.body
        return body.run(parameters, buffers, inputs)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A parameter or buffer of the model; `owner` is the first layer that uses it, -1 if none does."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    owner: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Chain:
    """A model as layers. Names are those of `model.named_parameters()` and `named_buffers()`.

    `aliases` maps every further name of a tied tensor to the one used here. `batch` maps the names of the batch tensors
    to their values, in the order in which a batch given as a tuple has them.
    """

    layers: tuple[Layer, ...]
    values: tuple[Value, ...]
    loss: int
    parameters: Mapping[str, TensorSpec]
    buffers: Mapping[str, TensorSpec]
    aliases: Mapping[str, str]
    batch: Mapping[str, int]

    def __post_init__(self) -> None:
        for name in ("parameters", "buffers", "aliases", "batch"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def bind(self, batch: Batch) -> dict[int, Tensor]:
        """The batch's tensors by value index; refuses a batch that is not of the example's form."""
        tensors = name_tensors(batch, tuple(self.batch))
        problems = [f"{name!r} is missing" for name in self.batch if name not in tensors]
        problems += [f"{name!r} was not in the example" for name in tensors if name not in self.batch]
        sizes = [tensor.shape[0] for tensor in tensors.values() if tensor.dim()]
        for name, tensor in tensors.items():
            if name in self.batch and sizes:
                problems += _misfits(name, tensor, self.values[self.batch[name]], sizes[0])
        if problems:
            raise ModelError(f"the batch does not fit the example: {'; '.join(problems)}")
        return {self.batch[name]: tensor for name, tensor in tensors.items()}

    def run(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and the mutated buffers: all layers in one autograd graph, for tests and small models."""
        values = self.bind(batch)
        current = dict(buffers)
        mutated: dict[str, Tensor] = {}
        for layer in self.layers:
            outputs, changed = layer.run(parameters, current, [values[index] for index in layer.inputs])
            values.update(zip(layer.outputs, outputs, strict=True))
            mutated.update(changed)
            current.update(changed)
            for index in layer.inputs:
                if self.values[index].consumers[-1] == layer.index:
                    values.pop(index, None)
        return values[self.loss], mutated


def name_tensors(batch: Batch, names: Sequence[str]) -> dict[str, Tensor]:
    """A batch as a mapping; tensors without names get `names` in order."""
    if isinstance(batch, Mapping):
        return dict(batch)
    tensors = (batch,) if isinstance(batch, Tensor) else tuple(batch)
    if len(tensors) != len(names):
        raise ModelError(f"the batch has {len(tensors)} tensors, the example had {len(names)}: give as many")
    return dict(zip(names, tensors, strict=True))


def _misfits(name: str, tensor: Tensor, value: Value, batch_size: int) -> list[str]:
    shape = value.shape_at(batch_size)
    if tuple(tensor.shape) != shape:
        return [f"{name!r} has shape {tuple(tensor.shape)}, not {shape}"]
    if tensor.dtype != value.dtype:
        return [f"{name!r} is {tensor.dtype}, not {value.dtype}"]
    return []
