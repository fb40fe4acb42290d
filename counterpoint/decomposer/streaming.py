"""A folder with safetensors files, as Hugging Face writes it -> its tensors by name, one at a time."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from counterpoint.core.errors import ModelError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_COMPUTED = (r"(^|\.)rotary_emb\.inv_freq$", r"(^|\.)position_ids$")  # buffers that old files still hold
_MAX_LISTED = 10


def stream_safetensors(
    folder: str | Path, names: Iterable[str], *, aliases: Mapping[str, str] | None = None, ignore: Iterable[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """The tensors called `names`, file by file, never more than one of them in memory unless the caller keeps it.

    `aliases` maps further names of tied tensors to those wanted: a file may hold a tied tensor under any of its names.
    A name may lack its first part in the file, or have one more: the files of a base model and of one with a head
    differ in that. Names in the file that nobody wants are refused, unless they match one of the patterns in `ignore`.
    """
    files = _files(Path(folder))
    keys = _keys(list(names), files, aliases or {}, [*_COMPUTED, *ignore])
    for name, key in sorted(keys.items(), key=lambda pair: files[pair[1]]):
        with safe_open(files[key], framework="pt") as file:  # opened anew: an open file keeps all it has read mapped
            tensor = file.get_tensor(key)
        yield name, tensor
        del tensor


def _files(folder: Path) -> dict[str, Path]:
    """For each name in the folder's files, the file that holds it."""
    if (folder / _INDEX).exists():
        index = json.loads((folder / _INDEX).read_text())["weight_map"]
        absent = sorted({file for file in index.values() if not (folder / file).exists()})
        if absent:
            raise ModelError(f"{folder} lacks {_listed(absent)}, which its index names: download the folder again")
        return {key: folder / file for key, file in index.items()}
    if (folder / _SINGLE).exists():
        with safe_open(folder / _SINGLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), folder / _SINGLE)
    raise ModelError(f"{folder} holds neither {_SINGLE} nor {_INDEX}: save the model with save_pretrained()")


def _keys(
    names: list[str], files: Mapping[str, Path], aliases: Mapping[str, str], ignore: Iterable[str]
) -> dict[str, str]:
    """For each wanted name, the name it has in the file."""
    others: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        others.setdefault(name, []).append(alias)
    prefixes = tuple(dict.fromkeys(key.split(".")[0] for key in files))
    found = {name: [_find(n, files, prefixes) for n in (name, *others.get(name, ()))] for name in names}
    held = {name: [key for key in keys if key is not None] for name, keys in found.items()}
    missing = [name for name, keys in held.items() if not keys]
    used = {key for keys in held.values() for key in keys}
    unwanted = [key for key in files if key not in used and not any(re.search(pattern, key) for pattern in ignore)]
    if missing or unwanted:
        problems = [f"lacks {_listed(missing)}"] * bool(missing) + [f"has unknown {_listed(unwanted)}"] * bool(unwanted)
        raise ModelError(f"the files do not fit the model: the folder {' and '.join(problems)}; is it another model's?")
    return {name: keys[0] for name, keys in held.items()}


def _find(name: str, files: Mapping[str, Path], prefixes: Iterable[str]) -> str | None:
    shorter = name.split(".", 1)[-1]
    longer = (f"{prefix}.{name}" for prefix in prefixes)
    return next((key for key in (name, shorter, *longer) if key in files), None)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_LISTED])
    return shown if len(names) <= _MAX_LISTED else f"{shown} and {len(names) - _MAX_LISTED} more"
