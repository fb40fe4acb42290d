"""Hugging Face models in and out: weights from folders, exports that `from_pretrained` loads, adapters."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from counterpoint import ModelError, Trainer

from .nets import assert_same, batches, tensors, trainer

SHAPE: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "loss_type": "ForCausalLM"}
LLAMA = LlamaConfig(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, **SHAPE
)
GPT2 = GPT2Config(n_layer=2, n_embd=16, n_head=2, n_positions=16, **SHAPE)
MIXTRAL = MixtralConfig(
    hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    num_local_experts=2, **SHAPE,
)  # fmt: skip
T5 = T5Config(
    d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, vocab_size=64, decoder_start_token_id=0,
    loss_type="ForConditionalGeneration",
)  # fmt: skip


def tokens(size: int = 4) -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (size, 8), generator=torch.Generator().manual_seed(4))
    return {"input_ids": ids, "labels": ids}


def train(folder: Path, model: nn.Module, steps: int = 1, **options: Any) -> Trainer:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    found = Trainer(model, optimizer, example=tokens(), memory="4GiB", disk=folder, microbatch=2, **options)
    for _ in range(steps):
        found.step(tokens())
    return found


def on_meta(kind: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        return kind(config)


def plain_loss(model: nn.Module) -> float:
    model.eval()
    with torch.no_grad():
        parts = [model(**{n: t[k : k + 2] for n, t in tokens().items()}).loss for k in (0, 2)]
    return float(torch.stack(parts).mean())


@pytest.mark.parametrize(
    ("kind", "config", "auto"),
    [
        (GPT2LMHeadModel, GPT2, AutoModelForCausalLM),
        (LlamaForCausalLM, LLAMA, AutoModelForCausalLM),
        (T5ForConditionalGeneration, T5, AutoModelForSeq2SeqLM),
        (MixtralForCausalLM, MIXTRAL, AutoModelForCausalLM),
    ],
    ids=["gpt2", "llama", "t5", "mixtral"],
)
def test_from_pretrained_loads_what_was_trained(tmp_path: Path, kind: Any, config: Any, auto: Any) -> None:
    with train(tmp_path / "disk", on_meta(kind, config)) as trained:
        trained.export(tmp_path / "model")
        expected = tensors(trained)
        loaded = auto.from_pretrained(tmp_path / "model")
        assert type(loaded) is kind
        assert_same({n: t for n, t in loaded.state_dict().items() if n in expected}, expected)
        assert expected.keys() - dict(loaded.named_buffers()).keys() == dict(loaded.named_parameters()).keys()
        loss = trained.evaluate(tokens())
    assert loss == pytest.approx(plain_loss(loaded), abs=1e-6)


def test_large_models_are_exported_in_shards(tmp_path: Path) -> None:
    with train(tmp_path / "disk", on_meta(LlamaForCausalLM, LLAMA)) as trained:
        trained.export(tmp_path / "model", max_shard="5KiB")
        expected = tensors(trained)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert index["metadata"]["total_size"] == sum(p.nbytes for n, p in expected.items() if "inv_freq" not in n)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert_same(dict(loaded.named_parameters()), expected)


def test_weights_come_from_a_folder(tmp_path: Path) -> None:
    """Tied weights and shards in it; rotary tables are in no file."""
    torch.manual_seed(6)
    model = LlamaForCausalLM(LLAMA)
    model.save_pretrained(tmp_path / "model", max_shard_size="6KB")
    with train(tmp_path / "disk", on_meta(LlamaForCausalLM, LLAMA), 0, weights=tmp_path / "model") as trained:
        assert_same(tensors(trained), {**model.state_dict(), **dict(model.named_buffers())})
        trained.step(tokens())
    with pytest.raises(ModelError, match="the files do not fit the model"):
        train(tmp_path / "disk", on_meta(GPT2LMHeadModel, GPT2), 0, weights=tmp_path / "model")
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_checkpoint_of_an_exported_model_is_the_same_model(tmp_path: Path) -> None:
    with train(tmp_path / "disk", on_meta(GPT2LMHeadModel, GPT2)) as trained:
        trained.save(tmp_path / "checkpoint")
        trained.export(tmp_path / "a")
    with train(tmp_path / "disk", on_meta(GPT2LMHeadModel, GPT2), 0, resume=tmp_path / "checkpoint") as resumed:
        resumed.export(tmp_path / "b")
        resumed.export(tmp_path / "b")  # replaced
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_plain_modules_with_tied_weights_are_loaded_by_safetensors(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
            self.down.weight = self.up.weight
            self.last = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.down(torch.relu(self.up(x))))

    with trainer(tmp_path / "disk", Tied()) as trained:
        trained.step(batches(1)[0])
        trained.export(tmp_path / "model")
        expected = tensors(trained)
    loaded = Tied()
    load_model(loaded, tmp_path / "model" / "model.safetensors")
    assert_same(dict(loaded.named_parameters()), expected)


@pytest.mark.parametrize("meta", [False, True], ids=["real", "meta"])
def test_adapters_train_alone_and_are_exported_as_peft_reads_them(tmp_path: Path, meta: bool) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    torch.manual_seed(8)
    LlamaForCausalLM(LLAMA).save_pretrained(tmp_path / "base")
    base = on_meta(LlamaForCausalLM, LLAMA) if meta else LlamaForCausalLM.from_pretrained(tmp_path / "base")
    with torch.device("meta" if meta else "cpu"):
        config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(base, config)
    with train(tmp_path / "disk", model, 2, weights=tmp_path / "base" if meta else None) as trained:
        trained.export(tmp_path / "adapter")
        frozen = {n: t for n, t in tensors(trained).items() if "lora" not in n}
        expected = {n: t for n, t in tensors(trained).items() if "lora" in n}
        loss = trained.evaluate(tokens())
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert len(load_file(tmp_path / "adapter" / "adapter_model.safetensors")) == len(expected) == 8
    loaded = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert_same(expected, loaded.state_dict())
    assert_same({n: t for n, t in frozen.items() if "inv_freq" not in n}, loaded.state_dict())
    assert loss == pytest.approx(plain_loss(loaded), abs=1e-6)
