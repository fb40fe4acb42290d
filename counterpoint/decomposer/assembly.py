"""Segments of a trace -> a chain: number the values, generate the code, and see by a run without memory what trains."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import cast

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from counterpoint.core.errors import ModelError
from counterpoint.decomposer.chain import MODEL_INPUT, NO_LAYER, Chain, Layer, TensorSpec, Value
from counterpoint.decomposer.example import batch_shape
from counterpoint.decomposer.layering import Code, GraphBody, Piece, body, piece, separate_uses
from counterpoint.decomposer.liveness import Reach, only_live, reach_of
from counterpoint.decomposer.naming import name_segments
from counterpoint.decomposer.nodes import extents, is_random
from counterpoint.decomposer.tensors import Tensors
from counterpoint.decomposer.tracing import Trace

NO_GRADIENT = "the loss does not depend on any parameter that trains: check requires_grad and the loss"


@dataclass(frozen=True, slots=True)
class Result:
    """What a layer yields, as a run without memory shows it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    reach: Reach


def assemble(
    trace: Trace,
    segments: Sequence[Sequence[fx.Node]],
    duplicates: frozenset[fx.Node],
    tensors: Tensors,
    batch: Mapping[str, Tensor],
    device: torch.device,
) -> Chain:
    loss = _loss_node(trace, segments)
    fallback = _smallest(trace, batch)
    pieces = [piece(segment, duplicates, trace, fallback, loss) for segment in segments]
    values = _number(pieces, trace, batch)
    probe_size = next(iter(batch.values())).shape[0] + 1
    code: Code = {}
    known: dict[str, list[Result]] = {}
    layers: list[Layer] = []
    reaches: list[list[Reach]] = []
    for name, part in zip(name_segments(segments, trace), pieces, strict=True):
        shared = [n for n in part.inputs if values[n].needs_grad and len(values[n].consumers) > 1]
        uses = separate_uses(part, shared)
        made, lean = body(part, uses, trace, tensors.owners, code)
        inputs = [values[source] for source, _ in uses]
        signature = _signature(made, inputs, tensors)
        if signature not in known:
            known[signature] = _probe(made, inputs, tensors, probe_size, device)
        for node, result in zip(part.outputs, known[signature], strict=True):
            values[node] = _confirmed(values[node], result, probe_size)
        outputs = [values[node] for node in part.outputs]
        layers.append(_layer(len(layers), name, part, made, lean, inputs, outputs, signature))
        reaches.append([result.reach for result in known[signature]])
    return _chain(layers, values, values[loss].index, tensors, trace, reaches)


def _loss_node(trace: Trace, segments: Sequence[Sequence[fx.Node]]) -> fx.Node:
    output = next(node for node in trace.module.graph.nodes if node.op == "output")
    loss = cast(fx.Node, output.args[0][0])
    if not any(loss in segment for segment in segments):
        raise ModelError(NO_GRADIENT)
    return loss


def _smallest(trace: Trace, batch: Mapping[str, Tensor]) -> fx.Node:
    nodes: list[fx.Node] = [node for node in trace.module.graph.nodes if node.name in trace.batch]
    return min(nodes, key=lambda node: batch[trace.batch[node.name]].nbytes)


def _number(pieces: Sequence[Piece], trace: Trace, batch: Mapping[str, Tensor]) -> dict[fx.Node, Value]:
    """Values by node, those of the batch first; what trains is not known yet."""
    consumers: dict[fx.Node, list[int]] = {}
    for layer, part in enumerate(pieces):
        for node in part.inputs:
            consumers.setdefault(node, []).append(layer)
    values: dict[fx.Node, Value] = {}
    for node in trace.module.graph.nodes:
        if node.name in trace.batch:
            name = trace.batch[node.name]
            users = tuple(consumers.get(node, ()))
            shape = batch_shape(batch[name])
            values[node] = Value(len(values), name, MODEL_INPUT, users, shape, batch[name].dtype, False)
    for layer, part in enumerate(pieces):
        for node in part.outputs:
            users = tuple(consumers.get(node, ()))
            shape = extents(node.meta["val"]) or ()
            values[node] = Value(len(values), node.name, layer, users, shape, node.meta["val"].dtype, False)
    return values


def _probe(
    made: GraphBody, inputs: Sequence[Value], tensors: Tensors, batch_size: int, device: torch.device
) -> list[Result]:
    """Run a layer on tensors without memory, at a batch size that the trace has not seen."""
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True), torch.enable_grad():

        def blank(shape: tuple[int, ...], dtype: torch.dtype, needs_grad: bool) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device, requires_grad=needs_grad)

        specs = {name: tensors.parameters[name] for name in made.parameters}
        parameters = {name: blank(spec.shape, spec.dtype, spec.requires_grad) for name, spec in specs.items()}
        buffers = {n: blank(tensors.buffers[n].shape, tensors.buffers[n].dtype, False) for n in made.buffers}
        arguments = [blank(v.shape_at(batch_size), v.dtype, v.needs_grad) for v in inputs]
        outputs, _ = made.run(parameters, buffers, arguments)
    leaves = list(parameters.values())
    reaches = [reach_of(output, arguments, leaves) for output in outputs]
    return [
        Result(tuple(output.shape), output.dtype, output.requires_grad, reach)
        for output, reach in zip(outputs, reaches, strict=True)
    ]


def _confirmed(value: Value, result: Result, batch_size: int) -> Value:
    if result.shape != value.shape_at(batch_size):
        raise ModelError(
            f"value {value.name!r} has shape {result.shape} at batch size {batch_size}, not "
            f"{value.shape_at(batch_size)}: the model's shapes do not follow the batch size; "
            f"give it as a list of modules (chain_of_modules)"
        )
    return replace(value, dtype=result.dtype, needs_grad=result.needs_grad)


def _signature(made: GraphBody, inputs: Sequence[Value], tensors: Tensors) -> str:
    facts = (
        made.digest,
        [_facts(tensors.parameters[name]) for name in made.parameters],
        [_facts(tensors.buffers[name]) for name in made.buffers],
        [(tuple(constant.shape), constant.dtype) for constant in made.constants],
        [(value.shape, value.dtype, value.needs_grad) for value in inputs],
    )
    return blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def _layer(
    index: int,
    name: str,
    part: Piece,
    made: GraphBody,
    lean: GraphBody | None,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    signature: str,
) -> Layer:
    return Layer(
        index=index,
        name=name,
        parameters=tuple(dict.fromkeys(made.parameters)),
        tied=(),
        buffers=tuple(dict.fromkeys(made.buffers)),
        mutates=made.mutates,
        inputs=tuple(value.index for value in inputs),
        outputs=tuple(value.index for value in outputs),
        random=any(is_random(node) for node in part.nodes),
        signature=signature,
        body=made,
        hollow=lean,
    )


def _facts(spec: TensorSpec) -> tuple[object, ...]:
    return spec.shape, spec.dtype, spec.requires_grad


def _chain(
    layers: Sequence[Layer],
    by_node: Mapping[fx.Node, Value],
    loss: int,
    tensors: Tensors,
    trace: Trace,
    reaches: Sequence[Sequence[Reach]],
) -> Chain:
    """Give each parameter to the first layer that uses it."""
    values = list(by_node.values())
    if not values[loss].needs_grad:
        raise ModelError(NO_GRADIENT)
    batch = {trace.batch[node.name]: value.index for node, value in by_node.items() if node.name in trace.batch}
    layers, values, parameters = only_live(layers, values, tensors.parameters, loss, reaches)
    return own(layers, tuple(values), loss, replace(tensors, parameters=parameters), batch)


def own(
    layers: Sequence[Layer], values: tuple[Value, ...], loss: int, tensors: Tensors, batch: Mapping[str, int]
) -> Chain:
    """A chain of layers that say what they use: the first user of a parameter owns it, the others are tied to it."""
    owner: dict[str, int] = {}
    for layer in layers:
        for name in (*layer.parameters, *layer.buffers):
            owner.setdefault(name, layer.index)
    owned = tuple(
        replace(
            layer,
            parameters=tuple(name for name in layer.parameters if owner[name] == layer.index),
            tied=tuple(name for name in layer.parameters if owner[name] != layer.index),
        )
        for layer in layers
    )
    parameters = {n: replace(spec, owner=owner.get(n, NO_LAYER)) for n, spec in tensors.parameters.items()}
    buffers = {n: replace(spec, owner=owner.get(n, NO_LAYER)) for n, spec in tensors.buffers.items()}
    return Chain(owned, values, loss, parameters, buffers, tensors.aliases, batch)
