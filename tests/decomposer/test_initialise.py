"""Initial tensors for models on meta: by the model's own rules, the same whatever else happens."""

import math
import weakref
from collections.abc import Callable

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn

from counterpoint.core.errors import ModelError
from counterpoint.decomposer import initialise

LLAMA = transformers.LlamaConfig(
    num_hidden_layers=2, hidden_size=64, intermediate_size=96, num_attention_heads=4, vocab_size=300, bos_token_id=0
)
GPT2 = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=300, n_positions=32, bos_token_id=0)
GPT2.eos_token_id = 0
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: transformers.LlamaForCausalLM(LLAMA),
    "gpt2": lambda: transformers.GPT2LMHeadModel(GPT2),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(num_hidden_layers=1, hidden_size=64, intermediate_size=96, num_attention_heads=4)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(num_layers=1, d_model=64, d_kv=16, d_ff=96, num_heads=4, vocab_size=300)
    ),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(num_hidden_layers=1, hidden_size=64, intermediate_size=96, num_attention_heads=4)
    ),
    "resnet": lambda: transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=16, hidden_sizes=[32], depths=[1])
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            num_hidden_layers=1, hidden_size=64, intermediate_size=96, num_attention_heads=4, vocab_size=300
        )
    ),
    "attention": lambda: nn.TransformerEncoderLayer(64, 4, 96),
}


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name]()


def named(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()} | dict(model.named_buffers())


@pytest.mark.parametrize("name", MODELS)
def test_as_the_model_does_it(name: str) -> None:
    """The same names, shapes, dtypes and distributions as a model that was built for real; buffers equal."""
    torch.manual_seed(0)
    real = named(MODELS[name]())
    model = on_meta(name)
    made = dict(initialise(model, seed=1))
    assert made.keys() == real.keys()
    buffers = dict(model.named_buffers())
    for key, tensor in made.items():
        assert (tensor.shape, tensor.dtype) == (real[key].shape, real[key].dtype), key
        if key in buffers or tensor.float().std() == 0 or real[key].float().std() == 0:
            assert torch.equal(tensor, real[key]), key
        elif tensor.numel() > 500:
            ratio = tensor.float().std() / real[key].float().std()
            assert math.isclose(ratio, 1, abs_tol=0.2), f"{key}: {tensor.std()} is not {real[key].std()}"
    assert all(tensor.is_meta for tensor in named(model).values())


def test_depends_on_the_seed_and_on_nothing_else() -> None:
    first = dict(initialise(on_meta("gpt2"), seed=1))
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    again = {}
    for name, tensor in initialise(on_meta("gpt2"), seed=1):
        assert torch.equal(torch.random.get_rng_state(), state)
        again[name] = tensor
    other = dict(initialise(on_meta("gpt2"), seed=2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["transformer.wte.weight"], other["transformer.wte.weight"])
    assert not torch.equal(first["transformer.h.0.mlp.c_fc.weight"], first["transformer.h.1.mlp.c_fc.weight"])


def test_real_tensors_are_yielded_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2, device="meta"))
    made = dict(initialise(model, seed=0))
    assert torch.equal(made["0.weight"], model[0].weight)
    assert not made["1.weight"].is_meta


def test_lora_starts_at_zero() -> None:
    model = on_meta("llama")
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]), low_cpu_mem_usage=True)
    made = dict(initialise(model, seed=0))
    assert made.keys() == named(model).keys()
    assert all(not tensor.any() for name, tensor in made.items() if "lora_B" in name)
    assert all(tensor.std() > 0 for name, tensor in made.items() if "lora_A" in name)


class Table(nn.Module):
    """A buffer computed when the module is built."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(4.0).sqrt())


class TableWithRule(Table):
    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(4.0).sqrt())


def test_module_without_a_rule_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Table())
    with pytest.raises(ModelError, match=r"module '1' \(Table\) does not say how to initialise table"):
        list(initialise(model, seed=0))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), TableWithRule())
    assert torch.equal(dict(initialise(model, seed=0))["1.table"], torch.arange(4.0).sqrt())


def test_holds_one_module_at_a_time() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    seen: list[weakref.ref[Tensor]] = []
    for name, tensor in initialise(model, seed=0):
        if name.endswith("weight"):
            assert all(earlier() is None for earlier in seen)
        seen.append(weakref.ref(tensor))
        del tensor
    assert len(seen) == 6
