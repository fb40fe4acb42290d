"""The played device's operators: devices do not mix, views share, results are the arguments that were written."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.played import compiler
from tests.played.child import in_child
from tests.played.late import SIZE, device_module

pytestmark = pytest.mark.skipif(compiler() is None, reason="the played device needs a C++ compiler")


APART = "Expected all tensors to be on the same device"


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
