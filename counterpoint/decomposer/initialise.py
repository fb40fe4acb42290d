"""A model on the meta device -> its initial tensors, one module at a time, by the model's own rules."""

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn

from counterpoint.core.errors import ModelError
from counterpoint.decomposer.tensors import read_tensors

_UNTOUCHED = 0xFF  # every byte before initialisation: NaN in floats, -1 in integers


def initialise(model: nn.Module, seed: int, names: Container[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer under its owner's name, or those in `names`; one that is not on meta as it is.

    Each module draws from a generator of its own, seeded by `seed` and its path, so that its tensors depend on nothing
    else. The model itself stays on meta. Never is more than one module's data in memory, unless the caller keeps it.
    """
    owners = read_tensors(model).owners
    for path, module in model.named_modules():
        named = {f"{path}.{local}".lstrip("."): local for local in (*module._parameters, *module._buffers)}
        owned = {name: local for name, local in named.items() if owners.get(name) == name}
        if names is not None:
            owned = {name: local for name, local in owned.items() if name in names}
        if not any(getattr(module, local).is_meta for local in owned.values()):
            yield from ((name, getattr(module, local).detach()) for name, local in owned.items())
            continue
        tensors = _materialised(model, path, seed)
        _refuse_untouched(path, module, {local: tensors[local] for local in owned.values()})
        for name, local in owned.items():
            yield name, tensors.pop(local)


def _materialised(model: nn.Module, path: str, seed: int) -> dict[str, Tensor]:
    """The module's own tensors by local name, after its own initialisation and that of the modules around it."""
    module = model.get_submodule(path)
    lineage = [model.get_submodule(outer) for outer in _outer_paths(path)]
    digest = blake2b(f"{seed}/{path}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), _on_cpu(module) as tensors:
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
        for depth, outer in enumerate(lineage):
            for rule in _rules(outer, lineage[depth:]):
                rule()
        return {name: tensor.detach() for name, tensor in tensors().items()}


def _outer_paths(path: str) -> list[str]:
    """From the module itself out to the model."""
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(len(parts), -1, -1)]


def _rules(module: Any, lineage: list[Any]) -> Iterator[Callable[[], Any]]:
    """What initialises a module, in the order in which it happens when a model is built for real.

    Modules around a module have a say too: GPT-2 scales the last projection of each of its blocks.
    """
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(module, name, None)):
            yield getattr(module, name)
            break
    model = next((outer for outer in lineage if _is_transformers_model(outer)), None)
    if model is not None:
        yield partial(model._init_weights, module)
    if callable(getattr(module, "reset_lora_parameters", None)):
        for adapter in getattr(module, "lora_A", {}):
            yield partial(module.reset_lora_parameters, adapter, True)


def _is_transformers_model(module: Any) -> bool:
    return hasattr(module, "_init_weights") and hasattr(module, "config")


@contextmanager
def _on_cpu(module: nn.Module) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Swap the module's own meta tensors for real ones; yields a function that reads them."""
    places: list[Any] = [module._parameters, module._buffers]
    originals = [(place, dict(place)) for place in places]
    for place in places:
        for name, tensor in place.items():
            if tensor is not None and tensor.is_meta:
                place[name] = _untouched(tensor)
    try:
        yield lambda: {name: tensor for place in places for name, tensor in place.items() if tensor is not None}
    finally:
        for place, original in originals:
            place.update(original)


def _untouched(tensor: Tensor) -> Tensor:
    real = torch.empty_like(tensor, device="cpu", requires_grad=False)
    real.untyped_storage().fill_(_UNTOUCHED)  # type: ignore[attr-defined]
    return nn.Parameter(real, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else real


def _refuse_untouched(path: str, module: nn.Module, tensors: dict[str, Tensor]) -> None:
    left = [name for name, tensor in tensors.items() if tensor.numel() and _is_untouched(tensor)]
    if left:
        kind = type(module).__name__
        raise ModelError(
            f"module {path!r} ({kind}) does not say how to initialise {', '.join(left)}: "
            f"give {kind} a method reset_parameters() that sets all its own parameters and buffers, or load them"
        )


def _is_untouched(tensor: Tensor) -> bool:
    data = tensor.contiguous().view(-1).view(torch.uint8)
    return bool(data[0] == _UNTOUCHED) and bool((data == _UNTOUCHED).all())
