"""Optimizers by name, and learning rates by step."""

import pytest
import torch

from counterpoint import ErrorFeedback
from counterpoint.core.errors import ModelError
from counterpoint.job.config import Config
from counterpoint.job.optimizers import build_optimizer, learning_rate_at, set_learning_rate


@pytest.mark.parametrize(
    ("name", "kind"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD), ("adafactor", torch.optim.Adafactor)]
)
def test_vectors_do_not_decay(name: str, kind: type) -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(3, 2)
    optimizer = build_optimizer(Config(optimizer=name, weight_decay=0.3, learning_rate=0.5, betas=(0.1, 0.2)), model)
    assert type(optimizer) is kind
    assert [(group["params"], group["weight_decay"]) for group in optimizer.param_groups] == [
        ([model.weight], 0.3),
        ([model.bias], 0.0),
    ]
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}
    set_learning_rate(optimizer, 0.25)
    assert {group["lr"] for group in optimizer.param_groups} == {0.25}


def test_error_feedback_is_around_the_optimizer() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = build_optimizer(Config(error_feedback=0.25), model)
    assert isinstance(optimizer, ErrorFeedback)
    assert type(optimizer.optimizer) is torch.optim.AdamW
    assert [group["error_feedback"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_frozen_parameters_are_left_alone() -> None:
    model = torch.nn.Linear(3, 2)
    model.weight.requires_grad_(False)
    assert [group["params"] for group in build_optimizer(Config(), model).param_groups] == [[model.bias]]
    model.bias.requires_grad_(False)
    with pytest.raises(ModelError, match="nothing to train"):
        build_optimizer(Config(), model)


@pytest.mark.parametrize(
    ("decay", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.8, 0.6, 0.4]),
        ("cosine", [0.5, 1.0, 1.0, 0.882843, 0.6, 0.317157]),
    ],
)
def test_rates(decay: str, rates: list[float]) -> None:
    config = Config(decay=decay, warmup=2, steps=6, learning_rate=1.0, final_share=0.2)
    assert [learning_rate_at(config, step) for step in range(6)] == pytest.approx(rates, abs=1e-6)


def test_a_run_that_goes_beyond_its_end_keeps_the_last_rate() -> None:
    config = Config(steps=6, learning_rate=1.0, final_share=0.2)
    assert learning_rate_at(config, 6) == pytest.approx(0.2)
    assert learning_rate_at(config, 60) == pytest.approx(0.2)
