"""A checkpoint of a run -> a Hugging Face folder: safetensors shards, the config, the tokenizer if there is one."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from counterpoint.core.errors import ExecutionError
from counterpoint.core.units import format_bytes
from counterpoint.job.config_file import read_config
from counterpoint.job.folder import RunFolder, newest_checkpoint, run_of
from counterpoint.job.models import Source, build_model
from counterpoint.runtime.checkpoint import WEIGHTS, read_facts
from counterpoint.runtime.tensor_file import Stretch, read_layout, read_tensor
from counterpoint.runtime.whole_folder import whole_folder

_SHARD_BYTES = 256 << 20
_TOKENIZER_FILES = ("tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json", "spiece.model")


def export(source: Path, target: Path) -> str:
    """What was written, in a sentence. Never is more than a shard in memory."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is there already: give a new folder")
    checkpoint = newest_checkpoint(source)
    step = read_facts(checkpoint).step
    root = run_of(checkpoint)
    if root is None or not RunFolder(root).config.is_file():
        raise ValueError(f"{source} lies in no run folder, so its model is not known: export it with Trainer.export")
    config = read_config(RunFolder(root).config, {})
    model = build_model(config.model, config.vocabulary)
    found = _wanted(checkpoint / WEIGHTS, model)
    with whole_folder(target, ()) as unfinished:
        _write_shards(checkpoint / WEIGHTS, found, unfinished)
        _write_config(model, config.tokenizer, unfinished)
    size = sum(stretch.num_bytes for stretch in found.values())
    return f"{model.name} as of step {step}: {len(found)} tensors, {format_bytes(size)}, in {target}"


def _wanted(weights: Path, source: Source) -> dict[str, Stretch]:
    """Tensors that the model would save: no computed buffers, and tied ones once."""
    saved = source.model.state_dict().keys()
    found = {name: stretch for name, stretch in read_layout(weights).items() if name in saved}
    if not found:
        raise ExecutionError(f"{weights} holds no tensor of {source.name}: is it another model's?")
    return found


def _write_shards(weights: Path, found: Mapping[str, Stretch], folder: Path) -> None:
    shards = list(_shards(found))
    index: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: read_tensor(weights, found[name]) for name in names}
        save_file(tensors, folder / file, {"format": "pt"})
        (folder / file).chmod(0o644)  # safetensors writes for the owner only
        index |= dict.fromkeys(names, file)
    if len(shards) > 1:
        size = sum(stretch.num_bytes for stretch in found.values())
        data = {"metadata": {"total_size": size}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(data, indent=2) + "\n")


def _shards(found: Mapping[str, Stretch]) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, stretch in found.items():
        if names and size + stretch.num_bytes > _SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += stretch.num_bytes
    yield names


def _write_config(source: Source, tokenizer: str | None, folder: Path) -> None:
    """A model that is not from transformers has no config; its weights are all there is to write."""
    config: Any = getattr(source.model, "config", None)
    if hasattr(config, "save_pretrained"):
        config.architectures = [type(source.model).__name__]
        config.save_pretrained(folder)
    place = Path(tokenizer) if tokenizer else source.weights
    if place is not None and place.is_dir():
        for file in sorted(file for pattern in _TOKENIZER_FILES for file in place.glob(pattern)):
            shutil.copy(file, folder / file.name)
