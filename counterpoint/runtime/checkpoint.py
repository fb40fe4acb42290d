"""The state of a training at home -> a folder, by parameter name; and such a folder back home, under any plan.

A checkpoint is `checkpoint.json` (step, optimizer settings, sizes of the other files), `weights.safetensors`
(parameters and buffers) and `optimizer.safetensors` (its state, `parameter:key`); after a schedule that keeps two
versions also `previous.safetensors`, the weights before the last update, in the precision they were computed with.
Nothing in it knows of layers, plans or devices. Whoever calls has brought everything home before.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from counterpoint.core.errors import ExecutionError
from counterpoint.decomposer.chain import NO_LAYER
from counterpoint.runtime.file_errors import cannot
from counterpoint.runtime.home import Place, parameter_places, previous_places, state_places
from counterpoint.runtime.plain_values import decode, encode
from counterpoint.runtime.share import Share, written_folder
from counterpoint.runtime.store import Store
from counterpoint.runtime.tensor_file import Source, Stretch, copy_home, read_layout, read_tensor, write_tensors
from counterpoint.runtime.whole_folder import recover

FORMAT = 1
FACTS, WEIGHTS, OPTIMIZER = "checkpoint.json", "weights.safetensors", "optimizer.safetensors"
PREVIOUS = "previous.safetensors"
_LISTED = 5


@dataclass(frozen=True, slots=True)
class Facts:
    """What a checkpoint knows besides tensors. `scalars` are the numbers among a parameter's optimizer state."""

    step: int
    data_position: int
    seed: int
    microbatch_size: int
    minibatch_size: int
    optimizer: str
    groups: list[dict[str, Any]]
    scalars: dict[str, dict[str, Any]]
    generator: Tensor
    extra: dict[str, Any]


def write_checkpoint(
    folder: Path, store: Store, buffers: Mapping[str, Tensor], facts: Facts, share: Share | None = None
) -> None:
    """Whole or not at all; an older checkpoint of this name stays until the new one is complete."""
    data = {name: encode(getattr(facts, name), name) for name in Facts.__slots__}
    fresh = set(store.fresh_states)
    if share is not None:
        data["scalars"], fresh = _together(share, facts, store)
    with written_folder(folder, (FACTS,), share) as unfinished:
        contents: dict[str, Mapping[str, Source]] = {
            WEIGHTS: {**parameter_places(store.frame, store.names), **buffers},
            OPTIMIZER: _states(store, fresh),
        }
        if store.names.two_versions:
            contents[PREVIOUS] = previous_places(store.frame, store.names)
        sizes = {
            name: write_tensors(unfinished / name, tensors, store, {"format": "pt"}, share)
            for name, tensors in contents.items()
        }
        if share is None or share.first:
            text = json.dumps({"format": FORMAT, "files": sizes, **data}, indent=1)
            (unfinished / FACTS).write_text(text + "\n")


def _together(share: Share, facts: Facts, store: Store) -> tuple[Any, set[int]]:
    """The numbers among the optimizer state of all devices, and the layers that none of them has updated."""
    device, layers = share.peers.device, range(store.frame.num_layers)
    own = {name: value for name, value in facts.scalars.items() if share.has(name)}
    updated = [i for i in layers if share.duties.owner(i) == device and i not in store.fresh_states]
    found = share.peers.gather("optimizer state", [encode(own, "scalars"), updated])
    scalars = {name: value for numbers, _ in found for name, value in decode(numbers).items()}
    return encode(scalars, "scalars"), set(layers) - {i for _, known in found for i in known}


def read_facts(folder: Path) -> Facts:
    """What the checkpoint says of itself; refuses one that is not whole."""
    recover(folder)
    try:
        data = json.loads((folder / FACTS).read_text())
        version, sizes = data["format"], dict(data["files"])
        if version != FORMAT:
            raise ExecutionError(f"{folder} is of checkpoint format {version}, this program reads format {FORMAT}")
        facts = Facts(**{name: decode(data[name]) for name in Facts.__slots__})
    except FileNotFoundError as error:
        raise ExecutionError(f"{folder} is not a checkpoint: it has no {FACTS}; choose another") from error
    except OSError as error:
        raise cannot("read", folder / FACTS, error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExecutionError(f"{folder / FACTS} is torn ({type(error).__name__}: {error}); use another copy") from error
    for name, size in sizes.items():
        found = (folder / name).stat().st_size if (folder / name).exists() else 0
        if found != size:
            raise ExecutionError(f"{folder / name} is torn: it has {found} of {size} bytes; use another checkpoint")
    return facts


def read_checkpoint(
    folder: Path, store: Store, buffers: dict[str, Tensor], layers: frozenset[int] | None = None
) -> None:
    """Bring a checkpoint's tensors home. Names and shapes are compared before anything is changed.

    Of several devices each brings the tensors of its `layers`.
    """
    weights, states = read_layout(folder / WEIGHTS), read_layout(folder / OPTIMIZER)
    places = parameter_places(store.frame, store.names)
    present = {layer: _layer_states(store, layer) for layer in range(store.frame.num_layers)}
    fresh = {layer for layer, found in present.items() if not any(name in states for name in found)}
    expected = {name: place for layer, found in present.items() if layer not in fresh for name, place in found.items()}
    _refuse_other(folder / WEIGHTS, weights, {**places, **buffers})
    _refuse_other(folder / OPTIMIZER, states, expected)
    chosen = [i for i in present if layers is None or i in layers]
    owned = {name for name in places if store.frame.owner(name) in (*chosen, NO_LAYER)}
    _copy(folder / WEIGHTS, {name: weights[name] for name in places if name in owned}, places, store)
    own = {name for layer in chosen for name in present[layer]}
    _copy(folder / OPTIMIZER, {name: found for name, found in states.items() if name in own}, expected, store)
    if store.names.two_versions:
        _read_previous(folder, weights, owned, store)
    for name in buffers:
        buffers[name] = store.backend.here(read_tensor(folder / WEIGHTS, weights[name]))
    store.fresh_states.clear()
    store.fresh_states.update(fresh)


def _read_previous(folder: Path, weights: Mapping[str, Stretch], owned: set[str], store: Store) -> None:
    """The version before the newest; a run that kept only one begins with the newest twice, as a new run does.

    It may have been computed with in another precision than it will be.
    """
    places, path = previous_places(store.frame, store.names), folder / PREVIOUS
    stretches = weights
    if path.exists():
        stretches = read_layout(path)
        form = {
            name: replace(place, dtype=stretches[name].dtype) for name, place in places.items() if name in stretches
        }
        _refuse_other(path, stretches, {**places, **form})
    else:
        path = folder / WEIGHTS
    _copy(path, {name: stretches[name] for name in places if name in owned}, places, store)


def _states(store: Store, fresh: set[int]) -> dict[str, Source]:
    """The state of every layer that has been updated."""
    return {
        name: place
        for layer in range(store.frame.num_layers)
        if layer not in fresh
        for name, place in _layer_states(store, layer).items()
    }


def _layer_states(store: Store, layer: int) -> dict[str, Place]:
    places = state_places(store.states, layer, store.names)
    return {f"{parameter}:{key}": place for (parameter, key), place in places.items()}


def _refuse_other(path: Path, found: Mapping[str, Stretch], expected: Mapping[str, Source]) -> None:
    problems = [f"lacks {name}" for name in expected if name not in found]
    problems += [f"has unknown {name}" for name in found if name not in expected]
    for name, source in expected.items():
        if name in found and (tuple(source.shape), source.dtype) != (found[name].shape, found[name].dtype):
            problems.append(f"has {name} as {found[name].dtype} {found[name].shape}, not {_form(source)}")
    if problems:
        more = f" and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise ExecutionError(
            f"{path} is of another model or optimizer: it {', '.join(problems[:_LISTED])}{more}; build the same ones"
        )


def _form(source: Source) -> str:
    return f"{source.dtype} {tuple(source.shape)}"


def _copy(path: Path, stretches: Mapping[str, Stretch], places: Mapping[str, Place], store: Store) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise cannot("read", path, error) from error
    try:
        for name, stretch in stretches.items():
            copy_home(descriptor, stretch, places[name], store)
    finally:
        os.close(descriptor)
