"""Gradients keep their layout, share no memory with others, and are added up without writing where memory is shared."""

import torch
from torch.autograd.graph import get_gradient_edge

from counterpoint.runtime.gradients import Entrance, before_each, discarding
from counterpoint.runtime.strides import Form, added, copied


def test_an_entrance_takes_down_what_arrives_in_its_layout() -> None:
    value = torch.randn(3, 5)
    entrance = Entrance()
    entered = entrance.enter(value)
    entered.t().mul(torch.ones(5, 3)).backward(torch.randn(5, 3))
    assert entered.data_ptr() == value.data_ptr()
    assert entrance.grad is not None
    assert entrance.grad.stride() == (1, 3)  # a leaf's would be (5, 1), like itself
    assert not value.requires_grad


def test_an_entrance_that_nothing_reaches_has_no_gradient() -> None:
    entrance = Entrance()
    (entrance.enter(torch.ones(2)).detach() * torch.ones(2, requires_grad=True)).sum().backward()
    assert entrance.grad is None


def test_copies_keep_strides() -> None:
    base = torch.arange(24.0).view(4, 6)
    for tensor in (base.t(), base[:, 1:3], base[0].expand(5, 6), base[1:1], torch.tensor(3.0)):
        copy = copied(tensor)
        assert torch.equal(copy, tensor)
        assert copy.stride() == tensor.stride()
        assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or not tensor.numel()
    assert Form.of(base[:, 1:3]).num_elements == 3 * 6 + 2


def test_sums_are_made_in_place_where_elements_have_memory_of_their_own() -> None:
    total = torch.ones(2, 3)
    assert added(total, torch.ones(2, 3)) is total
    shared = torch.ones(3).expand(2, 3)
    assert torch.equal(added(shared, torch.ones(2, 3)), torch.full((2, 3), 2.0))
    assert torch.equal(shared, torch.ones(2, 3))


def test_discarding_takes_the_kernels_of_training_and_keeps_nothing() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t), discarding():
        output = torch.tanh(torch.randn(2, 4) @ weight)
    assert output.requires_grad
    assert kept == []


def test_something_is_called_before_each_operation_of_a_backward() -> None:
    """The first call comes before anything is computed, the last before the gradient of the leaf is added."""
    leaf = torch.ones(3, requires_grad=True)
    loss = (leaf * 2).exp().sum()
    calls: list[bool] = []
    hooks = before_each([get_gradient_edge(loss)], lambda: calls.append(leaf.grad is None))
    loss.backward(retain_graph=True)
    assert calls == [True] * 4  # sum, exp, mul and the leaf
    for hook in hooks:
        hook.remove()
    loss.backward()
    assert len(calls) == 4
