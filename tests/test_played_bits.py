"""The played device's numbers: layers, training and models have the bits of the CPU."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.played import compiler
from tests.played.child import in_child

pytestmark = pytest.mark.skipif(compiler() is None, reason="the played device needs a C++ compiler")


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
