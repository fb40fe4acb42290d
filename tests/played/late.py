"""Values in pinned memory and copies that run late: what tests of order need."""

from typing import Any

import torch
from torch import Tensor

SIZE = 4096
LATE = 80_000  # microseconds; far more than a busy machine takes from one line of a test to the next


def device_module() -> Any:
    return torch.get_device_module("played")


def pinned(value: float) -> Tensor:
    return torch.full((SIZE,), float(value)).pin_memory()


def copies_are_late() -> None:
    device_module().set_delay(LATE)
