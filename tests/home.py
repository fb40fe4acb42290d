"""A store -> copies of the parameters and the optimizer state at home, by name."""

from torch import Tensor

from counterpoint.decomposer.chain import NO_LAYER
from counterpoint.runtime.home import Place, parameter_places, state_places
from counterpoint.runtime.store import Store


def read_parameters(store: Store) -> dict[str, Tensor]:
    """Every parameter that a layer uses."""
    specs = store.frame.chain.parameters
    places = parameter_places(store.frame, store.names)
    return {name: _read(store, place) for name, place in places.items() if specs[name].owner != NO_LAYER}


def read_states(store: Store) -> dict[str, dict[str, Tensor]]:
    """The optimizer's tensors by parameter and key; none of layers that were never updated."""
    found: dict[str, dict[str, Tensor]] = {}
    for layer in range(store.frame.num_layers):
        if layer not in store.fresh_states:
            for (parameter, key), place in state_places(store.states, layer, store.names).items():
                found.setdefault(parameter, {})[key] = _read(store, place)
    return found


def _read(store: Store, place: Place) -> Tensor:
    return store.read_place(place.key, place.offset_bytes, place.shape, place.dtype)
