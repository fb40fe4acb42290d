"""A frame -> what home must hold, and where there each parameter and each tensor of optimizer state lies."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch

from counterpoint.decomposer.chain import NO_LAYER, Chain
from counterpoint.runtime.frame import Flat, Frame, Slot
from counterpoint.runtime.home_names import HomeNames


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor at home: it begins `offset_bytes` into the extent of `key`."""

    key: str
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def parameter_places(frame: Frame, names: HomeNames | None = None) -> dict[str, Place]:
    """Every parameter of the model in its order, also those that no layer uses; the newest weights."""
    names = names or HomeNames()
    found: dict[str, Place] = {}
    for layer in range(frame.num_layers):
        found |= {slot.name: _place(names.weight(layer), slot) for slot in frame.weights[layer].slots}
        found |= {slot.name: _place(f"constant {layer}", slot) for slot in frame.constants[layer].slots}
    for name, spec in frame.chain.parameters.items():
        if spec.owner == NO_LAYER:
            found[name] = Place(_unused_key(name), 0, spec.shape, spec.dtype)
    return {name: found[name] for name in frame.chain.parameters}


def previous_places(frame: Frame, names: HomeNames) -> dict[str, Place]:
    """Every weight before the last update; none where only the newest version has a place."""
    found: dict[str, Place] = {}
    if names.two_versions:
        for layer, (weights, olds) in enumerate(zip(frame.weights, frame.olds, strict=True)):
            key = names.old(layer) if olds.slots else names.weight(layer, -1)
            found |= {slot.name: _place(key, slot) for slot in (olds.slots or weights.slots)}
    return found


def state_places(states: tuple[Flat, ...], layer: int, names: HomeNames | None = None) -> dict[tuple[str, str], Place]:
    """A layer's optimizer state by parameter and key."""
    found, place = {}, (names or HomeNames()).state(layer)
    for slot in states[layer].slots:
        parameter, _, key = slot.name.rpartition("\0")
        found[parameter, key] = _place(place, slot)
    return found


def home_sizes(
    frame: Frame,
    states: tuple[Flat, ...],
    two_versions: bool = False,
    copies: Mapping[int, Iterable[int]] | None = None,
) -> Mapping[str, int]:
    """Keys and sizes of what is always at home; `copies` are, by layer, the devices that have one of their own."""
    sizes: dict[str, int] = {}
    for layer in range(frame.num_layers):
        if frame.constants[layer].num_bytes:
            sizes[f"constant {layer}"] = frame.constants[layer].num_bytes
        holders = [{}] if copies is None or layer not in copies else [{layer: device} for device in copies[layer]]
        for holder in holders:
            names = HomeNames(holder, two_versions)
            if frame.weights[layer].num_bytes:
                sizes |= dict.fromkeys((names.weight(layer, 0), names.weight(layer, 1)), frame.weights[layer].num_bytes)
            if two_versions and frame.olds[layer].num_bytes:
                sizes[names.old(layer)] = frame.olds[layer].num_bytes
            if states[layer].num_bytes:
                sizes[names.state(layer)] = states[layer].num_bytes
    return sizes


def unused_sizes(chain: Chain) -> Mapping[str, int]:
    """Keys and sizes at home of parameters that no layer uses: they are saved and exported with the others."""
    return {
        _unused_key(name): max(spec.num_bytes, 1) for name, spec in chain.parameters.items() if spec.owner == NO_LAYER
    }


def _place(key: str, slot: Slot) -> Place:
    return Place(key, slot.offset_bytes, slot.shape, slot.dtype)


def _unused_key(name: str) -> str:
    return f"unused {name}"
