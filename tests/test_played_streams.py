"""The played device's streams and events: copies run late, and only waits put them in order."""

import pytest
import torch

from tests.played import compiler
from tests.played.child import in_child
from tests.played.late import SIZE, copies_are_late, device_module, pinned

pytestmark = pytest.mark.skipif(compiler() is None, reason="the played device needs a C++ compiler")


@in_child
def test_a_copy_on_a_side_stream_needs_a_wait() -> None:
    copies_are_late()
    stream, target, source = torch.Stream(device="played:0"), torch.zeros(SIZE, device="played"), pinned(1)
    with stream:
        assert torch.accelerator.current_stream() == stream
        target.copy_(source, non_blocking=True)
        event = stream.record_event()
    assert torch.accelerator.current_stream() != stream
    assert not stream.query()
    assert not event.query()
    assert target.sum().item() == 0  # the default stream does not wait for the other one
    torch.accelerator.current_stream().wait_event(event)
    assert target.sum().item() == SIZE
    assert event.query()


@in_child
def test_a_stream_waits_for_a_stream() -> None:
    copies_are_late()
    first, second = torch.Stream(device="played:0"), torch.Stream(device="played:0")
    middle, target = torch.zeros(SIZE, device="played"), pinned(0)
    torch.accelerator.synchronize()
    with first:
        middle.copy_(pinned(5), non_blocking=True)
    second.wait_stream(first)
    with second:
        target.copy_(middle, non_blocking=True)
    assert not bool(target.any())
    second.synchronize()
    assert bool((target == 5).all())


@in_child
def test_a_copy_back_is_late_and_a_blocking_copy_is_done() -> None:
    copies_are_late()
    source, target = torch.ones(SIZE, device="played"), pinned(0)
    target.copy_(source, non_blocking=True)
    assert not bool(target.any())
    torch.accelerator.synchronize()
    assert bool((target == 1).all())
    unpinned = torch.zeros(SIZE)
    unpinned.copy_(source, non_blocking=True)
    assert bool((unpinned == 1).all())
    target.zero_()
    target.copy_(source)
    assert bool((target == 1).all())


@in_child
def test_a_copy_between_devices_is_ordered_with_both_current_streams() -> None:
    copies_are_late()
    source = pinned(2).to("played:0", non_blocking=True)
    target = source.to("played:1", non_blocking=True)
    assert not torch.accelerator.current_stream(1).query()
    assert bool((target == 2).all())


@in_child
def test_kernels_wait_for_their_own_stream() -> None:
    copies_are_late()
    stream, target = torch.Stream(device="played:1"), torch.zeros(SIZE, device="played:1")
    with stream:
        target.copy_(pinned(1), non_blocking=True)
        target.add_(1)
        assert torch.equal(target.cpu(), torch.full((SIZE,), 2.0))


@in_child
def test_events_tell_the_time() -> None:
    device_module().set_delay(20_000)
    start, end = (torch.Event(device="played:0", enable_timing=True) for _ in range(2))
    start.record()
    pinned(1).to("played", non_blocking=True)
    end.record()
    end.synchronize()
    assert 20 <= start.elapsed_time(end) < 10_000


@in_child
def test_backward_runs_on_the_streams_of_forward() -> None:
    copies_are_late()
    weight = torch.ones(SIZE, device="played", requires_grad=True)
    stream = torch.Stream(device="played:0")
    with stream:
        late = pinned(3).to("played", non_blocking=True)
        loss = (weight * late).sum()
    torch.autograd.backward(loss)
    assert weight.grad is not None
    assert bool((weight.grad == 3).all())
