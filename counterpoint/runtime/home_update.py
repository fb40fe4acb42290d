"""A layer's finished gradient at home -> its new weights and optimizer state at home, a slice at a time.

Only a few slices of each tensor are in memory at once: one is read while another is updated and a third written. So
a layer can be trained whose weights, gradient and state do not fit together. The optimizer must work element by
element; the bits are those of an update at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from counterpoint.core.homes import UPDATE_STAGING_BYTES
from counterpoint.core.program import narrows
from counterpoint.core.task import Update, grad, old, weight
from counterpoint.runtime.disk_extents import BLOCK_BYTES, round_to_blocks
from counterpoint.runtime.disk_transfer import Transfer
from counterpoint.runtime.frame import Flat, Slot
from counterpoint.runtime.memory import Region
from counterpoint.runtime.optimizer import UpdateRule
from counterpoint.runtime.store import Store
from counterpoint.runtime.tiers import Home

_TURNS = 3  # one slice being read, one updated, one written


@dataclass(frozen=True, slots=True)
class _Source:
    """A tensor at home; what becomes of it goes to `target`, if anywhere. What is not read comes as it is."""

    disk: Home
    key: str
    slot: Slot
    target: str = ""
    reads: bool = True


class HomeUpdate:
    """Updates layers at home through its own staging memory, which it has from the start."""

    def __init__(self, store: Store, rule: UpdateRule) -> None:
        if not rule.elementwise:
            raise ValueError(f"updates at home need an optimizer that works element by element, not {rule.name}")
        self.store, self.rule = store, rule
        self._region = Region(UPDATE_STAGING_BYTES)

    def update(self, layer: int, task: Update, started: set[str], factor: Tensor | None) -> None:
        """`started` are the parameters that a gradient has reached; `factor` clips their gradients."""
        factor = None if factor is None else factor.cpu()
        self._keep_old(layer, task)
        fresh = layer in self.store.fresh_states
        for slot in self.store.frame.weights[layer].slots:
            states = _states(self.store.states[layer], slot.name)
            weights = self._weights(layer, task, slot)
            if slot.name in started and slot.name in self.rule.group_of:
                gradient = _Source(self.store.passing, self.store.key(grad(layer, task.step)), slot)
                self._update_parameter(layer, [weights, gradient], states, fresh, factor)
            else:
                self._copy(weights)
                for state_slot in states.values() if fresh else ():
                    self._write_zeros(self.store.names.state(layer), state_slot)
        self.store.fresh_states.discard(layer)
        self.store.announce(weight(layer, task.step + 1))

    def keep(self, layer: int, task: Update) -> None:
        """The next version is as this one."""
        self._keep_old(layer, task)
        for slot in self.store.frame.weights[layer].slots:
            self._copy(self._weights(layer, task, slot))
        self.store.announce(weight(layer, task.step + 1))

    def _weights(self, layer: int, task: Update, slot: Slot) -> _Source:
        """With two versions the next one has a place of its own."""
        key, target = (self.store.names.weight(layer, number) for number in (task.step, task.step + 1))
        return _Source(self.store.disk, key, slot, target)

    def _keep_old(self, layer: int, task: Update) -> None:
        """Leave a narrow copy of the weights behind, if the layer narrows."""
        if not narrows(task, layer, self.store.frame.outline):
            return
        wide = {slot.name: slot for slot in self.store.frame.weights[layer].slots}
        key = self.store.names.old(layer)
        for slot in self.store.frame.olds[layer].slots:
            before = _Source(self.store.disk, self.store.names.weight(layer, task.step), wide[slot.name])
            for pieces in self._slices([before, _Source(self.store.disk, key, slot, key, reads=False)]):
                pieces[1].copy_(pieces[0])
        self.store.announce(old(layer, task.step))

    def _copy(self, source: _Source) -> None:
        if source.target != source.key:
            for _ in self._slices([source]):
                pass

    def _slices(self, sources: list[_Source]) -> Iterator[list[Tensor]]:
        read = sum(source.slot.num_bytes for source in sources if source.reads)
        written = sum(source.slot.num_bytes for source in sources if source.target)
        self.store.count(loaded=read, evicted=written)
        return _slices(sources, self._region)

    def _update_parameter(
        self,
        layer: int,
        sources: list[_Source],
        states: dict[str, Slot],
        fresh: bool,
        factor: Tensor | None,
    ) -> None:
        slot, home = sources[0].slot, self.store.names.state(layer)
        like = {key: s for key, s in states.items() if s.shape == slot.shape}
        alone = {key: s for key, s in states.items() if s.shape != slot.shape}
        sources = [*sources, *(_Source(self.store.disk, home, s, home, not fresh) for s in like.values())]
        before = dict(self.rule.scalars.get(slot.name, {}))
        singles = {key: self._read_single(home, s, fresh) for key, s in alone.items()}
        after = singles
        for pieces in self._slices(sources):
            if factor is not None:
                pieces[1].mul_(factor)
            if before:  # plain numbers of the state advance once, not with every slice
                self.rule.scalars[slot.name] = dict(before)
            after = {key: tensor.clone() for key, tensor in singles.items()}
            state = dict(zip(like, pieces[2:], strict=True)) | after
            self.rule.update(slot.name, pieces[0], pieces[1], state, fresh)
        for key, state_slot in alone.items():
            self._write_single(home, state_slot, after[key])

    def _read_single(self, key: str, slot: Slot, fresh: bool) -> Tensor:
        if fresh:
            return torch.zeros(slot.shape, dtype=slot.dtype)
        return self.store.read_place(key, slot.offset_bytes, slot.shape, slot.dtype)

    def _write_single(self, key: str, slot: Slot, content: Tensor) -> None:
        self._region.tensor(slot.dtype, slot.shape).copy_(content)
        self.store.disk.write(key, self._region.view(0, round_to_blocks(slot.num_bytes)), slot.offset_bytes).wait()

    def _write_zeros(self, key: str, slot: Slot) -> None:
        size = min(round_to_blocks(slot.num_bytes), self._region.num_bytes)
        self._region.tensor(torch.uint8, (size,)).zero_()
        for done in range(0, slot.num_bytes, max(size, 1)):
            part = min(size, round_to_blocks(slot.num_bytes - done))
            self.store.disk.write(key, self._region.view(0, part), slot.offset_bytes + done).wait()


def _states(flat: Flat, parameter: str) -> dict[str, Slot]:
    found = {}
    for slot in flat.slots:
        name, _, key = slot.name.rpartition("\0")
        if name == parameter:
            found[key] = slot
    return found


def _slices(sources: list[_Source], region: Region) -> Iterator[list[Tensor]]:
    """Flat slices of all sources in step, as tensors that are written back when the next slice is asked for."""
    count = sources[0].slot.num_bytes // sources[0].slot.dtype.itemsize
    widest = max(source.slot.dtype.itemsize for source in sources)
    stretch = region.num_bytes // (_TURNS * len(sources)) // BLOCK_BYTES * BLOCK_BYTES
    size = stretch // widest // BLOCK_BYTES * BLOCK_BYTES  # slices of every width begin at a block
    starts = range(0, count, size)
    turns = [_Turn(sources, region, turn * len(sources) * stretch, stretch) for turn in range(_TURNS)]
    turns[0].read(0, min(size, count))
    for number, start in enumerate(starts):
        turn = turns[number % _TURNS]
        if start + size < count:
            turns[(number + 1) % _TURNS].read(start + size, min(size, count - start - size))
        yield turn.tensors()
        turn.write()
    for turn in turns:
        turn.wait()


class _Turn:
    """One slice of each source in staging memory: read, lent, written back."""

    def __init__(self, sources: list[_Source], region: Region, offset: int, stretch: int) -> None:
        self.sources, self.region = sources, region
        self.offsets = [offset + index * stretch for index in range(len(sources))]
        self.start = self.count = 0
        self.pending: list[Transfer] = []

    def read(self, start: int, count: int) -> None:
        self.wait()
        self.start, self.count = start, count
        for index, source in enumerate(self.sources):
            if source.reads:
                self._move(source.disk.read, source.key, source.slot, self.offsets[index])

    def tensors(self) -> list[Tensor]:
        self.wait()
        pairs = zip(self.sources, self.offsets, strict=True)
        return [self.region.tensor(source.slot.dtype, (self.count,), offset) for source, offset in pairs]

    def write(self) -> None:
        for source, offset in zip(self.sources, self.offsets, strict=True):
            if source.target:
                self._move(source.disk.write, source.target, source.slot, offset)

    def wait(self) -> None:
        for transfer in self.pending:
            transfer.wait()
        self.pending.clear()

    def _move(self, move: Callable[..., Transfer], key: str, slot: Slot, offset: int) -> None:
        itemsize = slot.dtype.itemsize
        view = self.region.view(offset, round_to_blocks(self.count * itemsize))
        self.pending.append(move(key, view, slot.offset_bytes + self.start * itemsize))
