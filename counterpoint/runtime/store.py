"""Buffers into memory: which buffer is on the device and which at home, and the transfers between the two.

Weights, constants, gradients and states are flat regions of the pool, one per layer. Activations and saved tensors are
born wherever torch makes them and come back from home as regions.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from counterpoint.core.task import PER_LAYER, Buffer
from counterpoint.runtime.backend import CPU, AnyPool, AnyRegion, Backend
from counterpoint.runtime.disk_extents import round_to_blocks
from counterpoint.runtime.frame import Flat, Frame
from counterpoint.runtime.home_names import HomeNames
from counterpoint.runtime.memory import Region
from counterpoint.runtime.saved import SavedTensors
from counterpoint.runtime.strides import Form, restrided, spanned
from counterpoint.runtime.tiers import Home
from counterpoint.runtime.versions import Versions

STAGING_BYTES = 8 << 20
VERSIONED_KINDS = frozenset(("weight", "old"))


@dataclass(slots=True)
class _Held:
    """A value on the device: the tensor, and the region it lies in after it came back from home."""

    tensor: Tensor
    region: AnyRegion | None = None


@dataclass(slots=True)
class SwapCounters:
    """Bytes that crossed between device and home."""

    loaded_bytes: int = 0
    evicted_bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Store:
    """The device's buffers. What lasts lies on `disk`, which devices of a server may share; what passes on `passing`.

    `versions`, where devices share a home, says which version of a weight is there; `stopped` whether nobody will bring
    a newer one any more.
    """

    def __init__(
        self,
        frame: Frame,
        states: tuple[Flat, ...],
        disk: Home,
        pool: AnyPool,
        num_microbatches: int,
        names: HomeNames | None = None,
        passing: Home | None = None,
        versions: Versions | None = None,
        backend: Backend = CPU,
    ) -> None:
        self.backend = backend
        self.frame, self.states, self.disk, self.pool = frame, states, disk, pool
        self.num_microbatches = num_microbatches
        self.names, self.passing, self.versions = names or HomeNames(), passing or disk, versions
        self.stopped: Callable[[], bool] = lambda: False
        self.regions: dict[Buffer, AnyRegion] = {}
        self.values: dict[Buffer, _Held] = {}
        self.forms: dict[Buffer, Form] = {}
        self.saved: dict[Buffer, SavedTensors] = {}
        self.saved_regions: dict[Buffer, AnyRegion] = {}
        self.lent: set[int] = set()
        self.fresh_states = set(range(frame.num_layers))
        self.passing_keys: dict[str, int] = {}
        self.counters = SwapCounters()
        self._staging = (backend.staging(STAGING_BYTES), backend.staging(STAGING_BYTES))

    def flat(self, buffer: Buffer) -> Flat:
        match buffer.kind:
            case "weight" | "grad":
                return self.frame.weights[buffer.owner]
            case "old":
                return self.frame.olds[buffer.owner]
            case "constant":
                return self.frame.constants[buffer.owner]
            case _:
                return self.states[buffer.owner]

    def tensors(self, buffer: Buffer) -> dict[str, Tensor]:
        """The tensors of a flat buffer on the device, by name."""
        region = self.regions[buffer]
        return {s.name: region.tensor(s.dtype, s.shape, s.offset_bytes) for s in self.flat(buffer).slots}

    def whole(self, buffer: Buffer, dtype: torch.dtype) -> Tensor:
        """All of a flat buffer as one tensor, gaps between its slots included."""
        return self.regions[buffer].tensor(dtype, (self.flat(buffer).num_bytes // dtype.itemsize,))

    def make(self, buffer: Buffer) -> bool:
        """Give a flat buffer a region unless it has one; whether it was made."""
        if buffer in self.regions:
            return False
        self.regions[buffer] = self.pool.allocate(self.flat(buffer).num_bytes)
        return True

    def rename(self, old: Buffer, new: Buffer) -> None:
        self.regions[new] = self.regions.pop(old)

    def put(self, buffer: Buffer, tensor: Tensor) -> None:
        self.values[buffer] = _Held(tensor)

    def take(self, buffer: Buffer, tensor: Tensor) -> None:
        """A value that came from another device; gradients are added to what is here."""
        if buffer.kind == "activation_grad" and buffer in self.values:
            total = tensor + self.values[buffer].tensor
            self.drop(buffer)  # the sum is made then; until here its parts must live
            tensor = total
        self.put(buffer, tensor)

    def get(self, buffer: Buffer) -> Tensor:
        return self.values[buffer].tensor

    def is_lent(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in a region that a value came back in, which goes when the value is dropped."""
        return tensor.untyped_storage().data_ptr() in self.lent

    def stow(self, buffer: Buffer) -> None:
        """Move what autograd keeps of a layer from where torch put it into the pool."""
        region = self.pool.allocate(self.saved[buffer].num_bytes)
        self.saved[buffer].move_into(region)
        self.saved_regions[buffer] = region

    # ---- transfers, each called by its own lane

    def load(self, buffer: Buffer, landed: Callable[[Buffer], None] = lambda buffer: None) -> None:
        """Bring a buffer from home; `landed` is told as soon as its memory is there."""
        region = self.pool.allocate(self._home_bytes(buffer))
        landed(buffer)
        if buffer.kind in PER_LAYER:
            self._load_flat(buffer, region)
        elif buffer.kind == "saved":
            self._load_saved(buffer, region)
        else:
            self._load_value(buffer, region)

    def _home_bytes(self, buffer: Buffer) -> int:
        if buffer.kind in PER_LAYER:
            return self.flat(buffer).num_bytes
        return self.saved[buffer].num_bytes if buffer.kind == "saved" else round_to_blocks(self.forms[buffer].num_bytes)

    def evict(self, buffer: Buffer) -> None:
        if buffer.kind in PER_LAYER:
            self._evict_flat(buffer)
        elif buffer.kind == "saved":
            self._evict_saved(buffer)
        else:
            self._evict_value(buffer)

    def _evict_flat(self, buffer: Buffer) -> None:
        key, num_bytes = self.key(buffer), self.flat(buffer).num_bytes
        if buffer.kind == "grad":
            self._reserve(key, num_bytes)
        if num_bytes:  # an optimizer may keep no state
            disk = self.passing if buffer.kind == "grad" else self.disk
            self.backend.write(disk, key, self.regions[buffer])
            self.count(evicted=num_bytes)
            self.announce(buffer)

    def _evict_saved(self, buffer: Buffer) -> None:
        key, region, pieces = self.key(buffer), self.saved_regions.get(buffer), self.saved[buffer].storages
        if region is None:
            assert pieces is not None
            self._write_pieces(key, pieces)
        else:
            self._reserve(key, region.num_bytes)
            self.backend.write(self.passing, key, region)
            self.count(evicted=region.num_bytes)

    def announce(self, buffer: Buffer) -> None:
        """Tell the devices that share this home that a buffer is there."""
        if self.versions is not None and buffer.kind in VERSIONED_KINDS:
            self.versions.put(self.key(buffer), self.names.base + buffer.number)

    def drop(self, buffer: Buffer) -> None:
        if buffer.kind in PER_LAYER:
            self._free(self.regions.pop(buffer))
        elif buffer.kind == "saved":
            if buffer in self.saved:
                self.saved[buffer].drop()
            self._free(self.saved_regions.pop(buffer, None))
        elif buffer in self.values:
            self.backend.finish()  # a computation that adds to a value drops it while it may still be read
            held = self.values.pop(buffer)
            region = held.region
            del held
            if region is not None:
                self.lent.discard(region.address)
            self._free(region)

    def forget_passing(self) -> None:
        """Nothing that was only passing is needed any more: give its room at home back."""
        for key in self.passing_keys:
            self.passing.release(key)
        self.passing_keys.clear()
        self.forms.clear()
        self.saved.clear()

    def key(self, buffer: Buffer) -> str:
        """A buffer's name at home; what passes reuses its room two steps later."""
        kind, owner, number = buffer
        if kind in ("weight", "old", "constant", "state"):
            return self.names.lasting(buffer)
        return f"{kind} {owner} {number % (2 if kind == 'grad' else 2 * self.num_microbatches)}"

    def _load_flat(self, buffer: Buffer, region: AnyRegion) -> None:
        fresh = buffer.kind == "state" and buffer.owner in self.fresh_states
        if self.flat(buffer).num_bytes and not fresh:
            key = self.key(buffer)
            if self.versions is not None and buffer.kind in VERSIONED_KINDS:
                self.versions.wait(key, self.names.base + buffer.number, self.stopped)
            disk = self.passing if buffer.kind == "grad" else self.disk
            self.backend.read(disk, key, region)
            self.count(loaded=region.num_bytes)
        self.regions[buffer] = region

    def _load_saved(self, buffer: Buffer, region: AnyRegion) -> None:
        self._read_back(buffer, region)
        self.saved[buffer].lie_in(region)
        self.saved_regions[buffer] = region

    def _load_value(self, buffer: Buffer, region: AnyRegion) -> None:
        form = self.forms[buffer]
        self._read_back(buffer, region)
        storage = region.tensor(torch.uint8, (form.num_bytes,))
        self.lent.add(region.address)
        self.values[buffer] = _Held(restrided(storage, form), region)

    def _read_back(self, buffer: Buffer, region: AnyRegion) -> None:
        self.backend.read(self.passing, self.key(buffer), region)
        self.count(loaded=region.num_bytes)

    def _evict_value(self, buffer: Buffer) -> None:
        """Keep the strides: kernels may round differently on another layout."""
        tensor = self.values[buffer].tensor
        self.forms[buffer] = Form.of(tensor)
        self._write_pieces(self.key(buffer), [spanned(tensor).view(torch.uint8)])

    def _reserve(self, key: str, num_bytes: int) -> None:
        """An extent of at least this size; extents of a key keep their size from step to step."""
        if self.passing_keys.get(key, -1) >= num_bytes:
            return
        if key in self.passing_keys:
            self.passing.release(key)
        self.passing.add(key, num_bytes)
        self.passing_keys[key] = num_bytes

    def _write_pieces(self, key: str, pieces: Iterable[Tensor]) -> None:
        """Copy byte tensors home, each from a whole block on."""
        pieces = list(pieces)
        total = sum(round_to_blocks(piece.numel()) for piece in pieces)
        self._reserve(key, total)
        mapped = self.passing.mapped(key)
        if mapped is None:
            self._write_staged(key, pieces)
        else:
            offset = 0
            for piece in pieces:
                self.backend.copy_home(piece, 0, mapped, offset, piece.numel())
                offset += round_to_blocks(piece.numel())
        self.count(evicted=total)

    def _write_staged(self, key: str, pieces: Iterable[Tensor]) -> None:
        """Through two staging regions, one being filled while the other is written."""
        pending: list[object] = [None, None]
        turn, filled, written = 0, 0, 0
        for piece in pieces:
            done = 0
            while done < piece.numel():
                part = min(piece.numel() - done, STAGING_BYTES - filled)
                self.backend.copy_home(piece, done, self._staging[turn], filled, part)
                done, filled = done + part, round_to_blocks(filled + part)
                if filled >= STAGING_BYTES:
                    pending[turn] = self.passing.write(key, self._staging[turn].view(0, filled), written)
                    written, filled, turn = written + filled, 0, 1 - turn
                    if pending[turn] is not None:
                        pending[turn].wait()  # type: ignore[attr-defined]
        if filled:
            pending[turn] = self.passing.write(key, self._staging[turn].view(0, filled), written)
        for transfer in pending:
            if transfer is not None:
                transfer.wait()  # type: ignore[attr-defined]

    def _free(self, region: AnyRegion | None) -> None:
        if region is not None:
            self.pool.free(region)  # type: ignore[arg-type]  # it is of this pool

    def count(self, loaded: int = 0, evicted: int = 0) -> None:
        with self.counters.lock:
            self.counters.loaded_bytes += loaded
            self.counters.evicted_bytes += evicted

    def write_place(self, key: str, offset: int, source: Tensor) -> None:
        """Put bytes into a key's extent at home, from a whole block on."""
        staging = self._staging[0]
        for done in range(0, source.numel(), STAGING_BYTES):
            part = min(source.numel() - done, STAGING_BYTES)
            self.backend.copy_home(source, done, staging, 0, part)
            self.disk.write(key, staging.view(0, round_to_blocks(part)), offset + done).wait()

    def read_place(self, key: str, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A copy of a tensor that lies in a key's extent at home, from a whole block on."""
        region = Region(max(prod(shape) * dtype.itemsize, 1))
        self.disk.read(key, region, offset).wait()
        return region.tensor(dtype, shape).clone()
