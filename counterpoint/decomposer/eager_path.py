"""A model under trace -> the same model taking the branches it takes when it runs eagerly.

Transformers asks whether it is being exported and then avoids what only eager code may do: it builds a causal mask
where eager attention is told `is_causal`, which is slower and may round differently. Here all sizes but the batch size
are fixed, so that these branches are known, unless they depend on data.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from counterpoint.decomposer.explain import CustomBackward

_APPLY = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]


@contextmanager
def as_eager(model: nn.Module, batch_names: Iterable[str]) -> Iterator[None]:
    """Train mode, no key-value cache, and the eager branches of transformers; all undone afterwards."""
    with ExitStack() as stack:
        stack.enter_context(_in_train_mode(model))
        stack.enter_context(_without_cache(model))
        stack.enter_context(patch.object(torch.autograd.Function, "apply", classmethod(_refuse_custom_backward)))
        if "transformers.masking_utils" in sys.modules:
            for target, name, replacement in _transformers_branches(tuple(batch_names)):
                if hasattr(target, name):
                    stack.enter_context(patch.object(target, name, replacement))
        yield


def _transformers_branches(batch_names: tuple[str, ...]) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    masking = sys.modules["transformers.masking_utils"]
    yield masking, "is_torchdynamo_exporting", _no
    if "position_ids" not in batch_names:
        yield masking, "find_packed_sequence_indices", _nothing_packed


def _no() -> bool:
    return False


def _nothing_packed(position_ids: Any) -> None:
    """Position ids that the model counts up by itself never start again within a row."""


def _refuse_custom_backward(cls: type, *arguments: Any, **options: Any) -> Any:
    """Export sees through an autograd.Function's forward and would differentiate that, not call its backward.

    Those of torch itself only carry out what the graph says anyway: the backward of a custom op, a checkpoint.
    """
    if cls.__module__.startswith("torch."):
        return _APPLY(cls, *arguments, **options)
    raise CustomBackward(f"{cls.__name__} is a torch.autograd.Function, whose backward a trace would lose")


@contextmanager
def _in_train_mode(model: nn.Module) -> Iterator[None]:
    """A model in eval mode is traced in train mode; one in train mode keeps the parts its user put in eval mode."""
    if model.training:
        yield
        return
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Training has no next token: a key-value cache would only copy."""
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = [config for config in found if getattr(config, "use_cache", False) is True]
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs:
            config.use_cache = True
