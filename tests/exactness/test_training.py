"""Optimizers, clipping, learning-rate schedules, autocast, adapters and dropout, each against the plain loop."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from counterpoint import ErrorFeedback
from counterpoint.runtime import home_update
from counterpoint.runtime import optimizer as runtime_optimizer
from counterpoint.runtime.optimizer import UpdateRule
from tests.small_models import WIDTH, regression, vectors
from tests.small_transformers import adapted_llama, causal, gpt2, llama

from .bench import ALL_FITS, Problem, Setting, adamw, differences, same, train, train_plainly


def wide_llama() -> nn.Module:
    return llama(hidden_size=64, intermediate_size=160)


class Lion(Optimizer):
    """Like the optimizers people write: its own state, one part of it a plain number."""

    def __init__(self, parameters: Any, lr: float = 1e-3) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["count"], state["average"] = 0, torch.zeros_like(parameter)
                state["count"] += 1
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                direction = state["average"].mul(first).add_(parameter.grad, alpha=1 - first).sign_()
                parameter.add_(direction, alpha=-group["lr"] / state["count"] ** 0.5)
                state["average"].mul_(second).add_(parameter.grad, alpha=1 - second)


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": adamw,
    "adamw fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    "adam amsgrad": lambda model: torch.optim.Adam(model.parameters(), amsgrad=True, weight_decay=0.01),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "sgd momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.1),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.01),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), centered=True, momentum=0.9),
    "lion": lambda model: Lion(model.parameters()),
    "adamw fed back": lambda model: ErrorFeedback(adamw(model), 0.5),
    "adafactor fed back": lambda model: ErrorFeedback(torch.optim.Adafactor(model.parameters(), lr=0.01), 0.5),
    "lion fed back": lambda model: ErrorFeedback(Lion(model.parameters()), 0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, tmp_path: Path) -> None:
    problem = Problem(llama, causal, optimizer=OPTIMIZERS[name], max_grad_norm=0.5)
    setting = Setting("evict", pack=2)
    assert differences(train(problem, setting, tmp_path).outcome, train_plainly(problem, 2)) == []


@pytest.mark.parametrize("policy", ["evict recompute", "keep evict recompute", "recompute recompute keep"])
@pytest.mark.parametrize("joined", [1, 2, 3])
@pytest.mark.parametrize("budget", [1.0, 1.5])
def test_a_policy_for_each_pack_and_forward_packs_of_their_own(
    policy: str, joined: int, budget: float, tmp_path: Path
) -> None:
    problem = Problem(llama, causal)
    setting = Setting(policy, joined=joined, budget=budget)
    assert differences(train(problem, setting, tmp_path).outcome, train_plainly(problem, 2)) == []


@pytest.mark.parametrize("name", ["adamw", "adam amsgrad", "sgd", "sgd momentum", "rmsprop", "adamw fed back"])
@pytest.mark.parametrize("host_layers", [(0,), (1, 2, 5), tuple(range(20))], ids=["one", "some", "all"])
def test_updates_at_home(
    name: str, host_layers: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in slices that are smaller than a parameter."""
    monkeypatch.setattr(home_update, "UPDATE_STAGING_BYTES", 3 * 5 * 4 * 4096)
    problem = Problem(wide_llama, causal, optimizer=OPTIMIZERS[name], max_grad_norm=0.5)
    setting = Setting("evict", pack=2, host_layers=host_layers)
    assert differences(train(problem, setting, tmp_path).outcome, train_plainly(problem, 2)) == []


ELEMENTWISE = [getattr(torch.optim, name) for name in runtime_optimizer._ELEMENTWISE]


def fed_back(parameters: Any, lr: float) -> Optimizer:
    return ErrorFeedback(torch.optim.AdamW(parameters, lr=lr), 0.5)


@pytest.mark.parametrize("kind", [*ELEMENTWISE, fed_back], ids=lambda kind: kind.__name__)
def test_updates_in_slices(kind: Callable[..., Optimizer], monkeypatch: pytest.MonkeyPatch) -> None:
    """A large parameter is updated slice by slice, so that the optimizer's temporaries stay small."""
    monkeypatch.setattr(runtime_optimizer, "SLICE_ELEMENTS", 1024)
    torch.manual_seed(0)
    plain = nn.Parameter(torch.randn(61, 53))
    expected = kind([plain], lr=0.01)
    stand_in = nn.Parameter(plain.detach().clone())
    rule = UpdateRule(kind([stand_in], lr=0.01), {id(stand_in): "w"})
    weight = plain.detach().clone()
    state = {t.key: torch.full(t.shape, 7, dtype=t.dtype) for t in rule.state_tensors("w", (61, 53), torch.float32)}
    for number in range(4):
        plain.grad = torch.randn(61, 53)
        rule.update("w", weight, plain.grad.clone(), state, fresh=number == 0)
        expected.step()
    assert torch.equal(weight, plain)
    found = state | rule.scalars.get("w", {})
    assert [key for key, value in expected.state[plain].items() if not same(value, found[key])] == []


class Mixed(nn.Module):
    """Parameters of several dtypes: norms are taken by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=d) for d in (torch.float64, torch.float32) * 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


@pytest.mark.parametrize("max_grad_norm", [0.01, 1e6], ids=["tight", "loose"])
@pytest.mark.parametrize("budget", [1.0, ALL_FITS])
def test_clipping(max_grad_norm: float, budget: float, tmp_path: Path) -> None:
    problem = Problem(Mixed, vectors, regression, max_grad_norm=max_grad_norm)
    for policy in ("recompute", "evict"):
        found = train(problem, Setting(policy, pack=2, budget=budget), tmp_path / policy)
        assert differences(found.outcome, train_plainly(problem, 2)) == []


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=6),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rate_schedules(name: str, tmp_path: Path) -> None:
    problem = Problem(llama, causal, schedule=SCHEDULES[name])
    found = train(problem, Setting("recompute", pack=3), tmp_path).outcome
    assert differences(found, train_plainly(problem, 2)) == []
    assert differences(found, train_plainly(Problem(llama, causal), 2)) != []


@pytest.mark.parametrize("policy", ["recompute", "evict", "keep"])
def test_autocast(policy: str, tmp_path: Path) -> None:
    problem = Problem(llama, causal, autocast=torch.bfloat16, max_grad_norm=1.0)
    found = train(problem, Setting(policy, pack=2), tmp_path).outcome
    assert differences(found, train_plainly(problem, 2)) == []
    assert found.losses != train_plainly(Problem(llama, causal, max_grad_norm=1.0), 2).losses


def half() -> nn.Module:
    return llama().to(torch.bfloat16)


def test_weights_in_half_precision(tmp_path: Path) -> None:
    problem = Problem(half, causal)
    assert differences(train(problem, Setting("evict", pack=1), tmp_path).outcome, train_plainly(problem, 2)) == []


@pytest.mark.parametrize("policy", ["recompute", "evict"])
def test_adapters(policy: str, tmp_path: Path) -> None:
    problem = Problem(adapted_llama, causal, max_grad_norm=1.0)
    found = train(problem, Setting(policy, pack=2), tmp_path).outcome
    assert differences(found, train_plainly(problem, 2)) == []
    assert all("lora" in name for name in found.states)


def dropping() -> nn.Module:
    return gpt2(dropout=0.2, tie_word_embeddings=False)


def test_dropout_does_not_depend_on_the_plan(tmp_path: Path) -> None:
    """Plain PyTorch draws from one stream, so there is nothing to compare with but other plans."""
    problem = Problem(dropping, causal)
    settings = [
        Setting("recompute", pack=1, seed=3),
        Setting("recompute", pack=3, schedule="plain", seed=3),
        Setting("evict", pack=2, seed=3),
        Setting("evict", pack=1, schedule="plain", seed=3),
        Setting("keep", pack=100, budget=ALL_FITS, seed=3),
        Setting("recompute", pack=1, seed=4),
    ]
    first, *others, another_seed = [train(problem, s, tmp_path / str(i)).outcome for i, s in enumerate(settings)]
    assert [differences(other, first) for other in others] == [[]] * 4
    assert first.losses != another_seed.losses
    assert first.losses != train_plainly(problem, 2).losses


def test_dropout_leaves_the_random_state_alone(tmp_path: Path) -> None:
    problem = Problem(dropping, causal)
    problem.batches()
    expected = torch.rand(3)
    train(problem, Setting("recompute"), tmp_path)
    assert torch.equal(torch.rand(3), expected)
