"""Buffers into messages between devices, and back.

What a value looks like is said once, before its first message. Sums are made in the order of the devices by whoever
owns a slice of them, and handed out as they are: every device has the same bits. What is large goes from one device's
memory to the other's, as `runtime/wires.py` knows how; what is said about it goes through the processors.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.core.errors import ExecutionError
from counterpoint.runtime.backend import CPU, Backend
from counterpoint.runtime.strides import Form, spanned
from counterpoint.runtime.wires import NORMS, SUMS, Tagged, Wires, as_bytes, exchange, post_receive, post_send

SLICE_BYTES = 4 << 20
_TALK = Tagged()
_LOSSES, _BUFFERS = 4, 5
_MAX_DIMENSIONS = 12
_KEPT = 8
_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


class SendCounters:
    """Bytes of values and sums that left and came; what is said about them is not counted."""

    def __init__(self) -> None:
        self.sent_bytes = self.received_bytes = self.reduced_bytes = 0
        self._lock = threading.Lock()

    def count(self, sent: int = 0, received: int = 0, reduced: int = 0) -> None:
        with self._lock:
            self.sent_bytes += sent
            self.received_bytes += received
            self.reduced_bytes += reduced


class PeerGone(RuntimeError):
    """A peer does not take what is handed out to it."""

    def __init__(self, peer: int, text: str) -> None:
        super().__init__(text)
        self.peer = peer


class Transport:
    """Messages of one device. Each method may block; lanes call them, never two of one lane and peer at once."""

    def __init__(self, device: int, num_devices: int, backend: Backend = CPU, wires: Wires = _TALK) -> None:
        self.device, self.num_devices, self.backend = device, num_devices, backend
        self.wires = wires
        self.counters = SendCounters()
        self._sent: dict[tuple[int, object], Form | None] = {}
        self._known: dict[tuple[int, object], Form | None] = {}
        self._scratch: list[Tensor] = []
        self._pending: list[tuple[Tensor, dict[int, dist.Work]]] = []

    def forget_forms(self) -> None:
        """Values may look different from here on; on all devices at once."""
        self._sent.clear()
        self._known.clear()

    # ---- values

    def send(self, what: object, tensor: Tensor | None, peer: int) -> None:
        """`what` is the kind and owner of the value; None if it has none here."""
        form = None if tensor is None else Form.of(tensor)
        key = (peer, what)
        if key not in self._sent:
            _TALK.send(_header(form), peer)
            self._sent[key] = form
        elif self._sent[key] != form:
            raise ExecutionError(f"{what} was {self._sent[key]} and is {form} here; its layout must not change")
        if tensor is not None and form is not None and form.num_elements:
            self.wires.send(as_bytes(spanned(tensor)), peer)
            self.counters.count(sent=form.num_bytes)

    def post(self, what: object, peer: int) -> Callable[[], Tensor | None]:
        """Make room and ask for a value; the result waits for it and gives it."""
        key = (peer, what)
        if key not in self._known:
            header = torch.empty(2 + 2 * _MAX_DIMENSIONS, dtype=torch.int64)
            _TALK.receive(header, peer).wait()
            self._known[key] = _form(header)
        form = self._known[key]
        if form is None:
            return lambda: None
        flat = self.backend.empty(form.num_elements, form.dtype)
        work = self.wires.receive(as_bytes(flat), peer) if form.num_elements else None

        def arrived() -> Tensor:
            if work is not None:
                work.wait()
                self.backend.finish()
            self.counters.count(received=form.num_bytes)
            return torch.as_strided(flat, form.shape, form.stride)

        return arrived

    # ---- sums

    def reduce(self, flats: Sequence[Tensor], started: Tensor, peers: Sequence[int]) -> Tensor:
        """Sum flat tensors over peers in place; `started` marks what has content here, the result what has anywhere."""
        others = [peer for peer in peers if peer != self.device]
        masks = {peer: torch.empty_like(started) for peer in others}
        exchange([(started, peer) for peer in others], [(masks[peer], peer) for peer in others], SUMS)
        union = started.clone()
        for mask in masks.values():
            union |= mask
        for flat in flats:
            step = max(len(peers), SLICE_BYTES // flat.element_size())
            for begin in range(0, flat.numel(), step):
                self._reduce_slice(flat[begin : begin + step], peers, others)
            self.counters.count(reduced=flat.numel() * flat.element_size())
        return union

    def _reduce_slice(self, flat: Tensor, peers: Sequence[int], others: Sequence[int]) -> None:
        """Each peer sums a part of the slice and gives it to the others."""
        parts = dict(zip(peers, flat.tensor_split(len(peers)), strict=True))
        own = parts[self.device]
        found = dict(zip(others, self._rooms(len(others), own), strict=True))
        self.wires.exchange([(parts[peer], peer) for peer in others], [(found[peer], peer) for peer in others], peers)
        found[self.device] = own
        total = found[peers[0]]
        for peer in peers[1:]:
            total.add_(found[peer])
        if total is not own:
            own.copy_(total)
        self.wires.exchange([(own, peer) for peer in others], [(parts[peer], peer) for peer in others], peers)

    def _rooms(self, count: int, like: Tensor) -> list[Tensor]:
        """Scratch memory for parts, kept from one sum to the next."""
        num_bytes = like.numel() * like.element_size()
        while len(self._scratch) < count:
            self._scratch.append(self.backend.empty(0, torch.uint8))
        for index in range(count):
            if self._scratch[index].numel() < num_bytes:
                self.backend.finish()  # what is replaced may still be read
                self._scratch[index] = self.backend.empty(num_bytes, torch.uint8)
        return [room[:num_bytes].view(like.dtype) for room in self._scratch[:count]]

    def exchange_norms(self, norms: Tensor, peers: Sequence[int]) -> dict[int, Tensor]:
        """Every peer's vector, this device's included."""
        others = [peer for peer in peers if peer != self.device]
        found = {peer: torch.empty_like(norms) for peer in others}
        exchange([(norms, peer) for peer in others], [(found[peer], peer) for peer in others], NORMS)
        return {**found, self.device: norms}

    # ---- what is handed out without waiting for it

    def spread_losses(self, losses: Tensor) -> None:
        """A step's losses, to everybody."""
        self._spread(losses, [peer for peer in range(self.num_devices) if peer != self.device], _LOSSES)

    def spread(self, message: Tensor, peers: Sequence[int]) -> None:
        """Bytes, to some."""
        self._spread(message, peers, _BUFFERS)

    def hear(self, num_bytes: int, peer: int) -> Tensor:
        """The next bytes that a peer has spread."""
        message = torch.empty(num_bytes, dtype=torch.uint8)
        post_receive(message, peer, _BUFFERS).wait()
        return message

    def _spread(self, message: Tensor, peers: Sequence[int], tag: int) -> None:
        if len(self._pending) > _KEPT:  # what was sent has long arrived when so much more has been
            for peer, work in self._pending.pop(0)[1].items():
                with _naming(peer):
                    work.wait()
        sent: dict[int, dist.Work] = {}
        for peer in peers:
            with _naming(peer):
                sent[peer] = post_send(message, peer, tag)
        self._pending.append((message, sent))

    def hear_losses(self, count: int, peer: int) -> Tensor:
        """The next step's losses of a peer that computes `count` of them."""
        losses = torch.empty(count, dtype=torch.float64)
        post_receive(losses, peer, _LOSSES).wait()
        return losses


@contextlib.contextmanager
def _naming(peer: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerGone(peer, str(error)) from error


def _header(form: Form | None) -> Tensor:
    header = torch.zeros(2 + 2 * _MAX_DIMENSIONS, dtype=torch.int64)
    if form is None:
        header[0] = -1
        return header
    if len(form.shape) > _MAX_DIMENSIONS:
        raise ExecutionError(f"a value of {len(form.shape)} dimensions cannot be sent; {_MAX_DIMENSIONS} are the most")
    numbers = [_DTYPES.index(form.dtype), len(form.shape), *form.shape, *form.stride]
    header[: len(numbers)] = torch.tensor(numbers)
    return header


def _form(header: Tensor) -> Form | None:
    kind, count, *rest = header.tolist()
    if kind < 0:
        return None
    return Form(_DTYPES[kind], tuple(rest[:count]), tuple(rest[count : 2 * count]))
