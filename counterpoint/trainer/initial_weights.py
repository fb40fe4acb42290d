"""A model, real or on the meta device, perhaps with a folder of weights -> its tensors at home, one at a time."""

from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch
from torch import Tensor, nn

from counterpoint.core.errors import ModelError
from counterpoint.core.task import old, weight
from counterpoint.decomposer import initialise, stream_safetensors
from counterpoint.decomposer.chain import NO_LAYER, Chain
from counterpoint.runtime.home import Place, parameter_places, previous_places
from counterpoint.runtime.store import Store

_PIECE_ELEMENTS = 1 << 20


def fill(
    store: Store, model: nn.Module, weights: Path | None, seed: int, layers: frozenset[int] | None = None
) -> dict[str, Tensor]:
    """Put every parameter home; the model's buffers, in memory. What is on meta is initialised as the model says.

    Of several devices each puts home what lies in its `layers`, and says so.
    """
    chain = store.frame.chain
    places = _wanted(chain, parameter_places(store.frame, store.names), layers)
    before = previous_places(store.frame, store.names)
    buffers: dict[str, Tensor] = {}
    for name, tensor in _tensors(model, chain, weights, seed, frozenset(places)):
        if name in chain.buffers:
            buffers[name] = store.backend.here(tensor.detach().to(chain.buffers[name].dtype)).clone()
        elif name in places:
            place = places[name]
            if tuple(tensor.shape) != place.shape:
                raise ModelError(f"{name!r} has shape {tuple(tensor.shape)} in the weights, {place.shape} in the model")
            for target in (place, before[name]) if name in before else (place,):
                source = tensor.detach().cpu().to(place.dtype).to(target.dtype).contiguous().view(-1).view(torch.uint8)
                store.write_place(target.key, target.offset_bytes, source)
    announce(store, layers)
    return {name: buffers[name] for name in chain.buffers}


def announce(store: Store, layers: frozenset[int] | None) -> None:
    """Say that the weights of some layers are home: the newest version and, where it has a place, the one before."""
    for layer in range(store.frame.num_layers) if layers is None else sorted(layers):
        if store.frame.weights[layer].slots:
            store.announce(weight(layer, 0))
            if store.names.two_versions:
                store.announce((old if store.frame.olds[layer].slots else weight)(layer, -1))


def repeat(store: Store, layers: frozenset[int] | None) -> None:
    """Put the newest weights of some layers also where the version before them lies: both are then as in a new run."""
    newest, before = parameter_places(store.frame, store.names), previous_places(store.frame, store.names)
    for layer in range(store.frame.num_layers) if layers is None else sorted(layers):
        for slot in store.frame.weights[layer].slots:
            _copy(store, newest[slot.name], before[slot.name])
    announce(store, layers)


def _copy(store: Store, source: Place, target: Place) -> None:
    """A piece at a time: the pieces of every dtype begin at a block."""
    count = prod(source.shape)
    for start in range(0, count, _PIECE_ELEMENTS):
        piece, offset = (min(_PIECE_ELEMENTS, count - start),), source.offset_bytes + start * source.dtype.itemsize
        content = store.read_place(source.key, offset, piece, source.dtype).to(target.dtype)
        store.write_place(target.key, target.offset_bytes + start * target.dtype.itemsize, content.view(torch.uint8))


def _wanted(chain: Chain, places: dict[str, Place], layers: frozenset[int] | None) -> dict[str, Place]:
    if layers is None:
        return places
    return {name: place for name, place in places.items() if chain.parameters[name].owner in (*layers, NO_LAYER)}


def blank_buffers(chain: Chain, device: torch.device) -> dict[str, Tensor]:
    """Room for buffers that a checkpoint will fill."""
    return {name: torch.zeros(spec.shape, dtype=spec.dtype, device=device) for name, spec in chain.buffers.items()}


def _tensors(
    model: nn.Module, chain: Chain, weights: Path | None, seed: int, places: frozenset[str]
) -> Iterator[tuple[str, Tensor]]:
    if weights is None:
        everything = len(places) == len(chain.parameters)
        yield from initialise(model, seed, None if everything else places | chain.buffers.keys())
        return
    kept = model.state_dict(keep_vars=True)
    rename = _base_name if hasattr(model, "peft_config") else str
    wanted = [name for name in (*chain.parameters, *chain.buffers) if name in kept and not _is_adapter(model, name)]
    in_files = {rename(name): name for name in wanted}
    aliases = {rename(alias): rename(name) for alias, name in chain.aliases.items()}
    ignore = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    for name, tensor in stream_safetensors(weights, in_files, aliases=aliases, ignore=ignore):
        yield in_files[name], tensor
    rest = frozenset((*chain.parameters, *chain.buffers)) - frozenset(wanted)
    if rest:
        yield from initialise(model, seed, rest)


def _base_name(name: str) -> str:
    """What peft calls a tensor of the model it wraps -> what that model calls it."""
    return name.removeprefix("base_model.model.").replace(".base_layer.", ".")


def _is_adapter(model: nn.Module, name: str) -> bool:
    """Whether peft added the tensor to the model it wraps: no file of that model has it."""
    return hasattr(model, "peft_config") and getattr(getattr(model, "base_model", None), "prefix", "lora_") in name
