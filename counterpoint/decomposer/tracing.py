"""Model and example batch -> a trace: one ATen graph from weights and batch to the loss, for any batch size."""

import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export.graph_signature import InputKind

from counterpoint.core.errors import ModelError
from counterpoint.decomposer.eager_path import as_eager
from counterpoint.decomposer.example import Call, Loss, blank, refuse_trained_loss, take_loss
from counterpoint.decomposer.explain import LocatedShapes, explain

_PREFIX = "model."
_NOISY = (
    *("torch.fx.experimental.symbolic_shapes", "torch.export", "torch._dynamo", "torch.__trace"),
    "torch._subclasses.fake_tensor",
)


@dataclass(frozen=True, slots=True)
class Trace:
    """The graph, and what its placeholders stand for, by placeholder name."""

    module: fx.GraphModule
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    constants: Mapping[str, Tensor]
    batch: Mapping[str, str]


class _Step(nn.Module):
    """What is traced: the batch's tensors in, the loss out."""

    def __init__(self, model: nn.Module, call: Call, loss: Loss | None) -> None:
        super().__init__()
        self.model = model
        self._call = call
        self._loss = (loss,)  # in a tuple, for a loss that is a module would be registered

    def forward(self, *tensors: Tensor) -> Tensor:
        batch = dict(zip(self._call.names, tensors, strict=True))
        buffers = [(module, dict(module._buffers)) for module in self.model.modules()]
        output = self._call.apply(self.model, batch)
        loss = take_loss(output, self._call.batch(batch), self._loss[0])
        for module, before in buffers:
            _write_assigned(module, before)
        return loss


def _write_assigned(module: nn.Module, before: Mapping[str, Tensor | None]) -> None:
    """Export does not see that a forward assigns a new tensor to a buffer: write it to the buffer instead."""
    for name, buffer in before.items():
        assigned = module._buffers.get(name)
        if buffer is not None and assigned is not None and assigned is not buffer:
            module._buffers[name] = buffer.copy_(assigned.detach())


def trace(
    model: nn.Module, call: Call, tensors: Mapping[str, Tensor], loss: Loss | None, device: torch.device
) -> Trace:
    """Trace without running or copying anything: weights are stood in for by tensors without memory."""
    refuse_trained_loss(loss)
    batch_size = max(2, next(iter(tensors.values())).shape[0])  # at 1 export would fix the batch size
    arguments = tuple(blank(tensors, batch_size).values())
    shapes = LocatedShapes(tracked_fakes=[], trace_asserts=True)
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True, export=True)
    with _fake_weights(model, mode), as_eager(model), _quiet(), tracing(TracingContext(mode)):
        try:
            exported = _export(_Step(model, call, loss), arguments)
        except Exception as error:
            raise explain(error, shapes) from error
    return _read(exported, call, device)


def _export(step: _Step, arguments: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch")
    shapes = (tuple({0: batch} for _ in arguments),)
    return torch.export.export(step, arguments, dynamic_shapes=shapes, strict=False)


def _read(exported: torch.export.ExportedProgram, call: Call, device: torch.device) -> Trace:
    kinds: dict[InputKind, dict[str, str]] = {kind: {} for kind in InputKind}
    for spec in exported.graph_signature.input_specs:
        kinds[spec.kind][spec.arg.name] = (spec.target or "").removeprefix(_PREFIX)
    constants = {name: exported.constants[_target(exported, name)] for name in kinds[InputKind.CONSTANT_TENSOR]}
    for name, constant in constants.items():
        if isinstance(constant, FakeTensor) or constant.is_meta:
            raise ModelError(
                f"the model uses a tensor that a trace cannot follow ({name.removeprefix('c_model_')}): one reached "
                f"through .data, or on the meta device without being a buffer; use detach(), or register_buffer()"
            )
    batch = dict(zip(kinds[InputKind.USER_INPUT], call.names, strict=True))
    moved = {name: constant.to(device) for name, constant in constants.items()}
    return Trace(exported.graph_module, kinds[InputKind.PARAMETER], kinds[InputKind.BUFFER], moved, batch)


def _target(exported: torch.export.ExportedProgram, placeholder: str) -> str:
    return next(s.target for s in exported.graph_signature.input_specs if s.arg.name == placeholder) or ""


@contextmanager
def _fake_weights(model: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Swap all parameters and buffers for ones without memory on the CPU: a meta model is traced like a real one."""
    places: list[Any] = [d for module in model.modules() for d in (module._parameters, module._buffers)]
    originals: list[tuple[dict[str, Any], str, Tensor]] = []
    fakes: dict[int, Tensor] = {}
    try:
        for place in places:
            for name, tensor in place.items():
                if tensor is not None:
                    originals.append((place, name, tensor))
                    place[name] = fakes.setdefault(id(tensor), _fake(tensor, mode))
        yield
    finally:
        for place, name, tensor in originals:
            place[name] = tensor


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


@contextmanager
def _quiet() -> Iterator[None]:
    """Export logs whole graphs when it fails; our error says what the user needs."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
