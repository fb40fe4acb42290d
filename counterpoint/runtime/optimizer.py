"""Any torch optimizer into updates of one parameter at a time, on memory that is not the optimizer's own.

The user's optimizer keeps its parameter groups, and learning-rate schedulers keep writing to them; its state lives in
our buffers. An update borrows the optimizer: a shadow of it with one group and one parameter runs the optimizer's own
`step`. Element-wise optimizers run in slices, so that their temporaries stay small; the bits are the same.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from counterpoint.core.errors import ModelError
from counterpoint.runtime.error_feedback import ErrorFeedback
from counterpoint.runtime.shadow import shadow_of

SLICE_ELEMENTS = 1 << 17  # temporaries are small enough for the heap, and stay in the cache
DEVICE_SLICE_ELEMENTS = 1 << 20  # an accelerator wants more to do at once; temporaries must fit into the margin
_SMALL_BYTES = 64 << 20
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adagrad", "Adadelta", "ASGD")


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a parameter's optimizer state."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class UpdateRule:
    """Wraps the user's optimizer; `names` maps its parameters, by identity, to their names in the chain."""

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self.optimizer = optimizer
        self.feeds_back = isinstance(optimizer, ErrorFeedback)
        own = optimizer.optimizer if isinstance(optimizer, ErrorFeedback) else optimizer
        self.name = type(own).__name__ + " with error feedback" * self.feeds_back
        self.elementwise = type(own).__module__.startswith("torch.optim") and type(own).__name__ in _ELEMENTWISE
        self.group_of: dict[str, int] = {}
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise ModelError(
                        f"group {index} of the optimizer has a parameter of shape {tuple(parameter.shape)} that the "
                        "model has not; make the optimizer from model.parameters() of the model that is trained"
                    )
                self.group_of[names[id(parameter)]] = index
        self.scalars: dict[str, dict[str, Any]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self.host_keys: set[str] = set()  # of state that stays with the processor, as a count of steps does
        self.groups: list[dict[str, Any]] | None = None  # settings to use instead of the optimizer's own

    def state_tensors(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[StateTensor, ...]:
        """The state that one step leaves for a parameter of this shape, found by a step on a stand-in."""
        state: dict[str, Any] = {}
        for device in ("meta", "cpu"):
            leaf = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
            leaf.grad = torch.zeros_like(leaf)
            try:
                self._run(name, [leaf], [state])
            except Exception as error:
                # Most optimizers have made their state by the time they look at a value.
                if not state and (device == "cpu" or leaf.numel() * dtype.itemsize > _SMALL_BYTES):
                    raise ModelError(
                        f"cannot tell the state of {self.name} for {name!r} beforehand: its step "
                        f"failed on the {device} device with {type(error).__name__}: {error}"
                    ) from error
            if state:
                break
        found = [(key, value) for key, value in state.items() if isinstance(value, Tensor)]
        self.host_keys |= {key for key, value in found if device == "meta" and not value.is_meta}
        return tuple(StateTensor(key, tuple(value.shape), value.dtype) for key, value in found)

    def update(self, name: str, parameter: Tensor, grad: Tensor, state: Mapping[str, Tensor], fresh: bool) -> None:
        """One optimizer step in place; `fresh` if the state's memory holds nothing yet."""
        if name not in self.group_of:
            return
        parts = tuple(self._slices(parameter, state))
        for batch in [(part,) for part in parts] if fresh else [parts]:  # fresh state is made beside its place
            self._update_slices(name, parameter, grad, state, fresh, batch, batch[-1] is parts[-1])

    def _update_slices(
        self,
        name: str,
        parameter: Tensor,
        grad: Tensor,
        state: Mapping[str, Tensor],
        fresh: bool,
        parts: tuple[slice | None, ...],
        last: bool,
    ) -> None:
        scalars = self.scalars.get(name, {})
        leaves, after = [], []
        for part in parts:
            leaves.append(_cut(parameter, part, parameter.shape).detach().requires_grad_())
            leaves[-1].grad = _cut(grad, part, parameter.shape)
            after.append({} if fresh else self._state(state, part, parameter) | scalars)
        self._run_beside(name, leaves, after)
        with torch.no_grad():
            for part, found in zip(parts, after, strict=True):
                self._keep(name, found, state, part, parameter.shape, last and part is parts[-1])

    def _state(self, state: Mapping[str, Tensor], part: slice | None, parameter: Tensor) -> dict[str, Any]:
        """What the optimizer finds; some of it not on the parameter's device."""
        found = {key: _cut(tensor, part, parameter.shape) for key, tensor in state.items()}
        return {key: tensor.cpu() if key in self.host_keys else tensor for key, tensor in found.items()}

    def _slices(self, parameter: Tensor, state: Mapping[str, Tensor]) -> Iterator[slice | None]:
        count, size = parameter.numel(), SLICE_ELEMENTS if parameter.is_cpu else DEVICE_SLICE_ELEMENTS
        fits = all(tensor.shape == parameter.shape or tensor.numel() == 1 for tensor in state.values())
        if not self.elementwise or not fits or count <= size:
            yield None
            return
        for start in range(0, count, size):
            yield slice(start, min(start + size, count))

    def _run_beside(self, name: str, leaves: list[Tensor], states: list[dict[str, Any]]) -> None:
        """Slices are dealt to threads that each work alone: sharing every small operation would mean to wait for one
        another all the time, the longer the busier the machine is."""
        count = min(torch.get_num_threads(), len(leaves))
        if count == 1 or not leaves[0].is_cpu:
            self._run(name, leaves, states)
            return
        if self._threads is None:
            self._threads = lone_threads()
        shares = [(leaves[start::count], states[start::count]) for start in range(count)]
        for done in [self._threads.submit(self._run, name, *share) for share in shares]:
            done.result()

    @torch.no_grad()
    def _run(self, name: str, leaves: list[Tensor], states: list[dict[str, Any]]) -> None:
        """The optimizer's own step on the slices of one parameter; `states` is what it finds and what it leaves.

        One that would work on all of them at once gets them one by one: what it needs of a slice stays in the
        processor's cache, and its temporaries are as small as the slice.
        """
        group = dict((self.groups or self.optimizer.param_groups)[self.group_of[name]])
        pairs = list(zip(leaves, states, strict=True))
        for batch in [[pair] for pair in pairs] if group.get("foreach") or self.feeds_back else [pairs]:
            group["params"] = [leaf for leaf, _ in batch]
            state_of = defaultdict(dict, {leaf: state for leaf, state in batch if state})
            shadow = shadow_of(self.optimizer, [group], state_of)
            try:
                shadow.step()
            finally:
                for leaf, state in batch:
                    state.update(shadow.state[leaf])

    def _keep(
        self,
        name: str,
        after: Mapping[str, Any],
        state: Mapping[str, Tensor],
        part: slice | None,
        shape: torch.Size,
        last: bool,
    ) -> None:
        """Put state that the step made anew into its place; what is shared by all slices only after the last."""
        scalars: dict[str, Any] = {}
        for key, value in after.items():
            if not isinstance(value, Tensor):
                scalars[key] = value
                continue
            target = state[key]
            if target.numel() == 1 and part is not None:
                if last:
                    target.copy_(value)
            else:
                view = _cut(target, part, shape)
                if view.data_ptr() != value.data_ptr():
                    view.copy_(value)
        if last and scalars:
            self.scalars[name] = scalars


def lone_threads() -> ThreadPoolExecutor:
    """As many threads as torch uses, in each of which torch uses only that one."""
    count = torch.get_num_threads()
    ready = threading.Barrier(count + 1)

    def begin() -> None:
        torch.set_num_threads(1)
        ready.wait()

    threads = ThreadPoolExecutor(count, "counterpoint update", begin)
    for _ in range(count):
        threads.submit(int)
    ready.wait()
    torch.set_num_threads(count)  # threads to come take the last number that was set
    return threads


def _cut(tensor: Tensor, part: slice | None, shape: torch.Size) -> Tensor:
    """A slice of a parameter-shaped tensor; anything else is copied, so that every slice starts from the same."""
    if part is None:
        return tensor.detach()
    if tensor.shape != shape:
        return tensor.detach().clone()
    return tensor.detach().view(-1)[part]
