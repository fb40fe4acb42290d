"""How a chain is compared with the plain model: in one autograd graph, and layer by layer as the runtime will do it."""

import copy
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from counterpoint.decomposer import Chain, layer_seed

Gradients = dict[str, Tensor | None]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def run_by_layer() -> Callable[..., tuple[Tensor, dict[str, Tensor]]]:
    return _run_by_layer


@pytest.fixture
def check_same() -> Callable[..., None]:
    return _check_same


def _check_same(
    chain: Chain, model: nn.Module, batch: Mapping[str, Tensor], plain: Callable[[nn.Module], Tensor]
) -> None:
    """Loss, all gradients and all buffers afterwards, bit for bit; `plain` runs the model and returns the loss."""
    expected_model = copy.deepcopy(model).train()
    expected = plain(expected_model)
    expected.backward()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for run in (_run_at_once, _run_by_layer):
        model.zero_grad()
        loss, mutated = run(chain, model, batch)
        assert torch.equal(loss, expected), f"{run.__name__}: loss {loss} is not {expected}"
        assert _differing(_gradients(model), _gradients(expected_model)) == [], run.__name__
        assert _differing(dict(model.named_buffers()), buffers) == [], "the model's own buffers changed"
        assert _differing(buffers | mutated, dict(expected_model.named_buffers())) == [], run.__name__
    model.zero_grad()


def _run_at_once(chain: Chain, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    loss, mutated = chain.run(dict(model.named_parameters()), dict(model.named_buffers()), batch)
    loss.backward()
    return loss, mutated


def _run_by_layer(
    chain: Chain, model: nn.Module, batch: Mapping[str, Tensor], seed: int = 0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Each layer in its own autograd graph: forward in order, backward in reverse, gradients handed over by value."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    values = chain.bind(batch)
    mutated: dict[str, Tensor] = {}
    tape = []
    for layer in chain.layers:
        leaves = [values[i].detach().requires_grad_(chain.values[i].needs_grad) for i in layer.inputs]
        torch.manual_seed(layer_seed(seed, 0, 0, layer.index))
        outputs, changed = layer.run(parameters, buffers | mutated, leaves)
        mutated |= changed
        values.update(zip(layer.outputs, outputs, strict=True))
        tape.append((layer, leaves, outputs))
    grads: dict[int, Tensor] = {chain.loss: torch.ones(())}
    for layer, leaves, outputs in reversed(tape):
        roots = [(output, grads.pop(i)) for i, output in zip(layer.outputs, outputs, strict=True) if i in grads]
        torch.autograd.backward([output for output, _ in roots], [grad for _, grad in roots])
        for index, leaf in reversed(list(zip(layer.inputs, leaves, strict=True))):
            if leaf.grad is not None:
                grads[index] = grads[index] + leaf.grad if index in grads else leaf.grad
    return values[chain.loss], mutated


def _gradients(model: nn.Module) -> Gradients:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def _differing(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name in found if not _same(found[name], expected[name])]


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
