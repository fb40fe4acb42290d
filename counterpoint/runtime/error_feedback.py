"""Any torch optimizer -> one whose updates lean towards where they are heading, for gradients that come a step late.

With u(t) the update of the optimizer it wraps, weights move by u(t) + c (u(t) - u(t-1)): the change from one update to
the next stands for the one that the delay has kept from view. Nothing is known here of schedules: u(t-1) is one more
tensor of the optimizer's state, kept, saved and moved with the rest of it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from counterpoint.runtime.shadow import shadow_of

STRENGTH, PREVIOUS = "error_feedback", "previous_update"


class ErrorFeedback(Optimizer):
    """Wraps `optimizer`: make schedulers from this one, and give this one to the Trainer.

    `strength` is c, a setting of each parameter group (`group["error_feedback"]`), so that it may differ between groups
    and change between steps, as a learning rate may; 0 is the wrapped optimizer alone. An update is what the wrapped
    step has taken from the weights, its weight decay included. A parameter's first update has none before it and is
    left as it is.
    """

    def __init__(self, optimizer: Optimizer, strength: float = 1.0) -> None:
        if not 0 <= strength < float("inf"):
            raise ValueError(f"the strength of error feedback must be 0 or more, not {strength}")
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {**optimizer.defaults, STRENGTH: strength})
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moved = [(p, group[STRENGTH]) for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [parameter.clone() for parameter, _ in moved]
        earlier = [self.state[parameter].pop(PREVIOUS, None) for parameter, _ in moved]
        try:
            shadow_of(self.optimizer, self.param_groups, self.state).step()
        except Exception:
            self._put_back([parameter for parameter, _ in moved], earlier)
            raise
        for (parameter, strength), start, previous in zip(moved, before, earlier, strict=True):
            self._feed_back(parameter, strength, start.sub_(parameter), previous)
        return loss

    def _feed_back(self, parameter: Tensor, strength: float, update: Tensor, previous: Tensor | None) -> None:
        if previous is None:
            self.state[parameter][PREVIOUS] = update
            return
        if strength:
            parameter.sub_((update - previous).mul_(strength))
        self.state[parameter][PREVIOUS] = previous.copy_(update)

    def _put_back(self, parameters: list[Tensor], earlier: list[Tensor | None]) -> None:
        """After a step that failed; one that had made its state by then, as on the meta device, shows all of it."""
        for parameter, previous in zip(parameters, earlier, strict=True):
            if previous is not None or self.state[parameter]:
                self.state[parameter][PREVIOUS] = torch.zeros_like(parameter) if previous is None else previous

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimizer": self.optimizer}
