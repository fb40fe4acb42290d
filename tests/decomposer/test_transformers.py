"""Hugging Face models: bit for bit the loss and gradients of the plain model, at any batch size."""

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
import transformers
from torch import Tensor, nn

from counterpoint.core.errors import ModelError
from counterpoint.decomposer import Chain, decompose
from tests.small_transformers import (
    LENGTH,
    VOCABULARY,
    Batch,
    adapted_llama,
    bert,
    causal,
    gpt2,
    images,
    llama,
    mixtral,
    padded,
    resnet,
    t5,
    tied_qwen2,
    vit,
)

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "gpt2": (gpt2, causal),
    "llama": (llama, causal),
    "llama padded": (llama, padded),
    "qwen2": (tied_qwen2, causal),
    "mixtral": (mixtral, causal),
    "bert": (bert, padded),
    "t5": (t5, padded),
    "vit": (vit, images),
    "resnet": (resnet, images),
}


@cache
def decomposed(name: str) -> tuple[nn.Module, Chain]:
    build, make_batch = MODELS[name]
    model = build().train()
    return model, decompose(model, make_batch(3))


@pytest.mark.parametrize("name", MODELS)
def test_same_as_plain(name: str, check_same: Callable[..., None]) -> None:
    model, chain = decomposed(name)
    make_batch = MODELS[name][1]
    for batch_size in (3, 5, 1):
        batch = make_batch(batch_size)
        check_same(chain, model, batch, lambda plain, batch=batch: plain(**batch).loss)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_model_on_meta_gives_the_same_chain(name: str) -> None:
    build, make_batch = MODELS[name]
    with torch.device("meta"):
        on_meta = build()
    real, meta = decomposed(name)[1], decompose(on_meta, make_batch(3))
    assert (meta.layers, meta.values, meta.parameters) == (real.layers, real.values, real.parameters)
    assert all(parameter.is_meta for parameter in on_meta.parameters())
    constants = [constant for layer in meta.layers for constant in layer.body.constants]
    assert not any(constant.is_meta for constant in constants)


def test_gpt2_is_cut_into_half_blocks() -> None:
    config = transformers.GPT2Config(
        n_layer=12, n_embd=24, n_head=2, vocab_size=200, n_positions=LENGTH, bos_token_id=0
    )
    config.eos_token_id, config.loss_type = 0, "ForCausalLM"
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    chain = decompose(model, causal(2))
    names = [layer.name for layer in chain.layers]
    assert names[1:-1] == [f"transformer.h.{block}.{half}" for block in range(12) for half in ("attn", "mlp")]
    assert names[-1] == "lm_head"
    assert chain.layers[-1].tied == ("transformer.wte.weight",)
    assert chain.aliases == {"lm_head.weight": "transformer.wte.weight"}
    assert len({layer.signature for layer in chain.layers}) == 5  # the last mlp has the final norm
    assert len({id(layer.body.module) for layer in chain.layers}) == 5
    assert all(layer.random for layer in chain.layers[:-1])
    assert not chain.layers[-1].random
    between = [value for value in chain.values if value.producer >= 0 and value.index != chain.loss]
    assert [value.consumers for value in between] == [(value.producer + 1,) for value in between]


def test_masks_and_rotary_tables_are_not_carried() -> None:
    chain = decomposed("llama padded")[1]
    carried = [value for value in chain.values if value.producer >= 0]
    assert all(len(value.consumers) <= 1 for value in carried)
    mask = chain.values[chain.batch["attention_mask"]]
    assert [chain.layers[layer].name for layer in mask.consumers] == [f"model.layers.{i}.self_attn" for i in range(2)]


def test_encoder_output_is_carried_to_each_decoder_block() -> None:
    chain = decomposed("t5")[1]
    carried = max((value for value in chain.values if value.producer >= 0), key=lambda value: len(value.consumers))
    assert ["EncDecAttention" in chain.layers[layer].name for layer in carried.consumers] == [True, True]
    assert chain.layers[carried.consumers[0]].inputs.count(carried.index) == 2  # keys and values


def test_router_logits_go_to_the_loss() -> None:
    chain = decomposed("mixtral")[1]
    last = len(chain.layers) - 1
    logits = [value for value in chain.values if value.consumers == (last,) and 0 <= value.producer < last - 1]
    assert [value.shape_at(2) for value in logits] == [(2 * LENGTH, 4)]


def test_dropout_repeats_with_its_seed(run_by_layer: Callable[..., tuple[Tensor, dict[str, Tensor]]]) -> None:
    model = gpt2(dropout=0.1)
    batch = causal(3)
    chain = decompose(model, batch)
    assert sum(layer.random for layer in chain.layers) == len(chain.layers) - 1

    def run(seed: int) -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        loss, _ = run_by_layer(chain, model, batch, seed)
        return loss, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    first, again, other = run(1), run(1), run(2)
    assert torch.equal(first[0], again[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("name", ["qwen2", "mixtral"])
def test_same_as_plain_under_autocast(name: str, check_same: Callable[..., None]) -> None:
    """The chain is made under the autocast it will run under: models look at dtypes."""
    build, make_batch = MODELS[name]
    model, batch = build().train(), make_batch(2)
    with torch.autocast("cpu", torch.float16):
        chain = decompose(model, batch)
        check_same(chain, model, batch, lambda plain: plain(**batch).loss)


def test_lora(check_same: Callable[..., None]) -> None:
    model = adapted_llama().train()
    chain = decompose(model, causal(3))
    trained = [name for name, spec in chain.parameters.items() if spec.requires_grad]
    assert len(trained) == 8
    assert all("lora" in name for name in trained)
    assert not chain.values[chain.layers[0].outputs[0]].needs_grad
    for batch_size in (3, 1):
        batch = causal(batch_size)
        check_same(chain, model, batch, lambda plain, batch=batch: plain(**batch).loss)


def test_gradient_checkpointing_is_seen_through(check_same: Callable[..., None]) -> None:
    model = gpt2().train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    batch = causal(2)
    chain = decompose(model, batch)
    assert _names(chain) == _names(decomposed("gpt2")[1])
    model.gradient_checkpointing_disable()
    check_same(chain, model, batch, lambda plain: plain(**batch).loss)


def test_layerdrop_of_zero_is_no_branch() -> None:
    options = {"vocab_size": VOCABULARY, "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 1, "bos_token_id": 0}
    config = transformers.OPTConfig(**options, word_embed_proj_dim=16, num_attention_heads=2, eos_token_id=0)
    with torch.device("meta"):
        model = transformers.OPTForCausalLM(config)
    assert len(decompose(model, causal(2)).layers) == 4
    model.model.decoder.layerdrop = 0.1
    with pytest.raises(ModelError, match="set layerdrop to 0"):
        decompose(model, causal(2))


def test_untraceable_experts_are_refused_with_advice() -> None:
    with torch.device("meta"):
        model = mixtral()
    model.set_experts_implementation("eager")
    with pytest.raises(ModelError, match=r"modeling_mixtral\.py:\d+ .*set_experts_implementation\('grouped_mm'\)"):
        decompose(model, causal(2))


@pytest.mark.parametrize("use_cache", [True, False])
def test_packed_sequences_as_transformers_sees_them(use_cache: bool, check_same: Callable[..., None]) -> None:
    """Position ids that start again mean packed sequences, but transformers looks for them only without a cache."""
    model = llama(num_hidden_layers=1)
    model.config.use_cache = use_cache
    positions = torch.arange(LENGTH).remainder(LENGTH // 2).expand(2, -1).contiguous()
    batch = causal(2) | {"position_ids": positions}
    chain = decompose(model, batch)
    assert model.config.use_cache is use_cache
    check_same(chain, model, batch, lambda plain: plain(**batch).loss)


def test_a_cache_is_left_out_and_changes_the_last_bits_at_most() -> None:
    model, batch = t5(use_cache=True).train(), padded(3)
    expected = copy.deepcopy(model)
    expected(**batch).loss.backward()
    chain = decompose(model, batch)
    assert model.config.use_cache is True
    loss, _ = chain.run(dict(model.named_parameters()), dict(model.named_buffers()), batch)
    loss.backward()
    for found, plain in zip(model.parameters(), expected.parameters(), strict=True):
        assert found.grad is not None
        torch.testing.assert_close(found.grad, plain.grad, rtol=1e-5, atol=1e-6)


def _names(chain: Chain) -> list[str]:
    return [layer.name for layer in chain.layers]
