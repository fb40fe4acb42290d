"""Tensors from Hugging Face folders, one at a time: single files and shards, ties, prefixes, refusals."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

from counterpoint.core.errors import ModelError
from counterpoint.decomposer import stream_safetensors
from counterpoint.decomposer.tensors import read_tensors


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=8, bos_token_id=0)
    config.eos_token_id = 0
    return transformers.GPT2LMHeadModel(config)


def write(folder: Path, model: nn.Module, **options: object) -> None:
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder, **options)


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_whole_model(tmp_path: Path, shard: str) -> None:
    model = gpt2()
    write(tmp_path, model, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
    wanted = dict(model.named_parameters())
    found = dict(stream_safetensors(tmp_path, wanted, aliases=read_tensors(model).aliases))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_tied_tensor_under_its_other_name(tmp_path: Path) -> None:
    save_file({"lm_head.weight": torch.ones(3, 2), "norm": torch.zeros(2)}, tmp_path / "model.safetensors")
    aliases = {"lm_head.weight": "embed.weight"}
    found = dict(stream_safetensors(tmp_path, ["embed.weight", "norm"], aliases=aliases))
    assert torch.equal(found["embed.weight"], torch.ones(3, 2))


@pytest.mark.parametrize(("stored", "wanted"), [("h.0.weight", "transformer.h.0.weight"), ("m.h.weight", "h.weight")])
def test_prefix_of_the_base_model(tmp_path: Path, stored: str, wanted: str) -> None:
    save_file({stored: torch.ones(2)}, tmp_path / "model.safetensors")
    assert [name for name, _ in stream_safetensors(tmp_path, [wanted])] == [wanted]


def test_missing_and_unknown_names_are_listed(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1), "b": torch.ones(1), "x.position_ids": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="lacks c and has unknown b"):
        list(stream_safetensors(tmp_path, ["a", "c"]))
    assert [name for name, _ in stream_safetensors(tmp_path, ["a"], ignore=["^b$"])] == ["a"]
    many = [f"n{i}" for i in range(12)]
    with pytest.raises(ModelError, match="n9 and 2 more"):
        list(stream_safetensors(tmp_path, ["a", "b", *many]))


def test_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        list(stream_safetensors(tmp_path, ["a"]))
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(ModelError, match=r"lacks gone\.safetensors"):
        list(stream_safetensors(tmp_path, ["a"]))
