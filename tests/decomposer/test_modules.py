"""Chains given as a list of modules: the same protocol, also for what no trace can follow."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from counterpoint.core.errors import ModelError
from counterpoint.decomposer import chain_of_modules

WIDTH = 8


def loss(output: Any, batch: Any) -> Tensor:
    return functional.mse_loss(output, batch["target"])


def batch_of(batch_size: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch_size, WIDTH), "target": torch.randn(batch_size, WIDTH)}


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x.argmax(1)


class DataDependent(nn.Module):
    """Takes and returns a tuple; branches on data; counts its calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, index = pair
        self.calls = self.calls + 1
        if x.sum() > 0:
            x = x * 2
        return self.norm(self.linear(x)) * self.scale, index


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return self.linear(pair[0]) + functional.one_hot(pair[1], WIDTH)


def run_plain(modules: Sequence[nn.Module], batch: dict[str, Tensor]) -> Tensor:
    value: Any = batch["x"]
    for module in modules:
        value = module(value)
    return loss(value, batch)


def test_same_as_plain(check_same: Callable[..., None]) -> None:
    model = nn.ModuleList([First(), DataDependent(), DataDependent(), Last()])
    chain = chain_of_modules(list(model), batch_of(3), loss)
    assert [layer.name for layer in chain.layers] == ["0.First", "1.DataDependent", "2.DataDependent", "3.Last"]
    assert "1.calls" in chain.layers[1].mutates
    assert "1.norm.running_mean" in chain.layers[1].mutates
    assert "1.scale" not in chain.layers[1].mutates
    assert chain.layers[1].signature == chain.layers[2].signature
    for batch_size in (3, 4, 2):
        batch = batch_of(batch_size)
        check_same(chain, model, batch, lambda plain, batch=batch: run_plain(list(plain), batch))


def test_module_used_twice_is_tied(check_same: Callable[..., None]) -> None:
    shared = nn.Linear(WIDTH, WIDTH)
    model = nn.ModuleList([shared, nn.ReLU(), shared])
    chain = chain_of_modules(list(model), (torch.randn(2, WIDTH), torch.randn(2, WIDTH)), _pair_loss)
    assert chain.layers[2].tied == ("0.weight", "0.bias")
    assert chain.aliases == {"2.weight": "0.weight", "2.bias": "0.bias"}
    for batch_size in (2, 1):
        x, y = torch.randn(batch_size, WIDTH), torch.randn(batch_size, WIDTH)
        check_same(
            chain, model, (x, y), lambda plain, x=x, y=y: functional.mse_loss(plain[2](plain[1](plain[0](x))), y)
        )


def _pair_loss(output: Any, batch: Any) -> Tensor:
    return functional.mse_loss(output, batch[1])


def test_last_module_may_yield_the_loss() -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.square().mean()

    modules = [nn.Linear(WIDTH, WIDTH), Loss()]
    chain = chain_of_modules(modules, torch.randn(2, WIDTH))
    x = torch.randn(5, WIDTH)
    weights = {f"0.{name}": parameter for name, parameter in modules[0].named_parameters()}
    assert torch.equal(chain.run(weights, {}, x)[0], modules[0](x).square().mean())


def test_modules_on_meta_are_observed_without_weights() -> None:
    def build() -> list[nn.Module]:
        return [First(), DataDependent(), Last()]

    with torch.device("meta"):
        on_meta = build()
    real, meta = (chain_of_modules(modules, batch_of(3), loss) for modules in (build(), on_meta))
    assert (meta.layers, meta.values) == (real.layers, real.values)


def test_dropout_is_noticed() -> None:
    modules = [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Dropout(0.0), nn.Linear(WIDTH, WIDTH)]
    chain = chain_of_modules(modules, (torch.randn(2, WIDTH), torch.randn(2, WIDTH)), _pair_loss)
    assert [layer.random for layer in chain.layers] == [False, True, False, False]


def test_bad_modules_are_refused() -> None:
    class Dict(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"x": x}

    with pytest.raises(ModelError, match="at least one"):
        chain_of_modules([], batch_of(2), loss)
    with pytest.raises(ModelError, match="Dict returns a dict"):
        chain_of_modules([First(), Dict(), Last()], {"x": torch.randn(2, WIDTH)}, loss)
    with pytest.raises(ModelError, match="cannot run module Linear at batch size 2"):
        chain_of_modules([nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)], torch.randn(2, WIDTH), _pair_loss)
