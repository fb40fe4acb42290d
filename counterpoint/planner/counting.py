"""A shape and a device into a Profile, by counting FLOPs and bytes: a roofline per operation, no measurement.

Checked against the times that Harmony's authors measured on a GTX 1080 Ti (`tests/planner/test_counting.py`): matrix
products reach 55 % of the peak there, and everything else moves at the speed of memory.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from counterpoint.core.machine import Device
from counterpoint.core.profile import Curve, LayerCost, Profile, ValueCost
from counterpoint.planner.shapes import Transformer

Precision: TypeAlias = Literal["fp32", "bf16"]
Granularity: TypeAlias = Literal["half", "block"]

SIZES = (1, 2, 4, 8, 16, 32)
EFFICIENCY_PERCENT = 55
LAUNCH_NS = 10_000
NORM_STATISTICS_BYTES = 8


@dataclass(frozen=True, slots=True)
class Speed:
    """What a device reaches, and how many bytes an element takes."""

    flops_per_s: int
    memory_bytes_per_s: int
    host_memory_bytes_per_s: int
    launch_ns: int
    precision: Precision

    @property
    def element(self) -> int:
        return 4 if self.precision == "fp32" else 2

    def time_ns(self, flops: int, moved_bytes: int) -> int:
        compute, memory = flops * 10**9 // self.flops_per_s, moved_bytes * 10**9 // self.memory_bytes_per_s
        return max(compute, memory) + self.launch_ns


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel: FLOPs and elements moved per sample, and weight elements moved per launch."""

    flops: int
    moved: int
    weights: int = 0
    backward_flops_percent: int = 200

    def forward_ns(self, size: int, speed: Speed) -> int:
        return speed.time_ns(self.flops * size, (self.moved * size + self.weights) * speed.element)

    def backward_ns(self, size: int, speed: Speed) -> int:
        flops = self.flops * size * self.backward_flops_percent // 100
        return speed.time_ns(flops, 2 * (self.moved * size + self.weights) * speed.element)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer as counted. Saved and transient bytes are per sample; `largest_matrix` counts parameters."""

    name: str
    parameters: int
    ops: tuple[Op, ...]
    saved_bytes: int
    forward_bytes: int
    backward_bytes: int
    largest_matrix: int
    tied: tuple[int, ...] = ()


def profile_of(
    shape: Transformer,
    device: Device,
    *,
    precision: Precision = "fp32",
    flash_attention: bool = True,
    granularity: Granularity = "half",
    host_memory_bytes_per_s: int = 2 * 10**10,
    efficiency_percent: int = EFFICIENCY_PERCENT,
) -> Profile:
    """Adam throughout. `bf16` keeps an fp32 master copy beside the moments; weights and gradients take 2 bytes."""
    speed = Speed(
        device.flops_per_s * efficiency_percent // 100,
        device.memory_bytes_per_s,
        host_memory_bytes_per_s,
        LAUNCH_NS,
        precision,
    )
    layers = layers_of(shape, speed.element, flash_attention, granularity)
    boundary = Curve.proportional(shape.sequence_length * shape.width * speed.element)
    values = tuple(ValueCost(i, (i + 1,), boundary) for i in range(len(layers) - 1))
    costs = {layer: _cost(layer, speed) for layer in layers}
    named = tuple(replace(costs[layer], name=name) for layer, name in zip(layers, _names(layers), strict=True))
    return Profile(shape.name, named, values, shape.sequence_length)


def _names(layers: tuple[Layer, ...]) -> Iterator[str]:
    """Layers of one kind are numbered: `attention 0`, `mlp 0`, `attention 1` and so on."""
    seen: Counter[str] = Counter()
    for layer in layers:
        yield layer.name if layer.name in ("embedding", "head") else f"{layer.name} {seen[layer.name]}"
        seen[layer.name] += 1


def layers_of(shape: Transformer, element: int, flash: bool, granularity: Granularity) -> tuple[Layer, ...]:
    """Embedding, blocks whole or in halves, head with the loss."""
    attention, mlp = _attention(shape, element, flash), _mlp(shape, element)
    block = (attention, mlp) if granularity == "half" else (_joined("block", attention, mlp),)
    return _embedding(shape, element), *block * shape.num_blocks, _head(shape, element)


def _embedding(shape: Transformer, element: int) -> Layer:
    """Saved: the token numbers (8 bytes), and the sum before the norm where there is one."""
    tokens, width = shape.sequence_length, shape.width
    normed = shape.style == "bert"
    saved = tokens * (8 + (width * element + NORM_STATISTICS_BYTES if normed else 0))
    ops = (Op(0, 3 * tokens * width), *((_norm(shape),) if normed else ()))
    transient = 2 * tokens * width * element
    return Layer("embedding", shape.embedding_parameters, ops, saved, transient, transient, shape.vocabulary * width)


def _attention(shape: Transformer, element: int, flash: bool) -> Layer:
    """Saved per token: input, normed input, queries, keys, values, result; with flash attention one fp32 logarithm per
    head, without it the whole row of probabilities; the norm's statistics."""
    tokens, width, heads = shape.sequence_length, shape.width, shape.num_heads
    projected = width + 2 * shape.key_value_width
    scores = heads * tokens
    saved = (3 * width + projected) * element + NORM_STATISTICS_BYTES + (4 * heads if flash else scores * element)
    transient = (2 * width + projected + (0 if flash else 2 * scores)) * element
    core_moved = projected + width + (0 if flash else 6 * scores)
    core = Op(4 * tokens * tokens * width, tokens * core_moved, 0, 250 if flash else 200)
    ops = (
        _norm(shape),
        _product(tokens, width, projected),
        core,
        _product(tokens, width, width),
        _add(shape),
    )
    return Layer(
        "attention",
        shape.attention_parameters,
        ops,
        tokens * saved,
        tokens * transient,
        tokens * transient,
        width * projected,
    )


def _mlp(shape: Transformer, element: int) -> Layer:
    """Saved per token: input, normed input, before and after the nonlinearity (gated: gate, its nonlinearity, up and
    their product); the norm's statistics."""
    tokens, width, feed = shape.sequence_length, shape.width, shape.feed_width
    branches = 2 if shape.gated else 1
    saved = (2 * width + 2 * branches * feed) * element + NORM_STATISTICS_BYTES
    transient = (width + (branches + 1) * feed) * element
    ups = (_product(tokens, width, feed),) * branches
    nonlinear = Op(0, tokens * feed * (5 if shape.gated else 2))
    ops = (_norm(shape), *ups, nonlinear, _product(tokens, feed, width), _add(shape))
    return Layer("mlp", shape.mlp_parameters, ops, tokens * saved, tokens * transient, tokens * transient, width * feed)


def _head(shape: Transformer, element: int) -> Layer:
    """Saved per token: input, normed input, logarithms of probabilities in fp32; BERT's head has a dense layer more."""
    tokens, width, words = shape.sequence_length, shape.width, shape.vocabulary
    dense = shape.style == "bert"
    saved = (2 + 2 * dense) * width * element + NORM_STATISTICS_BYTES + 4 * words
    transient = (element + 4) * words
    loss = Op(0, tokens * words * 4)
    first = (_product(tokens, width, width), Op(0, 2 * tokens * width)) if dense else ()
    ops = (*first, _norm(shape), _product(tokens, width, words), loss)
    return Layer(
        "head",
        shape.head_parameters,
        ops,
        tokens * saved,
        tokens * transient,
        tokens * transient,
        words * width,
        (0,) if shape.tied else (),
    )


def _product(tokens: int, inputs: int, outputs: int) -> Op:
    return Op(2 * tokens * inputs * outputs, tokens * (inputs + outputs), inputs * outputs)


def _norm(shape: Transformer) -> Op:
    return Op(0, 2 * shape.sequence_length * shape.width)


def _add(shape: Transformer) -> Op:
    return Op(0, 3 * shape.sequence_length * shape.width)


def _joined(name: str, a: Layer, b: Layer) -> Layer:
    return Layer(
        name,
        a.parameters + b.parameters,
        a.ops + b.ops,
        a.saved_bytes + b.saved_bytes,
        max(a.forward_bytes, b.forward_bytes),
        max(a.backward_bytes, b.backward_bytes),
        max(a.largest_matrix, b.largest_matrix),
    )


def _cost(layer: Layer, speed: Speed) -> LayerCost:
    """A backward holds the gradient of its largest matrix for a moment before adding it to the step's gradient."""
    weight, grad = layer.parameters * speed.element, layer.parameters * speed.element
    state = layer.parameters * (8 if speed.precision == "fp32" else 12)
    update = layer.parameters * _UPDATE_BYTES
    return LayerCost(
        layer.name,
        Curve(tuple((size, sum(op.forward_ns(size, speed) for op in layer.ops)) for size in SIZES)),
        Curve(tuple((size, sum(op.backward_ns(size, speed) for op in layer.ops)) for size in SIZES)),
        update * 10**9 // speed.memory_bytes_per_s + speed.launch_ns,
        update * 10**9 // speed.host_memory_bytes_per_s + speed.launch_ns,
        weight,
        grad,
        state,
        saved_bytes=Curve.proportional(layer.saved_bytes),
        forward_workspace_bytes=Curve.proportional(layer.forward_bytes),
        backward_workspace_bytes=Curve.proportional(layer.backward_bytes, layer.largest_matrix * speed.element),
        tied=layer.tied,
    )


# Adam reads weight, gradient and two moments and writes weight and moments: 7 x 4 bytes. With an fp32 master copy it
# reads gradient (2), master and moments (12) and writes those and the weight (14): 28 bytes as well.
_UPDATE_BYTES = 28
