"""Config x model -> a torch optimizer, and the learning rate of every step."""

import math

import torch
from torch import nn

from counterpoint.core.errors import ModelError
from counterpoint.job.config import Config
from counterpoint.runtime.error_feedback import ErrorFeedback


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """The one that is named, with error feedback if asked for."""
    optimizer = _named_optimizer(config, model)
    return ErrorFeedback(optimizer, config.error_feedback) if config.error_feedback else optimizer


def _named_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """Matrices decay, vectors (biases and norms) do not."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ModelError("the model has nothing to train: none of its parameters requires a gradient")
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    match config.optimizer:
        case "adamw":
            return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas)
        case "sgd":
            return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum)
        case _:
            return torch.optim.Adafactor(groups, lr=config.learning_rate)


def learning_rate_at(config: Config, step: int) -> float:
    """Of the step after `step` others: a straight rise over the warmup, then the decay over what is left."""
    if step < config.warmup:
        return config.learning_rate * (step + 1) / config.warmup
    done = min(1.0, (step - config.warmup) / max(1, config.steps - config.warmup))
    match config.decay:
        case "cosine":
            share = (1 + math.cos(math.pi * done)) / 2
        case "linear":
            share = 1 - done
        case _:
            return config.learning_rate
    return config.learning_rate * (config.final_share + (1 - config.final_share) * share)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
