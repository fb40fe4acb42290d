"""The played device's memory: counted, with a hard end, poisoned when it is freed, pinned on the host's side."""

import pytest
import torch

from tests.played import compiler
from tests.played.child import in_child
from tests.played.late import SIZE, copies_are_late, device_module, pinned

pytestmark = pytest.mark.skipif(compiler() is None, reason="the played device needs a C++ compiler")


@in_child
def test_the_accelerator_is_found() -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("played")
    assert torch.accelerator.device_count() == device_module().device_count() == 8
    torch.accelerator.set_device_index(2)
    assert torch.empty(1, device="played").device == torch.device("played:2")
    with device_module().device(1):
        assert torch.empty(1, device="played").device == torch.device("played:1")
    device_module().set_device(0)
    assert torch.accelerator.current_device_index() == device_module().current_device() == 0
    assert device_module().get_device_name(3) == device_module().get_device_properties(3).name
    with pytest.raises(RuntimeError, match="no device 8"):
        torch.empty(1, device="played:8")


@in_child
def test_memory_is_counted_by_device() -> None:
    device = "played:3"
    before, elsewhere = torch.accelerator.memory_allocated(device), torch.accelerator.memory_allocated("played:2")
    torch.accelerator.reset_peak_memory_stats(device)
    tensor = torch.empty(SIZE, device=device)
    other = tensor * 2  # a result of a kernel counts, too
    assert torch.accelerator.memory_allocated(device) == before + 8 * SIZE
    view = other[::2].view(-1)
    del tensor, other
    assert torch.accelerator.memory_allocated(device) == before + 4 * SIZE
    del view
    assert torch.accelerator.memory_allocated(device) == torch.accelerator.memory_reserved(device) == before
    assert torch.accelerator.max_memory_allocated(device) == before + 8 * SIZE
    assert torch.accelerator.memory_allocated("played:2") == elsewhere
    torch.accelerator.empty_cache()


@in_child
def test_the_capacity_ends_in_an_out_of_memory_error() -> None:
    module = device_module()
    free, total = torch.accelerator.get_memory_info("played:1")
    module.set_capacity(total - free + 4 * SIZE, "played:1")
    kept = torch.zeros(SIZE, device="played:1")
    assert module.mem_get_info(1)[0] == 0
    with pytest.raises(torch.OutOfMemoryError, match=r"played:1 out of memory\. Tried to allocate 4 bytes"):
        torch.zeros(1, device="played:1")
    with pytest.raises(torch.OutOfMemoryError):
        kept + 1
    torch.zeros(1, device="played:0")
    del kept
    module.set_per_process_memory_fraction(0.5, 1)
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(SIZE, device="played:1")
    module.set_per_process_memory_fraction(1.0, 1)
    module.set_capacity(total, 1)
    assert torch.zeros(SIZE, device="played:1").sum().item() == 0


@in_child
def test_what_a_stream_still_uses_is_waited_for_before_memory_is_out() -> None:
    copies_are_late()
    module, stream = device_module(), torch.Stream(device="played:1")
    free, total = module.mem_get_info(1)
    module.set_capacity(total - free + 4 * SIZE, 1)
    source, target = torch.ones(SIZE, device="played:1"), pinned(0)
    with stream:
        target.copy_(source, non_blocking=True)
    source.record_stream(stream)
    del source
    assert module.mem_get_info(1)[0] == 0
    torch.empty(SIZE, device="played:1")
    assert bool((target == 1).all())
    module.set_capacity(total, 1)


@in_child
def test_freed_memory_is_poisoned_unless_the_stream_was_recorded() -> None:
    copies_are_late()
    for recorded in (False, True):
        source, target, stream = torch.ones(SIZE, device="played"), pinned(0), torch.Stream(device="played:0")
        with stream:
            target.copy_(source, non_blocking=True)
        if recorded:
            source.record_stream(stream)
        del source
        stream.synchronize()
        assert bool((target == 1).all() if recorded else target.isnan().all())


@in_child
def test_memory_freed_on_its_own_stream_is_freed_in_order() -> None:
    copies_are_late()
    source, target = torch.ones(SIZE, device="played"), pinned(0)
    target.copy_(source, non_blocking=True)
    del source
    torch.accelerator.synchronize()
    assert bool((target == 1).all())


@in_child
def test_pinned_memory() -> None:
    plain = torch.zeros(SIZE)
    assert not plain.is_pinned()
    for tensor in (plain.pin_memory(), torch.empty(SIZE, pin_memory=True), torch.empty(2, SIZE, pin_memory=True)[1]):
        assert tensor.is_pinned()
        assert tensor.device.type == "cpu"
    copies_are_late()
    arrived = pinned(3).to("played", non_blocking=True)  # the pinned tensor is freed before the copy runs
    assert bool((arrived == 3).all())
    back = arrived.to("cpu", non_blocking=True)
    assert back.is_pinned()
