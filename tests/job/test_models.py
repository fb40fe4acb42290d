"""Models by name, by folder and by function, and what is said of those that cannot be had."""

from pathlib import Path

import pytest
import torch
import transformers
from transformers.loss.loss_utils import ForCausalLMLoss

from counterpoint.core.errors import ModelError
from counterpoint.job.models import build_model, builtin_models, next_token_loss
from counterpoint.planner.catalog import shape


@pytest.mark.parametrize("name", ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "llama-8b"])
def test_built_in_models_have_their_published_size_and_take_no_memory(name: str) -> None:
    source = build_model(name)
    published = shape("gpt2-small" if name == "gpt2" else name).num_parameters
    assert sum(parameter.numel() for parameter in source.model.parameters()) == published
    assert {parameter.device.type for parameter in source.model.parameters()} == {"meta"}
    assert source.weights is None
    assert source.model.training


def test_every_name_is_listed() -> None:
    assert {"gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "llama-tiny"} <= set(builtin_models())


def test_a_vocabulary_of_ones_own() -> None:
    assert build_model("tiny", 300).vocabulary == 300
    assert build_model("tiny", 300).model.get_input_embeddings().num_embeddings == 300


def test_built_in_models_have_no_dropout() -> None:
    model = build_model("tiny").model
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} <= {0.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_gives_a_model_without_memory_and_the_place_of_its_weights(folder: Path) -> None:
    source = build_model(str(folder))
    assert (source.weights, source.vocabulary, source.name) == (folder, 64, "model")
    assert {parameter.device.type for parameter in source.model.parameters()} == {"meta"}


def test_refused_folders(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"vocabulary is for built-in models"):
        build_model(str(folder), 300)
    next(folder.glob("*.safetensors")).unlink()
    with pytest.raises(ValueError, match=r"has no \.safetensors file"):
        build_model(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot read .*config\.json"):
        build_model(str(folder))
    (folder / "config.json").write_text('{"model_type": "none-such"}')
    with pytest.raises(ValueError, match=r"cannot read .*config\.json"):
        build_model(str(folder))
    with pytest.raises(ValueError, match=r"it has no config\.json"):
        build_model(str(tmp_path))


FUNCTIONS = """
import torch

class Logits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(32, 8)
        self.head = torch.nn.Linear(8, 32)
    def forward(self, input_ids):
        return self.head(self.embed(input_ids))

class Losing(Logits):
    def forward(self, input_ids, labels):
        return torch.nn.functional.cross_entropy(super().forward(input_ids).flatten(0, 1), labels.flatten())

def text():
    return "a model"

def broken():
    raise RuntimeError("no luck")
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_for_test.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    monkeypatch.delitem(__import__("sys").modules, "mine_for_test", raising=False)


@pytest.mark.usefixtures("module")
def test_a_function_gives_a_model_and_the_loss_it_lacks() -> None:
    source = build_model("mine_for_test:Logits")
    assert (source.vocabulary, source.loss) == (32, next_token_loss)
    assert build_model("mine_for_test:Losing").loss is None


def test_the_loss_is_that_of_transformers() -> None:
    tokens, logits = torch.randint(0, 32, (2, 6)), torch.randn(2, 6, 32)
    expected = ForCausalLMLoss(logits, tokens, 32)
    assert torch.equal(next_token_loss(logits, {"labels": tokens}), expected)


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2-mediun", "unknown model 'gpt2-mediun' (did you mean gpt2-medium?)"),
        ("bert-large", "unknown model 'bert-large'"),
        ("absent_module:f", "cannot import 'absent_module'"),
        ("mine_for_test:Logit", "has no function 'Logit'"),
        ("mine_for_test:text", "returned a str, not an nn.Module"),
        ("mine_for_test:broken", "failed: RuntimeError: no luck"),
    ],
)
def test_refused_names(name: str, message: str) -> None:
    with pytest.raises((ValueError, ModelError)) as caught:
        build_model(name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
