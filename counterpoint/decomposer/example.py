"""An example batch -> the call it stands for: which tensors the model is given, and what the loss is."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from counterpoint.core.errors import ModelError
from counterpoint.decomposer.chain import Batch, Extent

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Call:
    """How a batch is handed over: as a mapping, a tuple or a tensor; the model gets the entries `given` to it."""

    names: tuple[str, ...]
    given: tuple[str, ...]
    form: type

    def batch(self, tensors: Mapping[str, Tensor]) -> Any:
        """The batch in the form its user gave it in."""
        if self.form is dict:
            return dict(tensors)
        return tuple(tensors.values()) if self.form is tuple else next(iter(tensors.values()))

    def apply(self, model: Callable[..., Any], tensors: Mapping[str, Tensor]) -> Any:
        if self.form is dict:
            return model(**{name: tensors[name] for name in self.given})
        return model(*(tensors[name] for name in self.given))


def read_example(model: nn.Module, example: Batch, loss: Loss | None) -> tuple[Call, dict[str, Tensor]]:
    """The call, and the example's tensors by name. With a loss, the model gets only what its forward takes."""
    tensors = _named(model, example)
    refuse_bad_tensors(tensors)
    form = dict if isinstance(example, Mapping) else Tensor if isinstance(example, Tensor) else tuple
    given = tuple(tensors) if loss is None else _accepted(model, tuple(tensors), form)
    if not given:
        takes = ", ".join(inspect.signature(model.forward).parameters)
        raise ModelError(f"the model takes none of the batch's tensors ({', '.join(tensors)}): its forward has {takes}")
    return Call(tuple(tensors), given, form), tensors


def refuse_bad_tensors(tensors: Mapping[str, Any]) -> None:
    if not tensors:
        raise ModelError("the example batch has no tensors: give at least one, with the batch as its first dimension")
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise ModelError(
                f"batch entry {name!r} is a {type(tensor).__name__}, not a tensor: leave it out or convert it"
            )
        if tensor.dim() == 0:
            raise ModelError(
                f"batch tensor {name!r} has no batch dimension (shape ()): its first dimension must be the batch"
            )
    sizes = {name: tensor.shape[0] for name, tensor in tensors.items()}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{name!r} {size}" for name, size in sizes.items())
        raise ModelError(
            f"batch tensors differ in their first dimension ({listed}): it must be the batch in all of them"
        )
    if 0 in sizes.values():
        raise ModelError("the example batch is empty (batch size 0): give at least one sample")


def batch_shape(tensor: Tensor) -> tuple[Extent, ...]:
    return (Extent(0, 1), *(Extent(size) for size in tensor.shape[1:]))


def blank(tensors: Mapping[str, Tensor], batch_size: int) -> dict[str, Tensor]:
    """Zeros of the example's form: distinct tensors, so that no trace takes one for another."""
    return {n: torch.zeros((batch_size, *t.shape[1:]), dtype=t.dtype, device="cpu") for n, t in tensors.items()}


def take_loss(output: Any, batch: Any, loss: Loss | None) -> Tensor:
    """The scalar to minimise, from the loss function, `output.loss`, `output["loss"]` or the output itself."""
    found: Any
    if loss is not None:
        found = loss(output, batch)
    elif isinstance(output, Mapping):
        found = output.get("loss")
    else:
        found = getattr(output, "loss", output)
    if not isinstance(found, Tensor):
        raise ModelError(
            f"no loss found: the model's output is a {type(output).__name__} without a loss tensor; "
            f"put the labels in the batch, or pass loss=function(output, batch)"
        )
    if found.dim() != 0:
        raise ModelError(f"the loss is not a scalar (shape {tuple(found.shape)}): reduce it, for instance with .mean()")
    return found


def refuse_trained_loss(loss: Loss | None) -> None:
    if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
        name = type(loss).__name__
        raise ModelError(f"the loss {name} has trainable parameters of its own: make it part of the model's forward")


def _named(model: nn.Module, example: Batch) -> dict[str, Any]:
    if isinstance(example, Mapping):
        return dict(example)
    tensors = (example,) if isinstance(example, Tensor) else tuple(example)
    names = _positional(model)
    return {names[i] if i < len(names) else f"batch{i}": tensor for i, tensor in enumerate(tensors)}


def _positional(model: nn.Module) -> Sequence[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds]


def _accepted(model: nn.Module, names: tuple[str, ...], form: type) -> tuple[str, ...]:
    taken = inspect.signature(model.forward).parameters
    kinds = {parameter.kind for parameter in taken.values()}
    if form is dict:
        return names if inspect.Parameter.VAR_KEYWORD in kinds else tuple(n for n in names if n in taken)
    return names if inspect.Parameter.VAR_POSITIONAL in kinds else names[: len(_positional(model))]
