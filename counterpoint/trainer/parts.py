"""What a user gives -> what is trained: one module, its chain, its parameters' names, its batches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from counterpoint.core.errors import ModelError
from counterpoint.decomposer import chain_of_modules, decompose
from counterpoint.decomposer.chain import Batch, Chain, name_tensors
from counterpoint.decomposer.example import Loss
from counterpoint.runtime.backend import CPU, Backend, backend_of
from counterpoint.runtime.frame import Flat, Frame, frame_of
from counterpoint.runtime.narrowing import narrowed
from counterpoint.runtime.optimizer import UpdateRule

Model = nn.Module | Sequence[nn.Module]


@dataclass(frozen=True)
class Parts:
    """What is trained, and on what; names are taken from `module`; `states` lays out each layer's optimizer state."""

    module: nn.Module
    chain: Chain
    frame: Frame
    rule: UpdateRule
    states: tuple[Flat, ...]
    backend: Backend = CPU


def parts_of(
    model: Model,
    optimizer: Optimizer,
    example: Batch,
    loss: Loss | None,
    autocast: torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> Parts:
    """A list of modules becomes one module. The chain is made under the autocast it runs under: models see dtypes."""
    module = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    backend = backend_of(device)
    _refuse_tied_up(module)
    with CPU.autocast(autocast):
        chain = _chain(model, example, loss, backend.device)
    frame = frame_of(chain, narrowed(chain, autocast, backend))
    rule = UpdateRule(optimizer, _names(module, chain))
    return Parts(module, chain, frame, rule, _states(frame, rule), backend)


def _refuse_tied_up(module: nn.Module) -> None:
    """A model that lies on an accelerator already would take the memory that its training is to have."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.device.type not in ("cpu", "meta"):
            raise ModelError(
                f"the model lies on {tensor.device}, whose memory its training needs: build it on the CPU or the meta "
                "device, and say where to train it with device="
            )


def _chain(model: Model, example: Batch, loss: Loss | None, device: torch.device) -> Chain:
    if isinstance(model, nn.Module):
        return decompose(model, example, loss=loss, device=device)
    return chain_of_modules(model, example, loss)


def _names(module: nn.Module, chain: Chain) -> dict[int, str]:
    """Names of parameters in the chain, by identity."""
    named = module.named_parameters(remove_duplicate=False)
    return {id(parameter): chain.aliases.get(name, name) for name, parameter in named}


def _states(frame: Frame, rule: UpdateRule) -> tuple[Flat, ...]:
    """Each layer's optimizer state as a flat stretch; slots are named by parameter and key."""
    known: dict[tuple[int, tuple[int, ...], torch.dtype], tuple] = {}  # type: ignore[type-arg]
    found = []
    for weights in frame.weights:
        tensors = []
        for slot in weights.slots:
            if slot.name not in rule.group_of:
                continue
            key = (rule.group_of[slot.name], slot.shape, slot.dtype)
            if key not in known:
                known[key] = rule.state_tensors(slot.name, slot.shape, slot.dtype)
            tensors += [(f"{slot.name}\0{t.key}", t.shape, t.dtype) for t in known[key]]
        found.append(Flat.of(tensors))
    return tuple(found)


def batch_size(chain: Chain, batch: Batch) -> int:
    """The number of samples; all tensors of a batch must agree on it."""
    tensors = _tensors(chain, batch)
    sizes = {name: int(tensor.shape[0]) for name, tensor in tensors.items() if tensor.dim()}
    if len(set(sizes.values())) > 1:
        raise ModelError(f"the tensors of the batch have different numbers of samples: {sizes}")
    return next(iter(sizes.values()), 1)


def microbatches(chain: Chain, batch: Batch, size: int, backend: Backend = CPU) -> list[Mapping[int, Tensor]]:
    """The batch in pieces of `size` samples, by value, on the device; refuses one that is not of the example's form."""
    tensors = {name: backend.here(tensor) for name, tensor in _tensors(chain, batch).items()}
    return [
        chain.bind({name: tensor[k : k + size] if tensor.dim() else tensor for name, tensor in tensors.items()})
        for k in range(0, batch_size(chain, batch), size)
    ]


def batch_bytes(chain: Chain, batch: Batch, backend: Backend) -> int:
    """What a batch takes beside the process, where that is not the user's own memory."""
    return 0 if backend.is_process else sum(tensor.nbytes for tensor in _tensors(chain, batch).values())


def tokens_per_sample(chain: Chain, example: Batch) -> int:
    first = next(iter(_tensors(chain, example).values()))
    return int(first.shape[1]) if first.dim() == 2 and not first.dtype.is_floating_point else 1


def _tensors(chain: Chain, batch: Batch) -> dict[str, Tensor]:
    tensors = name_tensors(batch, tuple(chain.batch))
    wrong = [
        f"{name!r} is a {type(entry).__name__}" for name, entry in tensors.items() if not isinstance(entry, Tensor)
    ]
    if wrong:
        raise ModelError(f"the batch does not fit the example: {', '.join(wrong)}, not a tensor")
    return tensors
