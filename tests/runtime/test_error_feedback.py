"""Error feedback around any optimizer: the rule itself, in plain PyTorch, and what it keeps."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from counterpoint import ErrorFeedback
from counterpoint.runtime.optimizer import UpdateRule

KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
}


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in ((5, 3), (7,))]


def gradients(step: int) -> list[Tensor | None]:
    """The second parameter misses a step."""
    generator = torch.Generator().manual_seed(step + 1)
    found: list[Tensor | None] = [torch.randn_like(p, generator=generator) for p in parameters()]
    return [found[0], None] if step == 2 else found


def take_step(optimizer: Optimizer, trained: list[nn.Parameter], step: int) -> None:
    for parameter, gradient in zip(trained, gradients(step), strict=True):
        parameter.grad = gradient
    optimizer.step()


def by_hand(kind: str, strength: Callable[[int], float], steps: int = 6) -> list[Tensor]:
    """w -= u(t) + c (u(t) - u(t-1)), with u what the optimizer alone would take from the weights."""
    trained = parameters()
    optimizer = KINDS[kind](trained)
    previous: list[Tensor | None] = [None, None]
    for step in range(steps):
        before = [p.detach().clone() for p in trained]
        take_step(optimizer, trained, step)
        for index, parameter in enumerate(trained):
            if parameter.grad is None:
                continue
            update, earlier = before[index] - parameter.detach(), previous[index]
            if earlier is not None:
                parameter.data = parameter.data - strength(step) * (update - earlier)
            previous[index] = update
    return [p.detach() for p in trained]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_the_rule(kind: str, strength: float) -> None:
    trained = parameters()
    optimizer = ErrorFeedback(KINDS[kind](trained), strength)
    for step in range(6):
        take_step(optimizer, trained, step)
    assert all(torch.equal(a, b) for a, b in zip(trained, by_hand(kind, lambda _: strength), strict=True))
    alone = by_hand(kind, lambda _: 0.0)
    assert all(torch.equal(a, b) == (strength == 0) for a, b in zip(trained, alone, strict=True))


def test_strength_and_learning_rate_change_between_steps() -> None:
    trained = parameters()
    optimizer = ErrorFeedback(KINDS["adamw"](trained))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for step in range(6):
        optimizer.param_groups[0]["error_feedback"] = float(step > 2)
        take_step(optimizer, trained, step)
        schedule.step()
    expected = by_hand("adamw", lambda step: float(step > 2))
    assert all(torch.equal(a, b) for a, b in zip(trained, expected, strict=True))


@pytest.mark.parametrize("copied", [False, True], ids=["state_dict", "deepcopy"])
def test_it_goes_on_from_its_state(copied: bool) -> None:
    whole, parted = parameters(), parameters()
    optimizer, first = (ErrorFeedback(KINDS["adamw"](trained), 1.0) for trained in (whole, parted))
    for step in range(6):
        take_step(optimizer, whole, step)
    for step in range(3):
        take_step(first, parted, step)
    if copied:
        second, rest = copy.deepcopy((first, parted))
    else:
        rest = [nn.Parameter(p.detach().clone()) for p in parted]
        second = ErrorFeedback(KINDS["adamw"](rest), 0.0)
        second.load_state_dict(first.state_dict())
    for step in range(3, 6):
        take_step(second, rest, step)
    assert all(torch.equal(a, b) for a, b in zip(whole, rest, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_its_state_is_told_beforehand(kind: str) -> None:
    """Adafactor's step fails on the meta device, when its state is there."""
    trained = parameters()
    rule = UpdateRule(ErrorFeedback(KINDS[kind](trained)), {id(p): str(i) for i, p in enumerate(trained)})
    alone = UpdateRule(KINDS[kind](trained), {id(p): str(i) for i, p in enumerate(trained)})
    found = {t.key: t for t in rule.state_tensors("0", (5, 3), torch.float64)}
    assert (found.pop("previous_update").shape, rule.elementwise) == ((5, 3), alone.elementwise)
    assert tuple(found.values()) == alone.state_tensors("0", (5, 3), torch.float64)


def test_a_failed_step_keeps_what_was_there() -> None:
    trained = parameters()
    optimizer = ErrorFeedback(KINDS["adamw"](trained))
    take_step(optimizer, trained, 0)
    before = optimizer.state[trained[0]]["previous_update"].clone()
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        take_step(optimizer, trained, 1)
    assert torch.equal(optimizer.state[trained[0]]["previous_update"], before)


def test_negative_strength_is_refused() -> None:
    with pytest.raises(ValueError, match="must be 0 or more, not -1"):
        ErrorFeedback(KINDS["sgd"](parameters()), -1.0)
