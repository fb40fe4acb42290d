"""Whole runs on models and data of one's own, and their weights as others read them."""

import json
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file

from counterpoint.core.errors import ExecutionError
from counterpoint.job.config import Config
from counterpoint.job.exporting import export
from counterpoint.job.folder import RunFolder
from counterpoint.job.report import report
from counterpoint.job.run import train

WORDS = {"<end>": 0, "<unknown>": 1} | {f"w{number}": number + 2 for number in range(50)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder with a model and a tokenizer."""
    config = transformers.GPT2Config(
        vocab_size=60, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    place = tmp_path / "model"
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(place)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return place


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "lines.jsonl"
    texts = (" ".join(f"w{(start * step) % 50}" for step in range(20)) for start in range(60))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def config_for(root: Path, model: str, data: Path, **more: object) -> Config:
    small = {"memory": "2GiB", "steps": 2, "minibatch": 2, "sequence_length": 8, "trace": False}
    return Config(model=model, data=str(data), run=str(root), **(small | more))  # type: ignore[arg-type]


def test_a_folder_is_trained_on_and_written_back(
    folder: Path, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, out = tmp_path / "run", tmp_path / "out"
    assert train(config_for(root, str(folder), lines)) == 0
    monkeypatch.setattr("counterpoint.job.exporting._SHARD_BYTES", 8000)
    assert export(root, out).startswith("model as of step 2: ")
    saved = load_file(root / "checkpoints" / "step-2" / "weights.safetensors")
    loaded, facts = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(facts[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert type(loaded).__name__ == "GPT2LMHeadModel"
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, saved[name]), name
    before = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert not torch.equal(before.transformer.wte.weight, loaded.transformer.wte.weight)
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    with pytest.raises(ValueError, match="is there already"):
        export(root, out)
    for word in ("model, 2 of 2 steps", "state", "checkpoints/step-2"):
        assert word in report(root)


def test_dropout_and_a_loss_of_a_folder_are_those_of_the_model(folder: Path, lines: Path, tmp_path: Path) -> None:
    """The first loss is near the model's own on the same samples: nothing is lost on the way from its files."""
    from counterpoint.job.data import open_data

    config = config_for(tmp_path / "run", str(folder), lines, steps=1)
    assert train(config) == 0
    data = open_data(config, 60, folder, tmp_path / "cache")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = float(model(**data.training.batch(0, 2)).loss)
    found = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["loss"]
    assert found == pytest.approx(expected, rel=0.05)


FUNCTION = """
import torch

class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(256, 8)
        self.hidden = torch.nn.Linear(8, 16)
        self.head = torch.nn.Linear(16, 256)
    def forward(self, input_ids):
        return self.head(torch.relu(self.hidden(self.embed(input_ids))))

def on_meta():
    with torch.device("meta"):
        return Tiny()
"""


def test_a_function_of_ones_own(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine_to_run.py").write_text(FUNCTION)
    monkeypatch.syspath_prepend(str(tmp_path))
    root = tmp_path / "run"
    config = config_for(root, "mine_to_run:on_meta", lines, steps=12, learning_rate=0.05, decay="constant")
    assert train(config) == 0
    losses = [json.loads(line)["loss"] for line in (root / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 0.5
    export(root, tmp_path / "out")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {
        f"{part}.{kind}"
        for part in ("embed", "hidden", "head")
        for kind in ("weight", "bias")
        if part + kind != "embedbias"
    }


def test_other_data_is_refused_where_a_run_goes_on(folder: Path, lines: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert train(config_for(root, str(folder), lines, steps=1)) == 0
    lines.write_text(lines.read_text().replace("w7", "w8"))
    more = config_for(root, str(folder), lines, resume="last")
    for _ in range(2):
        with pytest.raises(ExecutionError, match=r"the data is not what .*step-1 was trained on"):
            train(more)
    assert RunFolder(root).last_checkpoint() == RunFolder(root).checkpoint(1)


def test_a_run_at_its_end_has_nothing_to_do(folder: Path, lines: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert train(config_for(root, str(folder), lines, steps=1)) == 0
    with pytest.raises(ValueError, match="is at step 1 already"):
        train(config_for(root, str(folder), lines, steps=1, resume="last"))


def test_products_that_would_kill_the_process_are_refused(
    folder: Path, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("counterpoint.job.setup.gemm_works", lambda dtype: dtype is not torch.bfloat16)
    with pytest.raises(ExecutionError, match="products in bf16 kill a process on this machine"):
        train(config_for(tmp_path / "run", str(folder), lines, precision="bf16"))
    assert not (tmp_path / "run").exists()


def test_a_torn_checkpoint_is_named_and_not_exported(folder: Path, lines: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert train(config_for(root, str(folder), lines, steps=1)) == 0
    weights = root / "checkpoints" / "step-1" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ExecutionError, match="is torn"):
        export(root, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ExecutionError, match="is torn"):
        train(config_for(root, str(folder), lines, resume="last"))
