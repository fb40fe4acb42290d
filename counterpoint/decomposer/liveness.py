"""What the outputs of layers depend on -> the same layers, with gradients only where some arrive.

A value may need a gradient for all its own layer knows and yet get none: its readers detach it, or only compare it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from torch import Tensor

from counterpoint.decomposer.chain import Layer, TensorSpec, Value


@dataclass(frozen=True, slots=True)
class Reach:
    """Which inputs, by position, and which parameters, by position among the body's, an output's gradient gets to."""

    inputs: frozenset[int]
    parameters: frozenset[int]


def reach_of(output: Tensor, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> Reach:
    """Walk the autograd graph from an output to the leaves."""
    found = {id(output)}
    stack, seen = [output.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.add(id(getattr(node, "variable", None)))
            stack += [after for after, _ in node.next_functions]
    return Reach(
        frozenset(position for position, leaf in enumerate(inputs) if leaf.requires_grad and id(leaf) in found),
        frozenset(position for position, leaf in enumerate(parameters) if leaf.requires_grad and id(leaf) in found),
    )


def only_live(
    layers: Sequence[Layer],
    values: Sequence[Value],
    parameters: Mapping[str, TensorSpec],
    loss: int,
    reaches: Sequence[Sequence[Reach]],
) -> tuple[list[Layer], list[Value], dict[str, TensorSpec]]:
    """From the loss back; `reaches` are each layer's, one per output. What gets no gradient is frozen."""
    live_values, live_parameters = {loss}, set()
    for layer, reach in zip(reversed(layers), reversed(reaches), strict=True):
        for output, reached in zip(layer.outputs, reach, strict=True):
            if output in live_values:
                live_values |= {layer.inputs[position] for position in reached.inputs}
                live_parameters |= {layer.parameters[position] for position in reached.parameters}
    used = {name for layer in layers for name in layer.parameters}
    dead = {name for name in used - live_parameters if parameters[name].requires_grad}
    mute = {value.index for value in values if value.needs_grad} - live_values
    return (
        [_marked(layer, dead, mute) for layer in layers],
        [replace(value, needs_grad=value.needs_grad and value.index in live_values) for value in values],
        {n: replace(spec, requires_grad=spec.requires_grad and n not in dead) for n, spec in parameters.items()},
    )


def _marked(layer: Layer, dead: set[str], mute: set[int]) -> Layer:
    """A layer that has less to differentiate than others with its graph costs less than they do."""
    facts = [name in dead for name in layer.parameters], [i in mute for i in (*layer.inputs, *layer.outputs)]
    if not any(map(any, facts)):
        return layer
    return replace(layer, signature=blake2b(f"{layer.signature}{facts}".encode(), digest_size=16).hexdigest())
