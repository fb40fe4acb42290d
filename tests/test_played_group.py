"""The played device's process group: as strict about order as NCCL, and no crash when a peer is lost."""

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.played import compiler
from tests.played.child import on_ranks
from tests.played.late import SIZE, copies_are_late, pinned

pytestmark = pytest.mark.skipif(compiler() is None, reason="the played device needs a C++ compiler")


def exchange(rank: int) -> None:
    messages_match_in_order(rank)
    a_batch_goes_both_ways(rank)
    operations_follow_the_stream(rank)
    collectives_collect(rank)
    a_pair_of_plain_sends_blocks(rank)
    groups_are_separate(rank)


def values(number: float) -> Tensor:
    return torch.full((SIZE,), float(number), device="played")


def messages_match_in_order(rank: int) -> None:
    if rank == 0:
        for number in range(3):
            dist.send(values(number), 1, tag=10 - number)
        return
    got = [values(-1) for _ in range(3)]
    for work in [dist.irecv(one, 0, tag=number) for number, one in enumerate(got)]:
        assert work is not None
        work.wait()
    assert [one[0].item() for one in got] == [0, 1, 2]


def a_batch_goes_both_ways(rank: int) -> None:
    mine, other = values(rank), values(-1)
    sent, received = dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)
    for work in dist.batch_isend_irecv([sent, received]):
        work.wait()
    assert bool((other == 1 - rank).all())
    flags = torch.tensor([True, False], device="played")  # a dtype that gloo does not know
    if rank == 0:
        dist.send(flags, 1)
    else:
        got = torch.zeros(2, dtype=torch.bool, device="played")
        dist.recv(got, 0)
        assert got.tolist() == [True, False]


def operations_follow_the_stream(rank: int) -> None:
    copies_are_late()
    if rank == 0:
        meet_on_the_host()
        late = pinned(7).to("played", non_blocking=True)
        work = dist.isend(late, 1)  # reads after the copy, although the host does not wait
        del late  # the group keeps the memory
        assert work is not None
        assert not work.is_completed()
        work.wait()
        assert not work.is_completed()
        torch.accelerator.synchronize()
        assert work.is_completed()
    else:
        got = values(0)
        work = dist.irecv(got, 0)
        assert work is not None
        assert not bool(got.any())  # the message has not been sent, and the stream does not wait for it
        meet_on_the_host()
        work.wait()
        assert bool((got == 7).all())


def meet_on_the_host() -> None:
    dist.all_reduce(torch.zeros(1))


def collectives_collect(rank: int) -> None:
    dist.barrier()
    tensor = values(rank + 1)
    dist.all_reduce(tensor)
    assert bool((tensor == 3).all())
    tensor = values(rank)
    dist.broadcast(tensor, 1)
    assert bool((tensor == 1).all())
    plain = torch.ones(2)
    dist.all_reduce(plain)
    assert plain.tolist() == [2, 2]
    only = dist.new_group([0, 1], backend="pccl")
    with pytest.raises(RuntimeError, match="cpu"):
        dist.all_reduce(torch.ones(2), group=only)


def a_pair_of_plain_sends_blocks(rank: int) -> None:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    sent = dist.isend(values(1), 1 - rank, group=group)
    received = dist.irecv(values(0), 1 - rank, group=group)
    assert sent is not None
    assert received is not None
    time.sleep(0.3)
    assert not sent.is_completed()
    assert not received.is_completed()
    received.wait()
    with pytest.raises(RuntimeError):
        torch.accelerator.synchronize()
    dist.barrier()


def groups_are_separate(rank: int) -> None:
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    ones, twos = values(1), values(2)
    if rank == 0:
        works = [dist.isend(ones, 1, group=first), dist.isend(twos, 1, group=second)]
    else:
        ones.zero_()
        twos.zero_()
        works = [dist.irecv(twos, 0, group=second), dist.irecv(ones, 0, group=first)]
    for work in works:
        assert work is not None
        work.wait()
    assert (ones[0].item(), twos[0].item()) == (1, 2)


def lose_the_peer(rank: int) -> None:
    dist.barrier()
    if rank == 1:
        os._exit(3)
    work = dist.irecv(values(0), 1)
    assert work is not None
    deadline = time.monotonic() + 30
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(RuntimeError):
        work.wait()
    assert values(1).sum().item() == SIZE  # the survivor goes on


def test_processes_exchange_tensors(tmp_path: Path) -> None:
    assert on_ranks(exchange, 2, tmp_path) == [0, 0]


def test_a_lost_peer_is_an_error_and_no_crash(tmp_path: Path) -> None:
    assert on_ranks(lose_the_peer, 2, tmp_path) == [0, 3]
