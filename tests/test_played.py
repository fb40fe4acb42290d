"""The played device: as strict as CUDA about memory and order, as exact as the CPU about numbers."""

import copy
import io
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.played import compiler
from tests.played.child import in_child, on_ranks

pytestmark = pytest.mark.skipif(compiler() is None, reason="the played device needs a C++ compiler")

SIZE = 4096
APART = "Expected all tensors to be on the same device"
LATE = 80_000  # microseconds; far more than a busy machine takes from one line of a test to the next


def device_module() -> Any:
    return torch.get_device_module("played")


def pinned(value: float) -> Tensor:
    return torch.full((SIZE,), float(value)).pin_memory()


def copies_are_late() -> None:
    device_module().set_delay(LATE)


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


# Memory


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


# Streams and events


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


# Operators


@in_child
def test_devices_do_not_mix() -> None:
    here, there = torch.ones(4, device="played:0"), torch.ones(4)
    with pytest.raises(RuntimeError, match=APART):
        here + there
    with pytest.raises(RuntimeError, match=APART):
        there.mul_(here)
    with pytest.raises(RuntimeError, match=APART):
        F.linear(here, torch.ones(2, 4))
    with pytest.raises(RuntimeError, match=APART):
        here + torch.ones(4, device="played:1")
    assert torch.equal((here * torch.tensor(2.0)).cpu(), there * 2)
    assert torch.equal(here[torch.tensor([0, 2])].cpu(), there[:2])
    assert (here + 1).device == torch.device("played:0")


@in_child
def test_written_arguments_are_returned_and_views_share() -> None:
    base = torch.arange(12.0, device="played")
    assert base.add_(1) is base
    out = torch.empty(0, device="played")
    assert torch.add(base, base, out=out) is out
    assert torch.equal(out.cpu(), torch.arange(1.0, 13) * 2)
    view = base.view(3, 4).t()[1:3].unfold(1, 2, 1)
    view.zero_()
    expected = torch.arange(1.0, 13).view(3, 4)
    expected.t()[1:3].zero_()
    assert torch.equal(base.cpu(), expected.view(-1))
    values, places = torch.max(base.view(3, 4), 1)
    assert (values.tolist(), places.tolist()) == ([4.0, 8.0, 12.0], [3, 3, 3])
    with torch.inference_mode():
        assert base.view(4, 3).t().shape == (3, 4)
    turned = torch.view_as_complex(base.view(6, 2)).conj()
    assert torch.equal((turned * 1).imag.cpu(), -base.view(6, 2)[:, 1].cpu())
    torch._foreach_mul_([base, out], 0)
    assert not bool(base.any())
    assert not bool(out.any())


@in_child
def test_storage_can_be_resized_and_shared() -> None:
    before = torch.accelerator.memory_allocated()
    tensor = torch.ones(SIZE, device="played")
    storage = tensor.untyped_storage()
    storage.resize_(0)
    assert torch.accelerator.memory_allocated() == before
    storage.resize_(4 * SIZE)
    tensor.fill_(2)
    other = torch.empty(0, device="played").set_(storage, 1, (SIZE - 1,), (1,))
    assert bool((other == 2).all())
    assert torch.equal(tensor.resize_(2, 2).cpu(), torch.full((2, 2), 2.0))
    other.data = tensor
    assert other.is_set_to(tensor)


@in_child
def test_modules_keep_their_parameters_when_moved() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    weight = model[0].weight
    model.to("played")
    assert model[0].weight is model[1].weight is weight
    assert weight.device == torch.device("played:0")
    weight.data = torch.zeros(4, 4)
    assert weight.device.type == "cpu"


@in_child
def test_tensors_can_be_copied_and_saved() -> None:
    tensor = torch.randn(3, 4, device="played:1").t()
    assert torch.equal(copy.deepcopy(tensor).cpu(), tensor.cpu())
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded.device == tensor.device
    assert torch.equal(loaded.cpu(), tensor.cpu())
    file.seek(0)
    assert torch.equal(torch.load(file, map_location="cpu"), tensor.cpu())


@in_child
def test_random_numbers_are_those_of_the_cpu() -> None:
    torch.manual_seed(3)
    expected = [torch.randn(5), torch.rand(5), F.dropout(torch.ones(50), 0.3)]
    device_module().manual_seed(3)
    state = device_module().get_rng_state()
    for _ in range(2):
        ones = torch.ones(50, device="played")
        drawn = [torch.randn(5, device="played"), torch.rand(5, device="played"), F.dropout(ones, 0.3)]
        assert all(torch.equal(one.cpu(), other) for one, other in zip(drawn, expected, strict=True))
        device_module().set_rng_state(state, "played:0")


# Bits


def attention(query: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, query, query, is_causal=True)


def scattered(source: Tensor) -> Tensor:
    index = torch.zeros(4, dtype=torch.long, device=source.device)
    added = torch.zeros_like(source).index_add(0, index, source).scatter_add(1, index.unsqueeze(1), source[:, :1])
    return added.index_put((index,), source, accumulate=True)


def multiplied(left: Tensor) -> Tensor:
    batched = left.unsqueeze(0)
    return torch.baddbmm(batched, batched, batched) + torch.einsum("ij,kj->ik", left, left)


LAYERS: list[tuple[Callable[[], Callable[[Tensor], Tensor]], tuple[int, ...]]] = [
    (lambda: nn.Linear(8, 6), (4, 3, 8)),
    (lambda: nn.LayerNorm(8), (4, 8)),
    (lambda: nn.RMSNorm(8), (4, 8)),
    (lambda: nn.GroupNorm(2, 4), (2, 4, 5)),
    (lambda: nn.GELU(), (4, 8)),
    (lambda: nn.Dropout(0.4), (40, 8)),
    (lambda: nn.Softmax(-1), (4, 8)),
    (lambda: nn.Conv2d(3, 8, 3, padding=1), (2, 3, 8, 8)),
    (lambda: nn.BatchNorm2d(3), (2, 3, 8, 8)),
    (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8)),
    (lambda: attention, (2, 3, 8, 4)),
    (lambda: scattered, (4, 4)),
    (lambda: multiplied, (4, 4)),
]


def outcome(layer: Callable[[Tensor], Tensor], values: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    values = values.detach().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        result = layer(values)
        numbers = torch.arange(result.numel(), device=result.device).view(result.shape)
        torch.autograd.backward((result * numbers).sum())
    found = [result, values.grad]
    if isinstance(layer, nn.Module):
        found += [parameter.grad for parameter in layer.parameters()] + list(layer.buffers())
    return [tensor.detach().cpu() for tensor in found if tensor is not None]


def assert_same(first: list[Tensor], second: list[Tensor]) -> None:
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other), (one - other).abs().max()


@in_child
def test_layers_have_the_bits_of_the_cpu() -> None:
    for make, shape in LAYERS:
        layer, values = make(), torch.randn(shape)
        moved = copy.deepcopy(layer).to("played:2") if isinstance(layer, nn.Module) else layer
        assert_same(outcome(moved, values.to("played:2")), outcome(layer, values))


class Small(nn.Module):
    """A transformer of one block with everything that trains: embedding, dropout, attention, norm, loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.block(self.embedding(tokens))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def trained(model: nn.Module, device: str, optimizer: Callable[..., torch.optim.Optimizer], foreach: bool) -> nn.Module:
    model = copy.deepcopy(model).to(device)
    rule = optimizer(model.parameters(), lr=0.01, foreach=foreach)
    torch.manual_seed(5)
    with sdpa_kernel(SDPBackend.MATH):
        for step in range(3):
            rule.zero_grad()
            tokens = (torch.arange(24).view(4, 6) * (step + 1) % 32).to(device)
            model(tokens).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            rule.step()
    return model


@in_child
def test_training_has_the_bits_of_the_cpu() -> None:
    torch.manual_seed(0)
    model = Small()
    for optimizer in (torch.optim.AdamW, torch.optim.SGD):
        for foreach in (True, False):
            there, here = (trained(model, device, optimizer, foreach) for device in ("played:0", "cpu"))
            assert_same([one.detach().cpu() for one in there.parameters()], list(here.parameters()))


@in_child
def test_hugging_face_models_have_the_bits_of_the_cpu() -> None:
    import transformers

    library: Any = transformers  # its types do not admit its own way of calling
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "vocab_size": 64}
    tokens_that_end = {"bos_token_id": 1, "eos_token_id": 2}
    models = [
        library.GPT2LMHeadModel(library.GPT2Config(**small, **tokens_that_end, n_positions=32)),
        library.LlamaForCausalLM(library.LlamaConfig(**small, num_key_value_heads=1, intermediate_size=32)),
    ]
    tokens = torch.arange(20).view(2, 10)
    for model in models:
        moved = copy.deepcopy(model).to("played:0")
        outcomes = []
        for one, given in ((moved, tokens.to("played:0")), (model, tokens)):
            torch.manual_seed(2)
            with sdpa_kernel(SDPBackend.MATH):
                loss = one.train()(input_ids=given, labels=given).loss
                loss.backward()
            outcomes.append([loss.detach().cpu(), *(weight.grad.cpu() for weight in one.parameters())])
        assert_same(*outcomes)


@in_child
def test_checkpointing_restores_the_random_numbers() -> None:
    from torch.utils.checkpoint import checkpoint

    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    values = torch.randn(4, 8)
    for reentrant in (True, False):
        moved = copy.deepcopy(layer).to("played:1")
        there = outcome(partial(checkpoint, moved, use_reentrant=reentrant), values.to("played:1"))
        assert_same(there, outcome(layer, values)[: len(there)])


@in_child
def test_autocast() -> None:
    layer, values = nn.Linear(8, 8).to("played"), torch.randn(4, 8, device="played")
    with torch.autocast("played", dtype=torch.bfloat16):
        hidden = layer(values)
        assert hidden.dtype == (hidden @ hidden.t()).dtype == torch.bfloat16
        assert F.layer_norm(hidden, (8,)).dtype == torch.float32
        assert hidden.softmax(-1).dtype == F.cross_entropy(hidden, hidden.argmax(1)).dtype == torch.float32
        assert hidden.sum().dtype == torch.float32
        loss = F.mse_loss(hidden, values)
    torch.autograd.backward(loss)
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    expected = F.linear(values.cpu().bfloat16(), layer.weight.cpu().bfloat16(), layer.bias.cpu().bfloat16())
    assert torch.equal(hidden.cpu(), expected)


# The process group


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
