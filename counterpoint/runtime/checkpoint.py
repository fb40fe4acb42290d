"""The state of a training at home -> a folder, by parameter name; and such a folder back home, under any plan.

A checkpoint is `checkpoint.json` (step, optimizer settings, sizes of the other files), `weights.safetensors`
(parameters and buffers) and `optimizer.safetensors` (its state, `parameter:key`). Nothing in it knows of layers or
plans. Whoever calls has brought everything home before.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from counterpoint.core.errors import ExecutionError
from counterpoint.runtime.home import Place, parameter_places, state_places
from counterpoint.runtime.plain_values import decode, encode
from counterpoint.runtime.store import Store
from counterpoint.runtime.tensor_file import Source, Stretch, cannot, copy_home, read_layout, read_tensor, write_tensors
from counterpoint.runtime.whole_folder import recover, whole_folder

FORMAT = 1
FACTS, WEIGHTS, OPTIMIZER = "checkpoint.json", "weights.safetensors", "optimizer.safetensors"
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


def write_checkpoint(folder: Path, store: Store, buffers: Mapping[str, Tensor], facts: Facts) -> None:
    """Whole or not at all; an older checkpoint of this name stays until the new one is complete."""
    data = {name: encode(getattr(facts, name), name) for name in Facts.__slots__}
    with whole_folder(folder, (FACTS,)) as unfinished:
        weights: dict[str, Source] = {**parameter_places(store.frame, store.names), **buffers}
        sizes = {
            WEIGHTS: write_tensors(unfinished / WEIGHTS, weights, store, {"format": "pt"}),
            OPTIMIZER: write_tensors(unfinished / OPTIMIZER, dict(_states(store)), store, {"format": "pt"}),
        }
        text = json.dumps({"format": FORMAT, "files": sizes, **data}, indent=1)
        (unfinished / FACTS).write_text(text + "\n")


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


def read_checkpoint(folder: Path, store: Store, buffers: dict[str, Tensor]) -> None:
    """Bring a checkpoint's tensors home. Names and shapes are compared before anything is changed."""
    weights, states = read_layout(folder / WEIGHTS), read_layout(folder / OPTIMIZER)
    places = parameter_places(store.frame, store.names)
    present = {layer: _layer_states(store, layer) for layer in range(store.frame.num_layers)}
    fresh = {layer for layer, found in present.items() if not any(name in states for name in found)}
    expected = {name: place for layer, found in present.items() if layer not in fresh for name, place in found.items()}
    _refuse_other(folder / WEIGHTS, weights, {**places, **buffers})
    _refuse_other(folder / OPTIMIZER, states, expected)
    _copy(folder / WEIGHTS, {name: weights[name] for name in places}, places, store)
    _copy(folder / OPTIMIZER, states, expected, store)
    for name in buffers:
        buffers[name] = read_tensor(folder / WEIGHTS, weights[name])
    store.fresh_states.clear()
    store.fresh_states.update(fresh)


def _states(store: Store) -> Mapping[str, Source]:
    """The state of every layer that has been updated."""
    return {
        name: place
        for layer in range(store.frame.num_layers)
        if layer not in store.fresh_states
        for name, place in _layer_states(store, layer).items()
    }


def _layer_states(store: Store, layer: int) -> dict[str, Place]:
    return {f"{parameter}:{key}": place for (parameter, key), place in state_places(store.states, layer, store.names).items()}


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
