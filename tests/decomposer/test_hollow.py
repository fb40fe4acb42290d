"""Runs whose outputs nobody reads: the same gradients, without the products that only outputs need."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from counterpoint.decomposer import Chain, decompose
from tests.small_transformers import Batch, bert, causal, gpt2, images, llama, padded, t5, vit

WIDTH = 16


class Counting(TorchDispatchMode):
    """How many products are really made."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
        return func(*args, **(kwargs or {}))


class Residual(nn.Module):
    """Ends in a product that is added to what came in."""

    def __init__(self, end: Callable[[Tensor, Tensor], Tensor], bias: bool = True) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH, bias=bias)
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(x, self.down(torch.tanh(self.up(self.norm(x)))))


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def gradients(chain: Chain, index: int, weights: Mapping[str, Tensor], unread: bool) -> tuple[list[Tensor | None], int]:
    """Of all inputs and weights of a layer, for made-up inputs; and how many products its forward made."""
    layer = chain.layers[index]
    torch.manual_seed(3)
    specs = [chain.values[value] for value in layer.inputs]
    inputs = [_made(spec.shape_at(2), spec.dtype).requires_grad_(spec.needs_grad) for spec in specs]
    names = (*layer.parameters, *layer.tied)
    leaves = {
        name: weights[name].detach().clone().requires_grad_(chain.parameters[name].requires_grad) for name in names
    }
    with Counting() as made:
        outputs, _ = layer.run(leaves, {}, inputs, unread)
    torch.manual_seed(4)
    roots = [output for output in outputs if output.requires_grad]
    torch.autograd.backward(roots, [torch.randn_like(root) for root in roots])
    return [leaf.grad for leaf in (*inputs, *leaves.values()) if leaf.requires_grad], made.count


def _made(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype) if dtype.is_floating_point else torch.ones(shape, dtype=dtype)


def same(ours: list[Tensor | None], theirs: list[Tensor | None]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def layer_with(chain: Chain, name: str) -> int:
    return next(layer.index for layer in reversed(chain.layers) if name in layer.parameters)


@pytest.mark.parametrize(
    ("end", "spared"),
    [
        (torch.add, 1),
        (lambda x, y: x - y.view(-1, 4, WIDTH), 1),
        (lambda x, y: nn.functional.dropout(y, 0.3) + x, 1),
        (lambda x, y: x * y, 0),
        (lambda x, y: x + torch.tanh(y), 0),
        (lambda x, y: nn.functional.layer_norm(x + y, (WIDTH,)), 0),
        (lambda x, y: x + y + y.square(), 0),
    ],
    ids=["added", "subtracted", "dropped out", "multiplied", "through tanh", "normed", "used twice"],
)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_what_only_outputs_need_is_not_made(end: Callable[..., Tensor], spared: int, bias: bool) -> None:
    model = Stack(*(Residual(end, bias) for _ in range(3)))
    chain = decompose(model, torch.randn(2, 4, WIDTH))
    weights = dict(model.named_parameters())
    index = layer_with(chain, "blocks.1.down.weight")
    assert (chain.layers[index].hollow is not None) == bool(spared)
    ours, made = gradients(chain, index, weights, unread=True)
    theirs, whole = gradients(chain, index, weights, unread=False)
    assert whole - made == spared
    assert same(ours, theirs)


@pytest.mark.parametrize(
    ("build", "batch"),
    [(gpt2, causal), (llama, causal), (bert, padded), (t5, causal), (vit, images)],
)
def test_gradients_of_transformers_are_the_same(build: Callable[[], nn.Module], batch: Callable[[int], Batch]) -> None:
    model = build().train()
    chain = decompose(model, batch(2))
    weights = dict(model.named_parameters())
    hollow = [layer for layer in chain.layers if layer.hollow is not None and not layer.buffers]
    assert bool(hollow) == (build is not bert)  # whose sums are normed
    for layer in hollow:
        ours, made = gradients(chain, layer.index, weights, unread=True)
        theirs, whole = gradients(chain, layer.index, weights, unread=False)
        assert made < whole
        assert same(ours, theirs), layer.name
