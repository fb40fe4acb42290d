"""A chain under autocast -> the parameters that it only ever uses cast, and to what: a narrow copy serves as well.

Each distinct layer runs on tensors without content, once as it is and once with narrow parameters. A parameter is
narrow if its one use is the cast that autocast makes, and if without it the layer does the same as before, operation by
operation. Then a copy that is cast beforehand gives the same outputs bit for bit, and the same gradient: what autograd
has at the cast, which going back through it would only make wider. What is not proven stays as it is.
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from counterpoint.decomposer.chain import Chain, Layer
from counterpoint.decomposer.layering import GraphBody
from counterpoint.runtime.backend import CPU, Backend

_SIZE = 2  # of the microbatch; a size of 1 may be special
_Trace = list[tuple[object, ...]]


def narrowed(chain: Chain, autocast: torch.dtype | None, backend: Backend = CPU) -> dict[str, torch.dtype]:
    """The narrow parameters and their dtype; a tied one is narrow if it is in every layer that uses it."""
    if autocast is None:
        return {}
    known: dict[str, list[bool]] = {}
    uses: dict[str, list[bool]] = {}
    for layer in chain.layers:
        body = layer.body
        names = body.parameters if isinstance(body, GraphBody) else (*layer.parameters, *layer.tied)
        key = layer.signature if isinstance(body, GraphBody) else layer.name  # a module may have more than it shows
        if key not in known:
            found = _narrow_in(chain, layer, autocast, backend)
            known[key] = [name in found for name in names]
        for name, is_narrow in zip(names, known[key], strict=True):
            uses.setdefault(name, []).append(is_narrow)
    return {name: autocast for name, found in uses.items() if all(found)}


def _narrow_in(chain: Chain, layer: Layer, dtype: torch.dtype, backend: Backend) -> set[str]:
    try:
        with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True), backend.device:
            warnings.simplefilter("ignore")
            casts, before = _observe(chain, layer, dtype, set(), backend)
            found = {name for name, count in casts.items() if count == 1 and chain.parameters[name].requires_grad}
            return found if _observe(chain, layer, dtype, found, backend)[1] == before else set()
    except Exception:  # a layer that looks at content, or does what cannot be done without it
        return set()


def _observe(
    chain: Chain, layer: Layer, dtype: torch.dtype, narrow: set[str], backend: Backend
) -> tuple[Counter[str], _Trace]:
    """How often each parameter is cast, of those that are not used otherwise; and what else the layer does."""
    parameters = {name: _parameter(chain, name, dtype, narrow) for name in (*layer.parameters, *layer.tied)}
    buffers = {n: torch.empty(chain.buffers[n].shape, dtype=chain.buffers[n].dtype) for n in layer.buffers}
    values = [chain.values[index] for index in layer.inputs]
    inputs = [torch.empty(value.shape_at(_SIZE), dtype=value.dtype, requires_grad=value.needs_grad) for value in values]
    with _Recorder(parameters, dtype) as recorder, backend.autocast(dtype):
        outputs, mutated = layer.run(parameters, buffers, inputs)
    recorder.trace.append(("results", *_forms((*outputs, *mutated.values()))))
    return recorder.casts, recorder.trace


def _parameter(chain: Chain, name: str, dtype: torch.dtype, narrow: set[str]) -> Tensor:
    spec = chain.parameters[name]
    kind = dtype if name in narrow else spec.dtype
    return torch.empty(spec.shape, dtype=kind, requires_grad=spec.requires_grad)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation below autograd and autocast."""

    def __init__(self, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype, self.casts, self.trace = dtype, Counter[str](), _Trace()
        self._parameters = {_storage(tensor): (name, tensor) for name, tensor in parameters.items()}
        self._wide: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace == "prim":  # a question, not an operation
            return result
        is_cast = func is torch.ops.aten._to_copy.default and kwargs == {"dtype": self.dtype}
        cast = ""
        for tensor in _tensors((args, kwargs)):
            name, parameter = self._parameters.get(_storage(tensor), ("", tensor))
            if name and is_cast and tensor is parameter and parameter.dtype == torch.float32:
                cast = name
            elif name:
                self._wide.add(name)
        if cast:
            self.casts[cast] += 1
        else:
            self.trace.append((func, *_forms((result,))))
        for name in self._wide:
            self.casts.pop(name, None)
        return result


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(tree: Any) -> Iterable[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _forms(tree: Any) -> list[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]]:
    return [(tensor.dtype, tuple(tensor.shape), tensor.stride()) for tensor in _tensors(tree)]
