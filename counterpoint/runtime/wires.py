"""torch.distributed -> messages between the memories of two devices: the only file that knows its process groups.

Gloo, between processors, matches messages of a pair and a tag in their order, and programs keep one order on both sides
of a pair. What accelerators have instead (NCCL and its like) knows no tags, and runs what is asked of one group one
after another, in the order it was asked for. There every pair of sender and receiver has a group to itself, and so have
those who sum something together: no message ever waits for one that it has nothing to do with.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from counterpoint.core.errors import ExecutionError
from counterpoint.runtime.backend import Backend
from counterpoint.runtime.rendezvous import first_line

VALUES, SUMS, NORMS = 1, 2, 3
Pieces = Sequence[tuple[Tensor, int]]


class Wires(Protocol):
    """Messages of this device; tensors are flat."""

    def send(self, tensor: Tensor, peer: int) -> None:
        """Returns when the tensor's memory may be used again, on an accelerator by the calling lane."""

    def receive(self, tensor: Tensor, peer: int) -> dist.Work: ...

    def exchange(self, out: Pieces, into: Pieces, peers: Sequence[int]) -> None:
        """Send and receive at once, among peers that all do the same; empty pieces do not travel."""

    def cut(self) -> None:
        """A peer is lost: whoever waits for it on the device itself is let go."""


class Tagged:
    """Between processors, through gloo."""

    def send(self, tensor: Tensor, peer: int) -> None:
        post_send(tensor, peer, VALUES).wait()

    def receive(self, tensor: Tensor, peer: int) -> dist.Work:
        return post_receive(tensor, peer, VALUES)

    def exchange(self, out: Pieces, into: Pieces, peers: Sequence[int]) -> None:
        exchange(out, into, SUMS)

    def cut(self) -> None:
        """Gloo ends by itself, or is left behind."""


class Grouped:
    """Between accelerators, through a group for each pair of `senders` and for each of the `reducers`.

    All processes make all groups, in one order, and those of each try it out: what does not work is known at the start.
    """

    def __init__(
        self,
        backend: Backend,
        rank: int,
        senders: Sequence[tuple[int, int]],
        reducers: Sequence[tuple[int, ...]],
    ) -> None:
        # A lost peer is this project's own business: torch would end the process before anybody has said what is lost.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        self._backend, self._rank = backend, rank
        kind = dist.get_default_backend_for_device(backend.device)
        self._pairs = {pair: _group(pair, kind) for pair in senders}
        self._sums = {peers: _group(peers, kind) for peers in reducers}
        with _trying(backend.device, kind):
            self._try_out()

    def send(self, tensor: Tensor, peer: int) -> None:
        _begun(dist.isend(tensor, peer, group=self._pairs[self._rank, peer])).wait()

    def receive(self, tensor: Tensor, peer: int) -> dist.Work:
        return _begun(dist.irecv(tensor, peer, group=self._pairs[peer, self._rank]))

    def exchange(self, out: Pieces, into: Pieces, peers: Sequence[int]) -> None:
        group = self._sums[tuple(peers)]
        asked = [dist.P2POp(dist.isend, as_bytes(tensor), peer, group) for tensor, peer in out if tensor.numel()]
        asked += [dist.P2POp(dist.irecv, as_bytes(tensor), peer, group) for tensor, peer in into if tensor.numel()]
        for work in dist.batch_isend_irecv(asked) if asked else ():
            work.wait()

    def cut(self) -> None:
        for group in (*self._pairs.values(), *self._sums.values()):
            with contextlib.suppress(Exception):  # not every kind of group can be ended before its time
                group.abort()

    def _try_out(self) -> None:
        """A byte through every group that this device is in."""
        content = torch.zeros(1, dtype=torch.uint8, device=self._backend.device)
        for sender, receiver in self._pairs:
            if self._rank == sender:
                self.send(content, receiver)
            elif self._rank == receiver:
                self.receive(content, sender).wait()
        for peers in self._sums:
            others = [peer for peer in peers if peer != self._rank]
            if self._rank in peers:
                room = [torch.empty_like(content) for _ in others]
                self.exchange([(content, peer) for peer in others], list(zip(room, others, strict=True)), peers)
        self._backend.finish()


def wires_of(
    backend: Backend, rank: int, senders: Sequence[tuple[int, int]], reducers: Sequence[tuple[int, ...]]
) -> Wires:
    """Every process of a run must ask for them, with the same senders and reducers."""
    join_words()
    return Tagged() if backend.is_process else Grouped(backend, rank, senders, reducers)


def exchange(out: Pieces, into: Pieces, tag: int) -> None:
    """Send and receive at once between processors; empty pieces do not travel."""
    works = [post_receive(as_bytes(tensor), peer, tag) for tensor, peer in into if tensor.numel()]
    works += [post_send(as_bytes(tensor), peer, tag) for tensor, peer in out if tensor.numel()]
    for work in works:
        work.wait()


def post_send(tensor: Tensor, peer: int, tag: int) -> dist.Work:
    return _begun(dist.isend(tensor, peer, group=_words(), tag=tag))


def post_receive(tensor: Tensor, peer: int, tag: int) -> dist.Work:
    return _begun(dist.irecv(tensor, peer, group=_words(), tag=tag))


def as_bytes(tensor: Tensor) -> Tensor:
    """Every dtype moves alike."""
    return tensor.detach().view(torch.uint8)


_WORDS: list[dist.ProcessGroup | None] = []


def join_words() -> None:
    """Find the group for messages between processors: the one there is, or one beside it if that knows only devices."""
    if not _WORDS:
        backends = dist.get_backend_config()
        _WORDS.append(None if "gloo" in backends else dist.new_group(backend="gloo"))


def _words() -> dist.ProcessGroup | None:
    return _WORDS[0] if _WORDS else None


def _group(devices: Sequence[int], kind: str) -> dist.ProcessGroup:
    """Who is not among the devices gets a stand-in for it."""
    group: dist.ProcessGroup = dist.new_group(list(devices), backend=kind)
    return group


def _begun(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


@contextlib.contextmanager
def _trying(device: torch.device, kind: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ExecutionError(
            f"{device} does not reach its peers through {kind}: {first_line(error)}; set NCCL_DEBUG=INFO to see why"
        ) from error
