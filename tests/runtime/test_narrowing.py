"""Which parameters autocast always casts, and that a narrow copy of those gives the same outputs and gradients."""

import os
from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from counterpoint.decomposer import chain_of_modules, decompose
from counterpoint.decomposer.chain import Chain
from counterpoint.runtime.backend import CPU
from counterpoint.runtime.frame import frame_of
from counterpoint.runtime.narrowing import narrowed

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")  # before the first product in bf16
HALF = torch.bfloat16
TOKENS = {"x": torch.arange(12).view(4, 3) % 11, "y": torch.arange(12).view(4, 3) % 11}
ROWS = {"x": torch.linspace(-1, 1, 4 * 64).view(4, 64), "y": torch.arange(4) % 3}


class Model(nn.Module):
    def __init__(self, run: Callable[[nn.Module, Tensor], Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output.flatten(0, -2), batch["y"].flatten())


def chain_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Chain:
    with CPU.autocast(HALF):
        return decompose(model, batch, loss=loss)


def linear(inputs: int, outputs: int) -> nn.Linear:
    torch.manual_seed(outputs)
    return nn.Linear(inputs, outputs)


def matrix(*shape: int) -> nn.Parameter:
    torch.manual_seed(sum(shape))
    return nn.Parameter(torch.randn(shape) / 8)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Model(lambda m, x: m.a(x), a=linear(64, 3)), {"a.weight", "a.bias"}),
        (Model(lambda m, x: m.a(m.n(x)), a=linear(64, 3), n=nn.LayerNorm(64)), {"a.weight", "a.bias"}),
        (Model(lambda m, x: x @ m.w, w=matrix(64, 3)), {"w"}),
        (Model(lambda m, x: functional.linear(torch.relu(functional.linear(x, m.w)), m.w), w=matrix(64, 64)), {"w"}),
        (Model(lambda m, x: x @ m.w + m.w.sum(), w=matrix(64, 3)), set()),
        (Model(lambda m, x: x @ m.w.t(), w=matrix(3, 64)), set()),
        (Model(lambda m, x: x * m.w + m.a(x).sum(), w=matrix(64), a=linear(64, 3)), {"a.weight", "a.bias"}),
        (Model(lambda m, x: x.double() @ m.w.double(), w=matrix(64, 3)), set()),
    ],
    ids=["linear", "norm", "product", "used twice", "used elsewhere", "a view", "scale", "double"],
)
def test_parameters_are_narrow_where_every_use_is_a_cast(model: nn.Module, expected: set[str]) -> None:
    chain = chain_of(model, ROWS)
    assert narrowed(chain, HALF) == dict.fromkeys(expected, HALF)
    assert narrowed(chain, None) == {}


def test_a_tied_parameter_must_be_narrow_in_every_layer() -> None:
    embedding, head = nn.Embedding(11, 64), linear(64, 11)
    head.weight = embedding.weight
    model = Model(lambda m, x: m.head(torch.tanh(m.a(m.e(x)))), e=embedding, a=linear(64, 64), head=head)
    assert set(narrowed(chain_of(model, TOKENS), HALF)) == {"a.weight", "a.bias", "head.bias"}


class Looking(nn.Module):
    """Does something else if its weights are narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.a = linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.a(x)) if self.a.weight.dtype == HALF else self.a(x)


class Counting(Looking):
    """Cannot run without content."""

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * int((x > 0).sum())


@pytest.mark.parametrize("first", [Looking, Counting])
def test_a_layer_that_looks_is_left_alone(first: type[nn.Module]) -> None:
    with CPU.autocast(HALF):
        chain = chain_of_modules([first(), linear(64, 3)], ROWS, loss)
    assert set(narrowed(chain, HALF)) == {"1.weight", "1.bias"}


def test_a_narrow_leaf_gives_the_outputs_and_gradients_of_a_cast() -> None:
    model = Model(
        lambda m, x: m.b(torch.relu(functional.linear(functional.linear(m.n(x), m.w), m.w))),
        n=nn.LayerNorm(64), w=matrix(64, 64), b=linear(64, 3),
    )  # fmt: skip
    chain = chain_of(model, ROWS)
    narrow = narrowed(chain, HALF)
    assert set(narrow) == {"w", "b.weight", "b.bias"}
    found = []
    for dtypes in ({}, narrow):
        leaves = {
            name: parameter.detach().to(dtypes.get(name, torch.float32)).requires_grad_()
            for name, parameter in model.named_parameters()
        }
        with CPU.autocast(HALF):
            total, _ = chain.run(leaves, {}, ROWS)
        total.backward()
        found.append({"loss": total, **{name: leaf.grad.float() for name, leaf in leaves.items()}})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_old_layouts_are_smaller_or_absent() -> None:
    """What lies in whole blocks of the disk does not shrink by less than one."""
    model = Model(lambda m, x: m.b(m.n(m.a(x))), a=linear(64, 64), n=nn.LayerNorm(64), b=linear(64, 3))
    chain = chain_of(model, ROWS)
    frame = frame_of(chain, narrowed(chain, HALF))
    layer = chain.parameters["a.weight"].owner
    dtypes = {slot.name: slot.dtype for slot in frame.olds[layer].slots}
    assert dtypes["a.weight"] == HALF
    assert frame.olds[layer].num_bytes < frame.weights[layer].num_bytes
    assert [bool(old.slots) for old in frame.olds] == [layer.narrows for layer in frame.outline.layers]
    assert all(not old.slots for old in frame_of(chain).olds)
    tiny = chain_of(Model(lambda m, x: m.a(x), a=linear(64, 3)), ROWS)
    assert not any(old.slots for old in frame_of(tiny, narrowed(tiny, HALF)).olds)
