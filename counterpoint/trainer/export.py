"""The weights at home -> safetensors in the layout that Hugging Face's `from_pretrained` reads."""

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from counterpoint.runtime.home import parameter_places
from counterpoint.runtime.share import Share, written_folder
from counterpoint.runtime.store import Store
from counterpoint.runtime.tensor_file import Source, write_tensors

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"


def export_model(
    folder: Path,
    model: nn.Module,
    store: Store,
    buffers: Mapping[str, Tensor],
    max_shard_bytes: int,
    share: Share | None = None,
) -> None:
    """Whole or not at all. Tied tensors are stored once; of a model with adapters, the adapters."""
    everything: dict[str, Source] = {**parameter_places(store.frame, store.names), **buffers}
    aliases = store.frame.chain.aliases
    with written_folder(folder, (SINGLE, INDEX, ADAPTER), share) as unfinished:
        if hasattr(model, "peft_config"):
            _export_adapters(unfinished, model, everything, store, share)
            return
        names = dict.fromkeys(aliases.get(name, name) for name in model.state_dict(keep_vars=True))
        tensors = {name: everything[name] for name in names if name in everything}
        metadata = {"format": "pt"}
        if not hasattr(model, "config"):
            metadata |= {alias: name for alias, name in aliases.items() if name in tensors}
        _write_shards(unfinished, _shards(tensors, max_shard_bytes), store, metadata, share)
        if share is None or share.first:
            _save_config(unfinished, model, tensors)


def _shards(tensors: Mapping[str, Source], max_bytes: int) -> list[dict[str, Source]]:
    shards: list[dict[str, Source]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        num_bytes = _num_bytes(tensor)
        if shards[-1] and size + num_bytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += num_bytes
    return shards


def _write_shards(
    folder: Path, shards: list[dict[str, Source]], store: Store, metadata: Mapping[str, str], share: Share | None
) -> None:
    if len(shards) == 1:
        write_tensors(folder / SINGLE, shards[0], store, metadata, share)
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_tensors(folder / file, shard, store, metadata, share)
        places |= dict.fromkeys(shard, file)
    total = sum(_num_bytes(tensor) for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    if share is None or share.first:
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _save_config(folder: Path, model: Any, tensors: Mapping[str, Source]) -> None:
    if not hasattr(getattr(model, "config", None), "save_pretrained"):
        return
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    dtypes = [tensor.dtype for tensor in tensors.values() if tensor.dtype.is_floating_point]
    config.dtype = dtypes[0] if dtypes else None
    config.save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None and model.can_generate():
        generation.save_pretrained(folder)


def _export_adapters(
    folder: Path, model: Any, everything: Mapping[str, Source], store: Store, share: Share | None
) -> None:
    """One adapter, under the names and with the config that peft gives it."""
    from peft import get_peft_model_state_dict

    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    kept = get_peft_model_state_dict(model, state_dict=parameters, save_embedding_layers=False)
    tensors = {exported: everything[names[id(parameter)]] for exported, parameter in kept.items()}
    names_of = {exported: names[id(parameter)] for exported, parameter in kept.items()}
    write_tensors(folder / ADAPTER, tensors, store, {"format": "pt"}, None if share is None else share.under(names_of))
    if share is None or share.first:
        model.peft_config[model.active_adapter].save_pretrained(str(folder))


def _num_bytes(tensor: Source) -> int:
    return tensor.nbytes if isinstance(tensor, Tensor) else tensor.num_bytes
