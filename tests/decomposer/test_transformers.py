"""Hugging Face models: bit for bit the loss and gradients of the plain model, at any batch size."""

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn

from counterpoint.decomposer import decompose

LENGTH = 24
VOCABULARY = 67

Batch = dict[str, Tensor]


def tokens(batch_size: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch_size, LENGTH))


def causal(batch_size: int) -> Batch:
    return {"input_ids": tokens(batch_size), "labels": tokens(batch_size)}


def padded(batch_size: int) -> Batch:
    mask = torch.ones(batch_size, LENGTH, dtype=torch.int64)
    mask[:, LENGTH - 5 :] = 0
    return causal(batch_size) | {"attention_mask": mask}


def gpt2(**options: object) -> nn.Module:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        loss_type="ForCausalLM",
        **(off | options),
    )
    return transformers.GPT2LMHeadModel(config)


LLAMA = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))


def qwen2() -> nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**LLAMA, tie_word_embeddings=True))


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    )


def bert() -> nn.Module:
    config = transformers.BertConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        num_layers=2,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_heads=4,
        vocab_size=VOCABULARY,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=5,
    )
    return transformers.ViTForImageClassification(config)


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 32], depths=[2, 2], layer_type="bottleneck", num_labels=5
    )
    return transformers.ResNetForImageClassification(config)


def images(batch_size: int) -> Batch:
    return {"pixel_values": torch.randn(batch_size, 3, 16, 16), "labels": torch.randint(0, 2, (batch_size,))}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "gpt2": (gpt2, causal),
    "gpt2 padded": (gpt2, padded),
    "llama": (llama, causal),
    "llama padded": (llama, padded),
    "qwen2": (qwen2, causal),
    "mixtral": (mixtral, causal),
    "bert": (bert, padded),
    "t5": (t5, padded),
    "vit": (vit, images),
    "resnet": (resnet, images),
}


@pytest.mark.parametrize("name", MODELS)
def test_same_as_plain(name: str, check_same: Callable[..., None]) -> None:
    build, make_batch = MODELS[name]
    model = build().train()
    chain = decompose(model, make_batch(3))
    for batch_size in (3, 5, 1):
        batch = make_batch(batch_size)
        check_same(chain, model, batch, lambda plain, batch=batch: plain(**batch).loss)
