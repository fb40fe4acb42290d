"""A chain's layers into a profile: each distinct layer is run as the executor runs it, at a few microbatch sizes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from counterpoint.core.profile import MAKINGS, Curve, LayerCost, Profile, ValueCost
from counterpoint.decomposer.chain import Chain, Layer
from counterpoint.profiler.fresh_pages import FREE_PAGES, FreshPages, probe_pages
from counterpoint.profiler.meter import Meter, is_large, storage_bytes
from counterpoint.runtime.backend import CPU, Backend
from counterpoint.runtime.frame import Flat, Frame
from counterpoint.runtime.gradients import Target, differentiate, discarding
from counterpoint.runtime.memory_process import trim
from counterpoint.runtime.optimizer import SLICE_ELEMENTS, UpdateRule
from counterpoint.runtime.products import Product, find_products
from counterpoint.runtime.tidy_heap import is_tidy

_MOST_TIMES, _ENOUGH_NS = 3, 1_000_000_000  # a layer is run so often, or so long


@dataclass(frozen=True, slots=True)
class _Memory:
    """What one layer makes at one microbatch size, and what it would take longer if the system had to find it first."""

    saved_bytes: int
    forward_workspace_bytes: int
    backward_workspace_bytes: int
    forward_fresh_ns: int
    backward_fresh_ns: int
    large_bytes: int


@dataclass(frozen=True, slots=True)
class _Sample:
    """One layer at one microbatch size, timed in memory that is there already."""

    forward_ns: int
    backward_ns: int
    memory: _Memory
    making: str
    unread_ns: int


def measured_sizes(profile: Profile) -> tuple[int, ...]:
    """The microbatch sizes that a profile was measured at."""
    return tuple(size for size, _ in profile.layers[0].forward_ns.points)


def profile_of(
    frame: Frame,
    states: tuple[Flat, ...],
    rule: UpdateRule,
    sizes: Sequence[int],
    name: str,
    tokens_per_sample: int = 1,
    autocast: torch.dtype | None = None,
    limit_bytes: int | None = None,
    backend: Backend = CPU,
) -> Profile:
    """Times and bytes of every layer; layers with one signature are measured once.

    Sizes at which some layer would probably pass `limit_bytes` are left out, the smallest excepted.
    """
    samples = _samples(frame.chain, sizes, autocast, limit_bytes, backend)
    measured = tuple(samples)
    update_ns = _update_ns_per_element(rule, frame, backend)
    host_update_ns = update_ns if backend.is_process else _update_ns_per_element(rule, frame, CPU)
    costs = []
    for layer in frame.chain.layers:
        found = [samples[size][layer.signature] for size in measured]
        costs.append(_layer_cost(frame, states, layer, measured, found, (update_ns, host_update_ns)))
    values = tuple(
        ValueCost(
            outline_value.producer,
            outline_value.consumers,
            Curve(tuple((size, frame.chain.values[index].bytes_at(size)) for size in measured)),
            outline_value.has_grad,
        )
        for outline_value, index in zip(frame.outline.values, frame.values, strict=True)
    )
    return Profile(name, tuple(costs), values, tokens_per_sample, is_tidy() or not backend.is_process)


def _samples(
    chain: Chain, sizes: Sequence[int], autocast: torch.dtype | None, limit_bytes: int | None, backend: Backend
) -> dict[int, dict[str, _Sample]]:
    """By size, smallest first, and signature; of the sizes at which every layer was measured."""
    distinct = {layer.signature: layer for layer in chain.layers}
    common, found, pages = sorted(sizes), {}, probe_pages() if backend.is_process else FREE_PAGES
    for signature, layer in distinct.items():
        found[signature] = _Runner(chain, layer, autocast, pages, backend).samples(common, limit_bytes)
        common = [size for size in common if size in found[signature]]
        trim()
    return {size: {signature: samples[size] for signature, samples in found.items()} for size in common}


def _layer_cost(
    frame: Frame,
    states: tuple[Flat, ...],
    layer: Layer,
    sizes: Sequence[int],
    samples: list[_Sample],
    updates_ns: tuple[float, float],
) -> LayerCost:
    """`updates_ns` are those of an element on the device and on the host."""

    def curve(read: Callable[[_Sample], int]) -> Curve:
        return Curve(tuple((size, read(sample)) for size, sample in zip(sizes, samples, strict=True)))

    weights = frame.weights[layer.index]
    elements = sum(slot.num_bytes // slot.dtype.itemsize for slot in weights.slots)
    return LayerCost(
        name=layer.name,
        forward_ns=curve(lambda s: s.forward_ns),
        backward_ns=curve(lambda s: s.backward_ns),
        forward_fresh_ns=curve(lambda s: s.memory.forward_fresh_ns),
        backward_fresh_ns=curve(lambda s: s.memory.backward_fresh_ns),
        update_ns=int(updates_ns[0] * elements),
        host_update_ns=int(updates_ns[1] * elements),
        weight_bytes=weights.num_bytes,
        grad_bytes=weights.num_bytes,
        state_bytes=states[layer.index].num_bytes,
        constant_bytes=frame.constants[layer.index].num_bytes,
        saved_bytes=curve(lambda s: s.memory.saved_bytes),
        forward_workspace_bytes=curve(lambda s: s.memory.forward_workspace_bytes),
        backward_workspace_bytes=curve(lambda s: s.memory.backward_workspace_bytes),
        tied=frame.outline.layers[layer.index].tied,
        old_bytes=frame.olds[layer.index].num_bytes,
        large_bytes=curve(lambda s: s.memory.large_bytes),
        unread_ns=curve(lambda s: s.unread_ns),
        makings=tuple((size, sample.making) for size, sample in zip(sizes, samples, strict=True)),
    )


class _Runner:
    """Runs one layer as the executor does: gradients are copied to where they are kept, or added to what is there."""

    def __init__(
        self, chain: Chain, layer: Layer, autocast: torch.dtype | None, pages: FreshPages, backend: Backend
    ) -> None:
        self.chain, self.layer, self.autocast, self.pages, self.backend = chain, layer, autocast, pages, backend
        self.parameters: dict[str, Tensor] = {}
        for name in (*layer.parameters, *layer.tied):
            spec = chain.parameters[name]
            self.parameters[name] = self._stand_in(spec.shape, spec.dtype).requires_grad_(spec.requires_grad)
        self.targets = {name: torch.zeros_like(t) for name, t in self.parameters.items() if t.requires_grad}
        self.makings: dict[int, str] = {}
        specs = {name: chain.buffers[name] for name in layer.buffers}
        self.buffers = {name: self._stand_in(spec.shape, spec.dtype) for name, spec in specs.items()}

    def samples(self, sizes: Sequence[int], limit_bytes: int | None) -> dict[int, _Sample]:
        """By size, smallest first; larger ones only while they will probably fit."""
        memory: dict[int, _Memory] = {}
        for size in sizes:
            if memory and limit_bytes is not None:
                before = max(memory)
                found = memory[before]
                workspace = max(found.forward_workspace_bytes, found.backward_workspace_bytes)
                if (found.saved_bytes + workspace) * size // before > limit_bytes:
                    break
            self.makings[size] = self.try_out(self._inputs(size))
            memory[size] = self.meter(self._inputs(size), size)
            trim()
        times = self._times(tuple(memory))
        return {
            size: _Sample(
                int(median(forward for forward, _ in times[size])),
                int(median(backward for _, backward in times[size])),
                memory[size],
                self.makings[size],
                self._unread_ns(size),
            )
            for size in memory
        }

    def _times(self, sizes: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
        """Of forward and backward; short ones several times, the sizes in turn so that a drift hits all alike.

        The first run of each turn finds the memory, the second is timed; gradients are copied and added to in turn.
        """
        found: dict[int, list[tuple[int, int]]] = {size: [] for size in sizes}
        spent = dict.fromkeys(sizes, 0)
        for _ in range(_MOST_TIMES):
            for size in sizes:
                if spent[size] < _ENOUGH_NS:
                    inputs = self._inputs(size)
                    begin = time.monotonic_ns()
                    self.clock(inputs, size, set())
                    found[size].append(self.clock(inputs, size, set(self.targets)))
                    spent[size] += time.monotonic_ns() - begin
        return found

    def clock(self, inputs: list[Tensor], size: int, started: set[str]) -> tuple[int, int]:
        begin = self._now_ns()
        outputs, entered = self._forward(inputs)
        middle = self._now_ns()
        self._backward(outputs, entered, started, self.makings[size])
        return middle - begin, self._now_ns() - middle

    def _now_ns(self) -> int:
        """When all that was begun is done."""
        self.backend.finish()
        return time.monotonic_ns()

    def _unread_ns(self, size: int) -> int:
        """What a forward saves if nobody reads its outputs: read and unread in turn."""
        if self.layer.hollow is None or self.chain.loss in self.layer.outputs:
            return 0
        inputs = self._inputs(size)
        times: dict[bool, list[int]] = {False: [], True: []}
        for _ in range(1 + _MOST_TIMES):
            for unread, found in times.items():
                begin = self._now_ns()
                self._forward(inputs, unread)
                found.append(self._now_ns() - begin)
        return max(0, int(median(times[False][1:]) - median(times[True][1:])))

    def try_out(self, inputs: list[Tensor]) -> str:
        """The best way to make gradients of weights that leaves their bits as they are."""
        outputs, _ = self._forward(inputs)
        roots = [output for output in outputs if output.requires_grad]
        if not roots:
            return "whole"
        found: list[str] = []
        products = find_products([get_gradient_edge(root) for root in roots], self.parameters)
        hooks = [product.node.register_prehook(_trier(product, found)) for product in products.values()]
        torch.autograd.backward(roots, [torch.randn_like(root) for root in roots])
        for hook in hooks:
            hook.remove()
        for parameter in self.parameters.values():
            parameter.grad = None
        return min(found, key=MAKINGS.index, default="whole")

    def meter(self, inputs: list[Tensor], size: int) -> _Memory:
        """What tasks read and write is not workspace."""
        kept: list[Tensor] = []
        fixed = [*self.parameters.values(), *self.buffers.values()]
        batch = [t for i, t in zip(self.layer.inputs, inputs, strict=True) if self.chain.values[i].producer < 0]
        apart = {tensor.untyped_storage().data_ptr() for tensor in (*fixed, *batch)}
        with Meter([*fixed, *inputs], self.backend) as forward, discarding():
            plain, _ = self._forward(inputs)
        workspace = max(0, forward.peak_bytes - storage_bytes(list(plain)))
        del plain

        def pack(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in apart:
                kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs, entered = self._forward(inputs)
        with Meter([*fixed, *self.targets.values(), *inputs, *kept], self.backend) as backward:
            self._backward(outputs, entered, set(self.targets), self.makings[size])
        fresh = (self.pages.ns(forward.made), self.pages.ns(backward.made))
        kept_large = storage_bytes([tensor for tensor in kept if is_large(tensor.untyped_storage().nbytes())])
        large = max(forward.peak_large_bytes, kept_large + backward.peak_large_bytes)
        return _Memory(storage_bytes(kept), workspace, backward.peak_bytes, *fresh, large)

    def _stand_in(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return _stand_in(shape, dtype, self.backend)

    def _inputs(self, size: int) -> list[Tensor]:
        return [
            self._stand_in(self.chain.values[i].shape_at(size), self.chain.values[i].dtype) for i in self.layer.inputs
        ]

    def _forward(self, inputs: list[Tensor], unread: bool = False) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        """Outputs, and the inputs that want a gradient."""
        leaves = [
            tensor.detach().requires_grad_(self.chain.values[index].needs_grad)
            for index, tensor in zip(self.layer.inputs, inputs, strict=True)
        ]
        with self.backend.autocast(self.autocast):
            outputs = self.layer.run(self.parameters, self.buffers, leaves, unread)[0]
        return outputs, [leaf for leaf in leaves if leaf.requires_grad]

    def _backward(self, outputs: tuple[Tensor, ...], entered: list[Tensor], started: set[str], making: str) -> None:
        """Gradients go to the targets, some of which have been `started`."""
        roots = [output for output in outputs if output.requires_grad]
        if roots:
            edges, seeds = [get_gradient_edge(root) for root in roots], [torch.ones_like(root) for root in roots]
            targets = {name: Target(tensor, started) for name, tensor in self.targets.items()}
            differentiate(edges, seeds, self.parameters, targets, entered, making)
        for parameter in self.parameters.values():
            parameter.grad = None


def _trier(product: Product, found: list[str]) -> Callable[[tuple[Tensor, ...]], None]:
    return lambda grads: found.append(product.try_out(grads[0]))


def _stand_in(shape: tuple[int, ...], dtype: torch.dtype, backend: Backend) -> Tensor:
    """Content does not matter, but it must be ordinary: small numbers, index 0, true."""
    blank = torch.zeros(shape, dtype=dtype, device=backend.device)
    if dtype.is_floating_point:
        return blank.normal_(0.0, 0.02)
    return blank.fill_(1) if dtype == torch.bool else blank


def _update_ns_per_element(rule: UpdateRule, frame: Frame, backend: Backend) -> float:
    """Time of the optimizer's own step on one slice."""
    names = [slot.name for flat in frame.weights for slot in flat.slots if slot.name in rule.group_of]
    if not names:
        return 0.0
    shape = (1024, 8 * SLICE_ELEMENTS // 1024)
    parameter, grad = (_stand_in(shape, torch.float32, backend) for _ in range(2))
    state = {
        tensor.key: torch.zeros(tensor.shape, dtype=tensor.dtype, device=backend.device)
        for tensor in rule.state_tensors(names[0], shape, torch.float32)
    }
    scalars = dict(rule.scalars)
    times = []
    for number in range(6):
        begin = time.monotonic_ns()
        rule.update(names[0], parameter, grad, state, fresh=number == 0)
        backend.finish()
        times.append(time.monotonic_ns() - begin)
    rule.scalars = scalars
    return median(times[1:]) / (8 * SLICE_ELEMENTS)
