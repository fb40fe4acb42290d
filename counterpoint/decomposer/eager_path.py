"""A model under trace -> the same model taking the branches it takes when it runs eagerly.

Transformers asks whether it is being exported and then avoids what only eager code may do: it builds a causal mask
where eager attention is told `is_causal`, which is slower and may round differently. Here all sizes but the batch size
are fixed, so that these branches are known, unless they depend on data.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils.checkpoint import CheckpointFunction

from counterpoint.decomposer.explain import CustomBackward
from counterpoint.decomposer.nodes import op_name

_COUNTING = frozenset(["arange", "add", "unsqueeze", "expand", "sym_size"])
_RAND = torch.rand
_APPLY = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]


@contextmanager
def as_eager(model: nn.Module) -> Iterator[None]:
    """Train mode, no key-value cache, and the eager branches of transformers; all undone afterwards."""
    with ExitStack() as stack:
        stack.enter_context(_in_train_mode(model))
        had_cache = stack.enter_context(_without_cache(model))
        stack.enter_context(patch.object(torch.autograd.Function, "apply", classmethod(_refuse_custom_backward)))
        if not any(getattr(module, "layerdrop", 0) for module in model.modules()):
            stack.enter_context(patch.object(torch, "rand", _rand_without_layerdrop))
        if "transformers.masking_utils" in sys.modules:
            for target, name, replacement in _transformers_branches(had_cache):
                if hasattr(target, name):
                    stack.enter_context(patch.object(target, name, replacement))
        yield


def _transformers_branches(had_cache: bool) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    masking = sys.modules["transformers.masking_utils"]
    yield masking, "is_torchdynamo_exporting", _no
    look = masking.find_packed_sequence_indices  # transformers looks for packed sequences only without a cache
    yield masking, "find_packed_sequence_indices", lambda ids: None if had_cache or _counts_up(ids) else look(ids)


def _no() -> bool:
    return False


def _counts_up(position_ids: Tensor) -> bool:
    """Whether the trace shows that these are 0, 1, 2 and so on in each row: then no sequences are packed in it."""
    mode = get_proxy_mode()
    slot = get_proxy_slot(position_ids, mode.tracer, None) if mode is not None else None
    nodes = [slot.proxy.node] if slot is not None else []
    for node in nodes:
        nodes.extend(() if op_name(node) == "sym_size" else node.all_input_nodes)
    return bool(nodes) and all(op_name(node) in _COUNTING for node in nodes)


def _rand_without_layerdrop(*arguments: Any, **options: Any) -> Any:
    """Transformers draws one number per layer and skips the layer if it is below `layerdrop`: never, if that is 0."""
    return 1.0 if arguments in (([],), ((),)) and not options else _RAND(*arguments, **options)


def _refuse_custom_backward(cls: type, *arguments: Any, **options: Any) -> Any:
    """Export sees through an autograd.Function's forward and would differentiate that, not call its backward.

    A checkpoint is none of our business, for we have our own; other functions of torch only carry out custom ops.
    """
    if cls is CheckpointFunction:
        run, _, *inputs = arguments
        return run(*inputs)
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
def _without_cache(model: nn.Module) -> Iterator[bool]:
    """Training has no next token: a key-value cache would only copy. Yields whether there would have been one."""
    found: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = [config for config in found if getattr(config, "use_cache", False) is True]
    for config in configs:
        config.use_cache = False
    try:
        yield bool(configs) and not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    finally:
        for config in configs:
            config.use_cache = True
