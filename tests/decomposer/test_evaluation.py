"""A chain as it is evaluated, against the model in eval mode: what draws is silent, what counts is not written."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from counterpoint.decomposer import Chain, chain_of_modules, decompose
from counterpoint.decomposer.evaluation import evaluation_chain


class Attention(nn.Module):
    """Dropout inside the attention op, and one that writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)
        self.drop = nn.Dropout(0.5, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        rate = 0.5 if self.training else 0.0
        return self.drop(functional.scaled_dot_product_attention(query, key, value, dropout_p=rate))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Detached(nn.Module):
    """A dropout inside a graph inside the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mask = self.drop(torch.sigmoid(x))
        return self.inner(x) * mask


class Model(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), middle, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x))).square().mean()


MIDDLES = {
    "dropout": lambda: nn.Dropout(0.5),
    "channels": lambda: nn.Dropout1d(0.5),
    "alpha": lambda: nn.AlphaDropout(0.5),
    "batch norm": lambda: nn.BatchNorm1d(6),
    "batch norm without statistics": lambda: nn.BatchNorm1d(6, track_running_stats=False),
    "instance norm": lambda: nn.InstanceNorm1d(6, affine=True),
    "instance norm with statistics": lambda: nn.InstanceNorm1d(6, track_running_stats=True),
    "rrelu": lambda: nn.RReLU(),
    "attention": Attention,
    "recurrent": Recurrent,
    "inside": Detached,
}


def _evaluated(chain: Chain, model: nn.Module, batch: Tensor) -> Tensor:
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    before = copy.deepcopy(buffers)
    torch.manual_seed(1)
    drawn = torch.get_rng_state()
    loss, mutated = evaluation_chain(chain).run(dict(model.named_parameters()), buffers, batch)
    assert mutated == {}
    assert all(torch.equal(before[name], buffers[name]) for name in before)
    assert torch.equal(torch.get_rng_state(), drawn), "something drew random numbers"
    return loss


@pytest.mark.parametrize("name", MIDDLES)
def test_evaluation_is_the_model_in_eval_mode(name: str) -> None:
    model = Model(MIDDLES[name]())
    batch = torch.randn(4, 6, 8)
    for _ in range(2):  # for running statistics to be something
        model(batch)
    chain = decompose(model, batch)
    found = _evaluated(chain, model, batch)
    assert torch.equal(found, model.eval()(batch))
    assert not any(layer.random for layer in evaluation_chain(chain).layers)


def test_lists_of_modules_are_evaluated_too() -> None:
    modules = [nn.Linear(8, 8), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(8, 1)]
    batch = torch.randn(4, 6, 8)
    chain = chain_of_modules(modules, batch, loss=lambda output, batch: output.mean())
    found = _evaluated(chain, nn.ModuleList(modules), batch)
    assert all(module.training for module in modules)
    assert torch.equal(found, nn.Sequential(*modules).eval()(batch).mean())


def test_a_chain_in_training_is_left_as_it_was() -> None:
    model = Model(nn.Dropout(0.5))
    batch = torch.randn(4, 6, 8)
    chain = decompose(model, batch)
    evaluation_chain(chain)
    torch.manual_seed(3)
    found, _ = chain.run(dict(model.named_parameters()), {}, batch)
    torch.manual_seed(3)
    assert torch.equal(found, model(batch))
