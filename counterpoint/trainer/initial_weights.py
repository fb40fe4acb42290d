"""A model, real or on the meta device, perhaps with a folder of weights -> its tensors at home, one at a time."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from counterpoint.core.errors import ModelError
from counterpoint.decomposer import initialise, stream_safetensors
from counterpoint.decomposer.chain import Chain
from counterpoint.runtime.home import parameter_places
from counterpoint.runtime.store import Store


def fill(store: Store, model: nn.Module, weights: Path | None, seed: int) -> dict[str, Tensor]:
    """Put every parameter home; the model's buffers, in memory. What is on meta is initialised as the model says."""
    chain = store.frame.chain
    places = parameter_places(store.frame)
    buffers: dict[str, Tensor] = {}
    for name, tensor in _tensors(model, chain, weights, seed):
        if name in chain.buffers:
            buffers[name] = tensor.detach().to(chain.buffers[name].dtype).clone()
        elif name in places:
            place = places[name]
            if tuple(tensor.shape) != place.shape:
                raise ModelError(f"{name!r} has shape {tuple(tensor.shape)} in the weights, {place.shape} in the model")
            source = tensor.detach().to(place.dtype).contiguous().view(-1).view(torch.uint8)
            store.write_place(place.key, place.offset_bytes, source)
    return {name: buffers[name] for name in chain.buffers}


def blank_buffers(chain: Chain) -> dict[str, Tensor]:
    """Room for buffers that a checkpoint will fill."""
    return {name: torch.zeros(spec.shape, dtype=spec.dtype) for name, spec in chain.buffers.items()}


def _tensors(model: nn.Module, chain: Chain, weights: Path | None, seed: int) -> Iterator[tuple[str, Tensor]]:
    if weights is None:
        yield from initialise(model, seed)
        return
    kept = model.state_dict(keep_vars=True)
    wanted = [name for name in (*chain.parameters, *chain.buffers) if name in kept]
    ignore = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    yield from stream_safetensors(weights, wanted, aliases=chain.aliases, ignore=ignore)
    computed = frozenset(name for name in chain.buffers if name not in kept)
    if computed:
        yield from initialise(model, seed, computed)
