"""Hugging Face architectures small enough for a test, and batches for them; `options` go into the configuration."""

from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn

from tests.small_models import Batch

LENGTH = 16
VOCABULARY = 67

_LLAMA = {
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
_ENCODER = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def tokens(batch_size: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch_size, LENGTH))


def causal(batch_size: int) -> Batch:
    """Labels are not the inputs, so that neither can stand in for the other."""
    return {"input_ids": tokens(batch_size), "labels": tokens(batch_size)}


def padded(batch_size: int) -> Batch:
    mask = torch.ones(batch_size, LENGTH, dtype=torch.int64)
    mask[:, LENGTH - 5 :] = 0
    return causal(batch_size) | {"attention_mask": mask}


def images(batch_size: int) -> Batch:
    return {"pixel_values": torch.randn(batch_size, 3, 16, 16), "labels": torch.randint(0, 2, (batch_size,))}


def gpt2(dropout: float = 0.0, **options: Any) -> nn.Module:
    """Embedding and head are tied unless the options say otherwise."""
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
        use_cache=False,  # it copies keys and values, whose layout some kernels' rounding depends on
        **drops,
        **options,
    )
    return transformers.GPT2LMHeadModel(config)


def untied_gpt2() -> nn.Module:
    return gpt2(tie_word_embeddings=False)


def llama(**options: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LLAMA | options))


def qwen2(**options: Any) -> nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_LLAMA | options))


def tied_qwen2() -> nn.Module:
    return qwen2(tie_word_embeddings=True)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**_LLAMA, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True)
    return transformers.MixtralForCausalLM(config)


def bert(**options: Any) -> nn.Module:
    """Embedding and head are tied unless the options say otherwise."""
    return transformers.BertForMaskedLM(transformers.BertConfig(**_ENCODER, vocab_size=VOCABULARY, **options))


def untied_bert() -> nn.Module:
    return bert(tie_word_embeddings=False)


def t5(use_cache: bool = False) -> nn.Module:
    """The embedding has three users, the position tables of encoder and decoder one in each block.

    With a key-value cache it copies its keys, and on some processors a product with the copy rounds differently.
    """
    config = transformers.T5Config(
        num_layers=2,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_heads=4,
        vocab_size=VOCABULARY,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=use_cache,
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(**_ENCODER, image_size=16, patch_size=4, num_labels=5)
    return transformers.ViTForImageClassification(config)


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2], layer_type="bottleneck", num_labels=5
    )
    return transformers.ResNetForImageClassification(config)


def adapted_llama() -> nn.Module:
    """With LoRA adapters of which none is zero: that would hide mistakes."""
    options = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
    model = peft.get_peft_model(llama(), options)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model
