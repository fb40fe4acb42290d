"""A model -> its parameters and buffers by name, each tensor once, with the further names of tied ones."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from counterpoint.decomposer.chain import NO_LAYER, TensorSpec


@dataclass(frozen=True, slots=True)
class Tensors:
    """Specs by owner's name: the first name in `named_parameters()`; `owners` maps every name to it."""

    parameters: Mapping[str, TensorSpec]
    buffers: Mapping[str, TensorSpec]
    owners: Mapping[str, str]

    @property
    def aliases(self) -> dict[str, str]:
        return {name: owner for name, owner in self.owners.items() if name != owner}


def read_tensors(model: nn.Module) -> Tensors:
    owners: dict[str, str] = {}
    parameters = _specs(model.named_parameters(remove_duplicate=False), owners)
    buffers = _specs(model.named_buffers(remove_duplicate=False), owners)
    return Tensors(parameters, buffers, owners)


def _specs(named: Iterable[tuple[str, Tensor]], owners: dict[str, str]) -> dict[str, TensorSpec]:
    specs: dict[str, TensorSpec] = {}
    first_name: dict[int, str] = {}
    for name, tensor in named:
        owners[name] = first_name.setdefault(id(tensor), name)
        if owners[name] == name:
            specs[name] = TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, NO_LAYER)
    return specs
