"""What cannot be decomposed is refused with the user's line, or with what is wrong with the batch."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from counterpoint.core.errors import ModelError
from counterpoint.decomposer import decompose


class Scalar(nn.Module):
    """A linear layer, then whatever `tail` does."""

    def __init__(self, tail: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tail = tail

    def forward(self, x: Tensor) -> Any:
        return self.tail(self.linear(x))


def branches_on_data(x: Tensor) -> Tensor:
    return x.sum() if x.sum() > 0 else x.mean()


def leaves_torch(x: Tensor) -> Tensor:
    return x.sum() * float(x.detach().numpy().mean())


def loops_over_samples(x: Tensor) -> Tensor:
    return sum(row.sum() for row in x)


def wants_even_batches(x: Tensor) -> Tensor:
    return x.view(x.shape[0] // 2, -1).sum()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def has_its_own_backward(x: Tensor) -> Tensor:
    return Double.apply(x).sum()


UNTRACEABLE = [branches_on_data, leaves_torch, loops_over_samples, wants_even_batches, has_its_own_backward]


@pytest.mark.parametrize("tail", UNTRACEABLE)
def test_untraceable_line_is_named(tail: Callable[[Tensor], Any], capfd: pytest.CaptureFixture[str]) -> None:
    line = inspect.getsourcelines(tail)[1] + 1
    with pytest.raises(ModelError, match=f"{re.escape(__file__)}:{line} .*list of modules"):
        decompose(Scalar(tail), torch.randn(4, 4))
    assert capfd.readouterr() == ("", "")


def test_model_is_as_before_after_a_refusal() -> None:
    model = Scalar(branches_on_data).eval()
    weight = model.linear.weight
    with pytest.raises(ModelError):
        decompose(model, torch.randn(4, 4))
    assert model.linear.weight is weight
    assert not model.training


BAD_EXAMPLES: dict[str, tuple[Any, str]] = {
    "nothing": ({}, "no tensors"),
    "no batch dimension": ({"x": torch.tensor(1.0)}, "'x' has no batch dimension"),
    "empty": ({"x": torch.zeros(0, 4)}, "batch size 0"),
    "no tensor": ({"x": torch.zeros(2, 4), "name": "cat"}, "'name' is a str"),
    "sizes differ": ({"x": torch.zeros(2, 4), "y": torch.zeros(3)}, "'x' 2, 'y' 3"),
    "unknown": ({"y": torch.zeros(2, 4)}, "unexpected keyword argument 'y'"),
    "wrong shape": ({"x": torch.zeros(2, 5)}, "must have same reduction dim"),
}


@pytest.mark.parametrize("name", BAD_EXAMPLES)
def test_bad_example_is_refused(name: str) -> None:
    example, message = BAD_EXAMPLES[name]
    with pytest.raises(ModelError, match=message):
        decompose(Scalar(torch.sum), example)


def test_bad_loss_is_refused() -> None:
    x = torch.zeros(2, 4)
    with pytest.raises(ModelError, match=r"not a scalar \(shape \((2|s\d+), 4\)\)"):
        decompose(Scalar(torch.relu), x)
    with pytest.raises(ModelError, match="output is a dict without a loss"):
        decompose(Scalar(lambda x: {"logits": x}), x)
    with pytest.raises(ModelError, match="takes none of the batch's tensors"):
        decompose(Scalar(torch.relu), {"y": x}, loss=lambda output, batch: output.sum())
    with pytest.raises(ModelError, match="does not depend on any parameter"):
        decompose(Scalar(lambda x: x.detach().sum()), x)
    with pytest.raises(ModelError, match="does not depend on any parameter"):
        decompose(nn.ReLU(), x, loss=lambda output, batch: output.sum())
    with pytest.raises(ModelError, match="trainable parameters of its own"):
        decompose(Scalar(torch.relu), x, loss=_TrainedLoss())


class _TrainedLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: Tensor, batch: Tensor) -> Tensor:
        return output.sum() * self.scale


def test_parameter_written_in_forward_is_refused() -> None:
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.linear.weight.clamp_(-1, 1)
            return self.linear(x).sum()

    with pytest.raises(ModelError, match=r"changes its parameter 'linear.weight'"):
        decompose(Clamped(), torch.zeros(2, 4))


def test_tensor_behind_data_is_refused() -> None:
    model = Scalar(torch.sum)
    model.tail = lambda x: (x @ model.linear.weight.data).sum()
    with pytest.raises(ModelError, match=r"through .data"):
        decompose(model, torch.zeros(4, 4))


def test_batch_unlike_the_example_is_refused() -> None:
    chain = decompose(Scalar(torch.sum), {"x": torch.zeros(2, 4)})
    with pytest.raises(ModelError, match=r"'x' has shape \(2, 5\), not \(2, 4\)"):
        chain.bind({"x": torch.zeros(2, 5)})
    with pytest.raises(ModelError, match="'x' is missing; 'y' was not in the example"):
        chain.bind({"y": torch.zeros(2, 4)})
    with pytest.raises(ModelError, match=r"'x' is torch.float64, not torch.float32"):
        chain.bind({"x": torch.zeros(2, 4, dtype=torch.float64)})
    with pytest.raises(ModelError, match="the batch has 2 tensors"):
        chain.bind((torch.zeros(2, 4), torch.zeros(2, 4)))
