"""What the computations of one step share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(slots=True)
class Step:
    """What the computations of one step share: its microbatches and their losses, `complete` if of all devices.

    `groups` are the optimizer's settings when the batch came, for schedules that update later; None means its own.
    """

    number: int
    batches: Sequence[Mapping[int, Tensor]]
    losses: dict[int, Tensor] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)
    clip: Tensor | None = None
    groups: list[dict[str, Any]] | None = None
    complete: bool = False
