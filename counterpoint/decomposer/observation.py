"""A module's body and its input values -> what it yields, mutates and draws, as two runs at two batch sizes show."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode

from counterpoint.core.errors import ModelError
from counterpoint.decomposer.chain import MODEL_INPUT, Extent, TensorSpec, Value
from counterpoint.decomposer.explain import explain_module
from counterpoint.decomposer.nodes import draws
from counterpoint.decomposer.tensors import Tensors


@dataclass(frozen=True, slots=True)
class Observation:
    """Outputs as values whose index and producer are still to be given."""

    outputs: tuple[Value, ...]
    is_tuple: bool
    mutates: tuple[str, ...]
    random: bool


@dataclass(frozen=True, slots=True)
class _Run:
    output: Any
    mutates: tuple[str, ...]
    random: bool


class Observable(Protocol):
    """A body that yields its output as the module gave it."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def parameters(self) -> tuple[tuple[str, str], ...]: ...
    @property
    def buffers(self) -> tuple[tuple[str, str], ...]: ...
    def apply(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Sequence[Tensor]
    ) -> tuple[Any, dict[str, Tensor]]: ...


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices whether anything drew from the generator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.random = self.random or draws(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def observe(body: Observable, inputs: Sequence[Value], tensors: Tensors, batch_size: int) -> Observation:
    """Run without memory if the module allows it, else for real, with zeros for weights that are on meta."""
    kind = type(body.module).__name__
    first, second = (_run(body, inputs, tensors, size) for size in (batch_size, batch_size + 1))
    pairs = list(zip(_flat(first.output, kind), _flat(second.output, kind), strict=True))
    values = [_value(f"{kind}.{index}", a, b, batch_size) for index, (a, b) in enumerate(pairs)]
    is_tuple = not isinstance(first.output, Tensor)
    return Observation(tuple(values), is_tuple, first.mutates, first.random)


def _run(body: Observable, inputs: Sequence[Value], tensors: Tensors, batch_size: int) -> _Run:
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with FakeTensorMode():
                return _attempt(body, inputs, tensors, batch_size, {})
        except ModelError:
            raise
        except Exception:  # what cannot be done without data is done with data below
            pass
        try:
            return _attempt(body, inputs, tensors, batch_size, _own(body))
        except ModelError:
            raise
        except Exception as error:
            raise explain_module(error, body.module, batch_size) from error


def _attempt(
    body: Observable, inputs: Sequence[Value], tensors: Tensors, batch_size: int, own: Mapping[str, Tensor]
) -> _Run:
    """Run on tensors of the right shapes: the module's own where given, else zeros."""
    parameters = {name: _filled(tensors.parameters[name], own.get(name)) for _, name in body.parameters}
    buffers = {name: _filled(tensors.buffers[name], own.get(name)) for _, name in body.buffers}
    before = {name: (buffer._version, buffer.clone()) for name, buffer in buffers.items()}
    arguments = [_argument(value, batch_size) for value in inputs]
    with _Watch() as watch:
        output, after = body.apply(parameters, buffers, arguments)
    mutates = [
        name
        for name, buffer in after.items()
        if buffer is not buffers[name]
        or buffer._version != before[name][0]
        or name in _running_statistics(body)
        or (own and not torch.equal(buffer, before[name][1]))
    ]
    return _Run(output, tuple(mutates), watch.random)


def _own(body: Observable) -> dict[str, Tensor]:
    """The module's own tensors by the chain's names, as far as they hold data."""
    names = dict((*body.parameters, *body.buffers))
    named = [*body.module.named_parameters(remove_duplicate=False), *body.module.named_buffers(remove_duplicate=False)]
    return {names[local]: tensor for local, tensor in named if not tensor.is_meta}


def _running_statistics(body: Observable) -> list[str]:
    """Batch norm writes to these without telling anyone."""
    names = dict(body.buffers)
    norms = [(path, module) for path, module in body.module.named_modules() if isinstance(module, _NormBase)]
    paths = [f"{path}.{name}".lstrip(".") for path, module in norms for name in module._buffers if module.training]
    return [names[path] for path in paths if path in names]


def _filled(spec: TensorSpec, own: Tensor | None) -> Tensor:
    tensor = torch.zeros(spec.shape, dtype=spec.dtype) if own is None else own.detach().clone()
    return tensor.requires_grad_(spec.requires_grad)


def _argument(value: Value, batch_size: int) -> Tensor:
    shape = value.shape_at(batch_size)
    if value.dtype.is_floating_point and value.producer != MODEL_INPUT:
        return torch.randn(shape).to(value.dtype).requires_grad_(value.needs_grad)
    return torch.ones(shape, dtype=value.dtype)


def _flat(output: Any, kind: str) -> list[Tensor]:
    tensors = [output] if isinstance(output, Tensor) else output
    if not isinstance(tensors, tuple | list) or not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise ModelError(
            f"module {kind} returns a {type(output).__name__}: it must return a tensor or a tuple of tensors"
        )
    return list(tensors)


def _value(name: str, first: Tensor, second: Tensor, batch_size: int) -> Value:
    """The shape in terms of the batch size, from the shapes at `batch_size` and at one more."""
    slopes = [b - a for a, b in zip(first.shape, second.shape, strict=True)]
    shape = tuple(Extent(a - slope * batch_size, slope) for a, slope in zip(first.shape, slopes, strict=True))
    return Value(0, name, 0, (), shape, first.dtype, first.requires_grad)
