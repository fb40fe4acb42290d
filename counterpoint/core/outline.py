"""The chain's outline: which layer produces and consumes which value, and whose weights each layer uses.

It says nothing of sizes or times (that is the profile) and nothing of order (that is the schedule). Batch inputs are
not values: they come with the data and are on every device that wants them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that leaves the layer that made it."""

    producer: int
    consumers: tuple[int, ...]
    has_grad: bool = True


@dataclass(frozen=True, slots=True)
class LayerOutline:
    """What a layer brings: weights that train, constants that do not, and the weights of others that it uses too.

    It `narrows` if weights that are only computed with need less memory than those that are still to be updated.
    """

    has_weights: bool = True
    has_constants: bool = False
    tied: tuple[int, ...] = ()
    narrows: bool = False


@dataclass(frozen=True)
class Outline:
    layers: tuple[LayerOutline, ...]
    values: tuple[Value, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a chain needs at least one layer")
        for index, value in enumerate(self.values):
            _refuse_bad_value(index, value, len(self.layers))
        for index, layer in enumerate(self.layers):
            for other in layer.tied:
                if not 0 <= other < index or not (self.layers[other].has_weights or self.layers[other].has_constants):
                    raise ValueError(f"layer {index} is tied to layer {other}, which is no earlier layer with weights")
            if layer.narrows and not layer.has_weights:
                raise ValueError(f"layer {index} narrows, but has no weights")

    def __hash__(self) -> int:
        return hash((len(self.layers), len(self.values)))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def inputs(self, first: int, last: int) -> tuple[int, ...]:
        """Values that layers `first` to `last` consume and that come from before."""
        return self._remembered("inputs", first, last, _inputs)

    def outputs(self, first: int, last: int) -> tuple[int, ...]:
        """Values that layers `first` to `last` produce and that someone after them consumes."""
        return self._remembered("outputs", first, last, _outputs)

    def weights(self, first: int, last: int) -> tuple[int, ...]:
        """Layers whose trainable weights layers `first` to `last` use, their own and tied ones."""
        return self._remembered("weights", first, last, _weights)

    def constants(self, first: int, last: int) -> tuple[int, ...]:
        """Layers whose constants layers `first` to `last` use, their own and tied ones."""
        return self._remembered("constants", first, last, _constants)

    @cached_property
    def _memory(self) -> dict[tuple[str, int, int], tuple[int, ...]]:
        """Answers of this very outline: a shared cache would compare equal outlines layer by layer at every call."""
        return {}

    def _remembered(
        self, name: str, first: int, last: int, find: Callable[["Outline", int, int], tuple[int, ...]]
    ) -> tuple[int, ...]:
        key = (name, first, last)
        found = self._memory.get(key)
        if found is None:
            found = self._memory[key] = find(self, first, last)
        return found


def chain_outline(num_layers: int) -> Outline:
    """Layers in a row, each consuming what the one before produced."""
    values = tuple(Value(layer, (layer + 1,)) for layer in range(num_layers - 1))
    return Outline((LayerOutline(),) * num_layers, values)


def _inputs(outline: Outline, first: int, last: int) -> tuple[int, ...]:
    return tuple(
        index
        for index, value in enumerate(outline.values)
        if value.producer < first and any(first <= c <= last for c in value.consumers)
    )


def _outputs(outline: Outline, first: int, last: int) -> tuple[int, ...]:
    return tuple(
        index
        for index, value in enumerate(outline.values)
        if first <= value.producer <= last and any(c > last for c in value.consumers)
    )


def _weights(outline: Outline, first: int, last: int) -> tuple[int, ...]:
    return tuple(layer for layer in _used(outline, first, last) if outline.layers[layer].has_weights)


def _constants(outline: Outline, first: int, last: int) -> tuple[int, ...]:
    return tuple(layer for layer in _used(outline, first, last) if outline.layers[layer].has_constants)


def _used(outline: Outline, first: int, last: int) -> tuple[int, ...]:
    layers = range(first, last + 1)
    return _unique([*layers, *(other for layer in layers for other in outline.layers[layer].tied)])


def _unique(items: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(items))


def _refuse_bad_value(index: int, value: Value, num_layers: int) -> None:
    if not 0 <= value.producer < num_layers:
        raise ValueError(f"value {index} is produced by layer {value.producer}; layers are 0 to {num_layers - 1}")
    for consumer in value.consumers:
        if not value.producer < consumer < num_layers:
            raise ValueError(
                f"value {index} goes from layer {value.producer} to layer {consumer}; "
                f"a chain only goes forward, up to layer {num_layers - 1}"
            )
