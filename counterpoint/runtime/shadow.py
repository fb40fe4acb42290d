"""An optimizer -> a shadow of it: the same kind with the same settings, over other parameters with other state."""

from collections.abc import MutableMapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def shadow_of(
    optimizer: Optimizer, groups: list[dict[str, Any]], state: MutableMapping[Tensor, dict[str, Any]]
) -> Optimizer:
    """Its `step` is the optimizer's own; the optimizer itself is not changed by it."""
    shadow: Optimizer = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    shadow.__dict__.pop("step", None)  # a scheduler's wrapper, bound to the user's optimizer
    shadow.param_groups, shadow.state = groups, state  # type: ignore[assignment]
    return shadow
