"""A chain into the outline that programs are written for, and how the two number values and weights."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch

from counterpoint.core.outline import LayerOutline, Outline, Value
from counterpoint.decomposer.chain import Chain
from counterpoint.runtime.disk_extents import round_to_blocks


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor within a flat stretch of memory."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset_bytes: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Flat:
    """Tensors one after another, each at a whole block, so that one transfer moves all and each can be read alone."""

    slots: tuple[Slot, ...]
    num_bytes: int

    @staticmethod
    def of(tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]]) -> "Flat":
        slots, offset = [], 0
        for name, shape, dtype in tensors:
            slots.append(Slot(name, tuple(shape), dtype, offset))
            offset += round_to_blocks(slots[-1].num_bytes)
        return Flat(tuple(slots), offset)


@dataclass(frozen=True)
class Frame:
    """`values` maps the outline's values to the chain's; `weights` and `constants` lay out each layer's own tensors.

    `olds` lay out weights that are only computed with; nothing where that is no smaller.
    """

    chain: Chain
    outline: Outline
    values: tuple[int, ...]
    numbers: Mapping[int, int]
    weights: tuple[Flat, ...]
    constants: tuple[Flat, ...]
    olds: tuple[Flat, ...]

    @property
    def num_layers(self) -> int:
        return len(self.chain.layers)

    def owner(self, name: str) -> int:
        return self.chain.parameters[name].owner


def frame_of(chain: Chain, narrow: Mapping[str, torch.dtype] | None = None) -> Frame:
    """Values of the batch and values that nobody consumes are not the program's business.

    `narrow` are the dtypes of parameters that may be kept in less than their own when they are only computed with.
    """
    values = tuple(v.index for v in chain.values if v.producer >= 0 and v.consumers)
    olds = tuple(_old(chain, index, narrow or {}) for index in range(len(chain.layers)))
    outline = Outline(
        tuple(_layer_outline(chain, index, bool(old.slots)) for index, old in enumerate(olds)),
        tuple(Value(chain.values[i].producer, chain.values[i].consumers, chain.values[i].needs_grad) for i in values),
    )
    return Frame(
        chain,
        outline,
        values,
        {value: number for number, value in enumerate(values)},
        tuple(_flat(chain, index, trains=True) for index in range(len(chain.layers))),
        tuple(_flat(chain, index, trains=False) for index in range(len(chain.layers))),
        olds,
    )


def _layer_outline(chain: Chain, index: int, narrows: bool) -> LayerOutline:
    layer = chain.layers[index]
    trains = [chain.parameters[name].requires_grad for name in layer.parameters]
    owners = dict.fromkeys(chain.parameters[name].owner for name in layer.tied)
    return LayerOutline(any(trains), not all(trains), tuple(sorted(owners)), narrows)


def _flat(chain: Chain, index: int, trains: bool) -> Flat:
    specs = [(name, chain.parameters[name]) for name in chain.layers[index].parameters]
    return Flat.of((name, spec.shape, spec.dtype) for name, spec in specs if spec.requires_grad == trains)


def _old(chain: Chain, index: int, narrow: Mapping[str, torch.dtype]) -> Flat:
    weights = _flat(chain, index, trains=True)
    found = Flat.of((slot.name, slot.shape, narrow.get(slot.name, slot.dtype)) for slot in weights.slots)
    return found if found.num_bytes < weights.num_bytes else Flat((), 0)
