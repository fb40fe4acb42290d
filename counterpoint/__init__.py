"""Counterpoint: train PyTorch models whose training state does not fit in memory."""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from counterpoint.core.errors import (
        BudgetError,
        CounterpointError,
        ExecutionError,
        LossError,
        ModelError,
        ProgramError,
    )
    from counterpoint.core.machine import Machine
    from counterpoint.core.plan import Plan
    from counterpoint.core.profile import Profile
    from counterpoint.core.timeline import Timeline
    from counterpoint.decomposer import decompose
    from counterpoint.planner.forecast import Forecast
    from counterpoint.runtime.error_feedback import ErrorFeedback
    from counterpoint.simulator import simulate
    from counterpoint.trainer import Trainer

__all__ = [
    "BudgetError",
    "CounterpointError",
    "ErrorFeedback",
    "ExecutionError",
    "Forecast",
    "LossError",
    "Machine",
    "ModelError",
    "Plan",
    "Profile",
    "ProgramError",
    "Timeline",
    "Trainer",
    "decompose",
    "simulate",
]

_HOMES = {
    "counterpoint.core.errors": (
        *("BudgetError", "CounterpointError", "ExecutionError", "LossError", "ModelError", "ProgramError"),
    ),
    "counterpoint.core.machine": ("Machine",),
    "counterpoint.core.plan": ("Plan",),
    "counterpoint.core.profile": ("Profile",),
    "counterpoint.core.timeline": ("Timeline",),
    "counterpoint.decomposer": ("decompose",),
    "counterpoint.planner.forecast": ("Forecast",),
    "counterpoint.runtime.error_feedback": ("ErrorFeedback",),
    "counterpoint.simulator": ("simulate",),
    "counterpoint.trainer": ("Trainer",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages under large tensors; torch asks before its first one


def __getattr__(name: str) -> Any:
    """Public names load on first use (PEP 562), so that planning and simulating need no torch."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'counterpoint' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
