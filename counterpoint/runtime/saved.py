"""What autograd keeps of one layer and microbatch, in a form that can leave memory and come back.

Autograd asks for its tensors through hooks. Weights are remembered by name, because they may lie elsewhere when the
backward comes; everything else by the storage it lies in, so that views are kept once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from counterpoint.core.task import Buffer
from counterpoint.runtime.backend import AnyRegion
from counterpoint.runtime.disk_extents import round_to_blocks
from counterpoint.runtime.strides import Form, restrided

WeightName = tuple[Buffer, str]


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor as a view of a kept storage."""

    storage: int
    form: Form
    offset: int


@dataclass(frozen=True, slots=True)
class _WeightView:
    """A saved tensor that is a weight or a view of one."""

    name: WeightName
    form: Form
    offset: int


class SavedTensors:
    """The storages of one layer and microbatch; `storages` are byte tensors, None while they are at home."""

    def __init__(self) -> None:
        self.storages: list[Tensor] | None = []
        self.sizes: list[int] = []
        self._known: dict[int, int] = {}

    def keep(self, tensor: Tensor, copied: bool = False) -> _View:
        """Remember a tensor; `copied` if its memory belongs to a buffer that may go before this one."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._known:
            assert self.storages is not None
            self._known[address] = len(self.storages)
            content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self.storages.append(content.clone() if copied else content)
            self.sizes.append(storage.nbytes())
        return _View(self._known[address], Form.of(tensor), int(tensor.storage_offset()))

    def tensor(self, view: _View) -> Tensor:
        assert self.storages is not None, "saved tensors are used while they are at home"
        return restrided(self.storages[view.storage], view.form, view.offset)

    @property
    def num_bytes(self) -> int:
        """As they lie one behind the other, each from a whole block on."""
        return sum(round_to_blocks(size) for size in self.sizes)

    def lie_in(self, region: AnyRegion) -> None:
        """They have come back, in a region."""
        self.storages = self._places(region)

    def move_into(self, region: AnyRegion) -> None:
        """One by one, so that what each leaves is free for the others."""
        assert self.storages is not None
        for index, place in enumerate(self._places(region)):
            place.copy_(self.storages[index])
            self.storages[index] = place

    def _places(self, region: AnyRegion) -> list[Tensor]:
        places, offset = [], 0
        for size in self.sizes:
            places.append(region.tensor(torch.uint8, (size,), offset))
            offset += round_to_blocks(size)
        return places

    def drop(self) -> None:
        self.storages = None
        self._known = {}


def saving(
    kept: SavedTensors,
    weights: Mapping[int, WeightName],
    apart: set[int],
    is_lent: Callable[[Tensor], bool],
    find_weight: Callable[[WeightName], Tensor],
) -> saved_tensors_hooks:
    """Within it autograd keeps its tensors in `kept`, except `weights`, by address, and what lies `apart` and stays."""

    def pack(tensor: Tensor) -> object:
        address = tensor.untyped_storage().data_ptr()
        if address in weights:
            return _WeightView(weights[address], Form.of(tensor), int(tensor.storage_offset()))
        if address in apart or not tensor.numel():
            return tensor
        return kept.keep(tensor, copied=is_lent(tensor))

    def unpack(handle: object) -> Tensor:
        match handle:
            case Tensor():
                return handle
            case _WeightView():
                return find_weight(handle.name).as_strided(handle.form.shape, handle.form.stride, handle.offset)
            case _:
                assert isinstance(handle, _View)
                return kept.tensor(handle)

    return saved_tensors_hooks(pack, unpack)
