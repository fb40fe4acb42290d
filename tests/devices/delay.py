"""What 2BW with its delay mitigated is held against: a loop in one process, its error feedback written out."""

import torch
from torch import Tensor, nn

from tests.devices.problems import OPTIMIZERS, Problem, accumulate


def mitigated_loop(
    problem: Problem, flush_steps: int, strength: float = 0.0, left_out: tuple[int, ...] = ()
) -> tuple[dict[str, Tensor], list[float]]:
    """Gradients at the newest weights for the first steps and the one after them, then at those before.

    Weights move by u(t) + c (u(t) - u(t-1)), where u(t) is what the optimizer alone takes from them.
    """
    model, old = problem.build_here(), problem.build_here()
    optimizer = OPTIMIZERS[problem.optimizer](model)
    scheduler = problem.scheduler(optimizer)
    updates: list[Tensor] = []
    losses = []
    batches = [batch for number, batch in enumerate(problem.batches()) if number not in left_out]
    for number, batch in enumerate(batches):
        if number <= flush_steps:
            _copy(model, old)
        losses.append(accumulate(problem, old, batch))
        for newest, before in zip(model.parameters(), old.parameters(), strict=True):
            newest.grad, before.grad = before.grad, None
        if problem.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), problem.max_grad_norm)
        _copy(model, old)
        optimizer.step()
        updates = _feed_back(model, old, updates, strength)
        if scheduler is not None:
            scheduler.step()
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}, losses


@torch.no_grad()
def _copy(model: nn.Module, target: nn.Module) -> None:
    for newest, before in zip(model.parameters(), target.parameters(), strict=True):
        before.copy_(newest)


@torch.no_grad()
def _feed_back(model: nn.Module, before: nn.Module, earlier: list[Tensor], strength: float) -> list[Tensor]:
    pairs = zip(before.parameters(), model.parameters(), strict=True)
    updates = [old.detach() - newest.detach() for old, newest in pairs]
    for newest, update, previous in zip(model.parameters(), updates, earlier or updates, strict=True):
        newest.copy_(newest - strength * (update - previous))
    return updates


def told(losses: list[float], flush_steps: int) -> list[float]:
    """What the steps and a settling at the end return: from 2bw's first step on, the loss of the step before."""
    last = min(flush_steps, len(losses)) - 1
    return losses[: last + 1] + losses[last:]
