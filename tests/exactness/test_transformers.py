"""Hugging Face models: weights, optimizer state and buffers after five steps are those of the plain loop."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from .bench import ALL_FITS, Batch, Problem, Setting, differences, train, train_plainly

LENGTH = 16
VOCABULARY = 67


def causal(batch_size: int) -> Batch:
    tokens = torch.randint(3, VOCABULARY, (batch_size, LENGTH))
    return {"input_ids": tokens, "labels": tokens.clone()}


def padded(batch_size: int) -> Batch:
    mask = torch.ones(batch_size, LENGTH, dtype=torch.int64)
    mask[:, LENGTH - 5 :] = 0
    return causal(batch_size) | {"attention_mask": mask}


def images(batch_size: int) -> Batch:
    return {"pixel_values": torch.randn(batch_size, 3, 16, 16), "labels": torch.randint(0, 2, (batch_size,))}


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
        tie_word_embeddings=False,
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
    "tie_word_embeddings": False,
}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))


def qwen2() -> nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**LLAMA))


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    return transformers.MixtralForCausalLM(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        vocab_size=VOCABULARY,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        tie_word_embeddings=False,
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
        embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2], layer_type="bottleneck", num_labels=5
    )
    return transformers.ResNetForImageClassification(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "gpt2": (gpt2, causal),
    "llama": (llama, padded),
    "qwen2": (qwen2, causal),
    "mixtral": (mixtral, causal),
    "bert": (bert, padded),
    "vit": (vit, images),
    "resnet": (resnet, images),
}

# Pairs of what matters rather than all combinations; every model meets three of them.
SETTINGS = [
    Setting("recompute", pack=1, budget=1.0, microbatch=2),
    Setting("evict", pack=2, budget=1.0, microbatch=3),
    Setting("keep", pack=3, budget=1.3, microbatch=2),
    Setting("evict", pack=1, budget=1.5, microbatch=2, schedule="plain"),
    Setting("recompute", pack=3, budget=1.2, microbatch=3, schedule="plain"),
    Setting("keep", pack=1, budget=ALL_FITS, microbatch=6),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_same_as_plain(name: str, setting: Setting, tmp_path: Path) -> None:
    problem = Problem(*MODELS[name])
    expected = train_plainly(problem, setting.microbatch)
    assert differences(train(problem, setting, tmp_path).outcome, expected) == []
