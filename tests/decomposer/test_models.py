"""Models written by hand: skips, ties, reuse, buffers, several inputs and outputs, and how they are cut."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from counterpoint.decomposer import Chain, decompose
from tests.small_models import (
    WIDTH,
    LongSkip,
    TwoStreams,
    UNet,
    Widening,
    grids,
    regression,
    stream_loss,
    streams,
    vectors,
)


class Mlp(nn.Sequential):
    def __init__(self, num_layers: int = 4) -> None:
        super().__init__(*[m for _ in range(num_layers) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))])


class Tied(nn.Module):
    """One weight used as it is and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.Linear(WIDTH, WIDTH)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.decoder(torch.tanh(self.middle(self.encoder(x)))), self.encoder.weight.t())


class Reused(nn.Module):
    """One module called three times, batch norm included."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.shared(self.shared(self.shared(x))))


class Counting(nn.Module):
    """Buffers written in place, assigned, and read by others."""

    seen: Tensor
    average: Tensor
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("scale", torch.full((WIDTH,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.first(x) * self.scale
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return self.second(torch.relu(x)) * self.scale + self.average


class InPlace(nn.Module):
    """Writes to its input, to views and to slices, of a buffer too; reads one number back."""

    history: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("history", torch.zeros(3))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x *= 2
        x[:, 0] = 1
        self.history[1] = x.mean()
        x = self.first(x).relu_() * x.sum().item()
        y = x.clone()
        y[:, ::2] = 0
        y.view(-1).add_(1)
        return self.second(y) + x


class Queries(nn.Module):
    """A layer that needs the batch size but no value that has it: learned queries, one set per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(5, WIDTH))
        self.project = nn.Linear(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.project(self.queries).expand(x.shape[0], -1, -1)
        return self.attention(queries, x[:, None], x[:, None], need_weights=False)[0].mean(1)


SINGLE: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Tensor]]]] = {
    "mlp": (Mlp, lambda n: {"input": torch.randn(n, WIDTH), "target": torch.randn(n, WIDTH)}),
    "long skip": (LongSkip, vectors),
    "tied": (Tied, vectors),
    "counting": (Counting, vectors),
    "in place": (InPlace, vectors),
    "unet": (UNet, grids),
    "queries": (Queries, vectors),
}


@pytest.mark.parametrize("name", SINGLE)
def test_same_as_plain(name: str, check_same: Callable[..., None]) -> None:
    build, make_batch = SINGLE[name]
    model = build()
    chain = decompose(model, make_batch(3), loss=regression)
    for batch_size in (3, 4, 1):
        batch = make_batch(batch_size)
        check_same(chain, model, batch, lambda plain, batch=batch: _plain(plain, batch))


def _plain(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    inputs = {name: tensor.clone() for name, tensor in batch.items() if name != "target"}
    return regression(model(*inputs.values()), batch)


def test_reused_module_is_tied(check_same: Callable[..., None]) -> None:
    model = Reused()
    chain = decompose(model, vectors(4), loss=regression)
    assert [layer.tied for layer in chain.layers[:3]] == [(), *[chain.layers[0].parameters] * 2]
    assert len({layer.signature for layer in chain.layers[:3]}) <= 2
    for batch_size in (4, 2):  # batch norm refuses a single sample
        batch = vectors(batch_size)
        check_same(chain, model, batch, lambda plain, batch=batch: _plain(plain, batch))


def test_several_inputs_and_outputs(check_same: Callable[..., None]) -> None:
    model = TwoStreams()
    chain = decompose(model, streams(2), loss=stream_loss)
    assert chain.parameters["unused.weight"].owner == -1
    for batch_size in (2, 3, 1):
        batch = streams(batch_size)
        check_same(chain, model, batch, lambda plain, batch=batch: stream_loss(plain(batch["a"], batch["b"]), batch))


def test_batch_as_tuple_and_as_tensor() -> None:
    model, x, y = Mlp(2), torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    weights = dict(model.named_parameters())
    pair = decompose(model, (x, y), loss=lambda output, batch: functional.mse_loss(output, batch[1]))
    expected = functional.mse_loss(model(x), y)
    assert torch.equal(pair.run(weights, {}, (x, y))[0], expected)
    alone = decompose(model, x, loss=lambda output, batch: functional.mse_loss(output, batch))
    assert torch.equal(alone.run(weights, {}, x)[0], functional.mse_loss(model(x), x))


def test_example_of_one_sample_leaves_the_batch_size_free(check_same: Callable[..., None]) -> None:
    model = LongSkip()
    chain = decompose(model, vectors(1), loss=regression)
    batch = vectors(6)
    check_same(chain, model, batch, lambda plain: _plain(plain, batch))


def test_cuts_do_not_depend_on_the_example() -> None:
    model = UNet()
    small, large = (decompose(model, grids(n), loss=regression) for n in (1, 9))
    assert _structure(small) == _structure(large)


def test_a_row_of_layers_is_cut_at_each_product() -> None:
    chain = decompose(Mlp(4), SINGLE["mlp"][1](2), loss=regression)
    assert [layer.name for layer in chain.layers] == ["0", "2", "4", "6"]
    assert len({layer.signature for layer in chain.layers}) == 3  # the first has no gradient to give, the last the loss


def test_blocks_are_cut_inside_where_their_weights_are_large() -> None:
    """Half a block has 16 KiB of weights; a vector inside it and the one around it are 640 bytes."""
    for length, parts in ((1, [["up", "down"], ["up", "down"]]), (64, [["up down"], ["up down"]])):
        batch = {name: torch.zeros(2, length, WIDTH) for name in ("x", "target")}
        chain = decompose(Widening(3), batch, loss=regression)
        matrices = [[n.split(".")[0] for n in layer.parameters if n.endswith("weight")] for layer in chain.layers]
        found = [" ".join(name for name in names if name != "norms") for names in matrices]
        assert found == ["up", "down", *(part for block in parts for part in block)]


def test_no_layer_of_a_unet_has_most_of_it() -> None:
    chain = decompose(UNet(), grids(2), loss=regression)
    sizes = [sum(chain.parameters[name].num_bytes for name in layer.parameters) for layer in chain.layers]
    assert max(sizes) <= sum(sizes) / 2
    skips = [value for value in chain.values if value.producer >= 0 and len(value.consumers) == 2]
    assert len(skips) == 3


def test_values_know_their_sizes() -> None:
    chain = decompose(Mlp(2), SINGLE["mlp"][1](2), loss=regression)
    value = chain.values[chain.layers[0].outputs[0]]
    assert value.shape_at(7) == (7, WIDTH)
    assert value.bytes_at(7) == 7 * WIDTH * 4
    assert value.needs_grad
    assert not any(chain.values[index].needs_grad for index in chain.batch.values())


def test_frozen_parameters_stop_the_gradient() -> None:
    model = Mlp(3)
    model[0].requires_grad_(False)
    chain = decompose(model, SINGLE["mlp"][1](2), loss=regression)
    assert not chain.values[chain.layers[0].outputs[0]].needs_grad
    assert chain.values[chain.layers[1].outputs[0]].needs_grad
    assert not chain.parameters["0.weight"].requires_grad


def test_layer_does_not_write_to_its_arguments() -> None:
    model = Counting()
    chain = decompose(model, vectors(2), loss=regression)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    versions = {name: buffer._version for name, buffer in buffers.items()}
    batch = vectors(2)
    before = {name: tensor.clone() for name, tensor in batch.items()}
    _, mutated = chain.run(dict(model.named_parameters()), buffers, batch)
    assert set(mutated) == {"seen", "average"}
    assert {name: buffer._version for name, buffer in buffers.items()} == versions
    assert all(torch.equal(batch[name], before[name]) for name in batch)


def _structure(chain: Chain) -> list[tuple[object, ...]]:
    return [(layer.name, layer.parameters, layer.inputs, layer.outputs) for layer in chain.layers]
