"""A name, a local Hugging Face folder or module:function -> a model, built-in ones on the meta device."""

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from counterpoint.core.errors import ModelError
from counterpoint.core.units import format_count
from counterpoint.planner.names import nearest
from counterpoint.planner.shapes import SHAPES, Transformer

Loss = Callable[[Any, Any], Tensor]

# Shapes people train that the planner's catalog, made for forecasts, does not list.
_MORE_SHAPES = (
    Transformer("gpt2-bytes", "gpt2", 12, 1024, 16, 256, 1024),
    Transformer("llama-tiny", "llama", 4, 128, 4, 256, 512, mlp_width=352, num_key_value_heads=2),
    Transformer("llama-160m", "llama", 12, 768, 12, 32000, 2048, mlp_width=3072, tied=False),
    Transformer("llama-1b", "llama", 16, 2048, 32, 128256, 2048, mlp_width=8192, num_key_value_heads=8),
)
_SHAPES = {shape.name: shape for shape in (*SHAPES, *_MORE_SHAPES) if shape.style != "bert"}
_SHAPES = {"gpt2": _SHAPES["gpt2-small"], **_SHAPES}


@dataclass(frozen=True)
class Source:
    """A model and where its weights come from: `weights` is a folder, None where they are initialised.

    `loss` is None where the model computes it from labels. `max_length` is the longest sequence it takes, if it says.
    """

    model: nn.Module
    name: str
    weights: Path | None = None
    loss: Loss | None = None
    vocabulary: int | None = None
    max_length: int | None = None


def builtin_models() -> dict[str, str]:
    """Names that `train` knows, and what they are."""
    return {
        name: f"{format_count(shape.num_parameters)} parameters, {shape.num_blocks} blocks x {shape.width}"
        for name, shape in _SHAPES.items()
    }


def shape_of(name: str) -> Transformer:
    """Of a built-in model."""
    return _SHAPES[name]


def is_built_in(name: str) -> bool:
    return name in _SHAPES


def build_model(name: str, vocabulary: int | None = None) -> Source:
    """Reads nothing but local files."""
    if name in _SHAPES:
        return _built_in(name, vocabulary)
    if vocabulary is not None:
        raise ValueError(f"vocabulary is for built-in models; {name!r} brings its own")
    if Path(name).is_dir():
        return _from_folder(Path(name))
    if ":" in name:
        return _from_function(name)
    raise ValueError(
        f"unknown model {name!r}{nearest(name, _SHAPES)}; give a built-in name ({', '.join(_SHAPES)}), "
        f"a local Hugging Face folder, or module:function"
    )


def next_token_loss(output: Any, batch: Any) -> Tensor:
    """Mean cross-entropy of each next token, for models that return logits only."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise ModelError(
            "the model takes no labels and returns no logits of shape (samples, tokens, vocabulary): "
            "let its forward take labels and return the loss"
        )
    predicted, wanted = logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
    return nn.functional.cross_entropy(predicted.float(), wanted)


def _built_in(name: str, vocabulary: int | None) -> Source:
    shape = replace(_SHAPES[name], vocabulary=vocabulary or _SHAPES[name].vocabulary)
    config = _gpt2_config(shape) if shape.style == "gpt2" else _llama_config(shape)
    model = _on_meta(config, name)
    return Source(model, name, vocabulary=shape.vocabulary, max_length=config.max_position_embeddings)


def _gpt2_config(shape: Transformer) -> Any:
    """As published, without dropout."""
    return _transformers().GPT2Config(
        vocab_size=shape.vocabulary, n_positions=1024, n_embd=shape.width, n_layer=shape.num_blocks,
        n_head=shape.num_heads, n_inner=shape.feed_width, tie_word_embeddings=shape.tied,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip


def _llama_config(shape: Transformer) -> Any:
    return _transformers().LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.feed_width,
        num_hidden_layers=shape.num_blocks, num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.key_value_heads, max_position_embeddings=max(shape.sequence_length, 4096),
        tie_word_embeddings=shape.tied, bos_token_id=None, eos_token_id=None, use_cache=False,
    )  # fmt: skip


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ModelError(
            "built-in models and Hugging Face folders need the package transformers: pip install transformers"
        ) from error


def _on_meta(config: Any, name: str) -> nn.Module:
    config.use_cache = False
    try:
        with torch.device("meta"):
            model = _transformers().AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError, ImportError, AttributeError, RuntimeError) as error:
        raise ModelError(f"{name} is not a causal language model that can be built: {_first_line(error)}") from error
    if getattr(model, "loss_type", "") is None:  # transformers knows the loss by the name of the class, and not all
        model.loss_type = "ForCausalLM"
    assert isinstance(model, nn.Module)
    return model.train()


def _from_folder(folder: Path) -> Source:
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    try:
        config = _transformers().AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"cannot read {folder / 'config.json'}: {_first_line(error)}") from error
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} has no .safetensors file: save the model with save_pretrained first")
    text = config.get_text_config()
    return Source(
        _on_meta(config, str(folder)), folder.resolve().name, weights=folder, vocabulary=text.vocab_size,
        max_length=getattr(text, "max_position_embeddings", None),
    )  # fmt: skip


def _from_function(name: str) -> Source:
    """The function is called without arguments, modules beside the current folder included."""
    module_name, _, function_name = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(f"cannot import {module_name!r} of model {name!r}: {_first_line(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"{module_name!r} has no function {function_name!r}{nearest(function_name, names)}")
    try:
        model = function()
    except Exception as error:
        raise ModelError(f"{name} failed: {type(error).__name__}: {_first_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{name} returned a {type(model).__name__}, not an nn.Module")
    return Source(model, name, loss=_loss_for(model), vocabulary=_vocabulary(model))


def _loss_for(model: nn.Module) -> Loss | None:
    taken = inspect.signature(model.forward).parameters.values()
    takes_labels = any(p.name == "labels" or p.kind is inspect.Parameter.VAR_KEYWORD for p in taken)
    return None if takes_labels else next_token_loss


def _vocabulary(model: nn.Module) -> int | None:
    """Of a model with a Hugging Face config, else the rows of its first embedding."""
    found = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(found, int):
        return found
    return next((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), None)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
