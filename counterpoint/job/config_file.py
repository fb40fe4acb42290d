"""A YAML file and flags -> Config, and back: unknown keys, wrong types and bad values are refused by name."""

import math
import types
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from counterpoint.job.config import OPTIONS, Config

TYPES: dict[str, Any] = get_type_hints(Config)
_OTHER_WORDS = {
    "lr": "learning_rate", "batch_size": "minibatch", "batch": "minibatch", "micro_batch_size": "microbatch",
    "max_steps": "steps", "seq_len": "sequence_length", "block_size": "sequence_length", "dtype": "precision",
    "clip": "max_grad_norm", "gradient_clipping": "max_grad_norm", "output_dir": "run", "dataset": "data",
    "budget": "memory", "vocab_size": "vocabulary", "lr_scheduler": "decay", "eval_every": "evaluate_every",
}  # fmt: skip


def read_config(file: str | Path | None, flags: Mapping[str, Any]) -> Config:
    """The file's values with the flags over them, each checked against the type of its field."""
    given = _load(Path(file)) if file is not None else {}
    where = str(file)
    refuse_unknown(given, where)
    values = {name: _typed(TYPES[name], value, f"{where}: {name}") for name, value in given.items()}
    values |= {name: _typed(TYPES[name], value, name) for name, value in flags.items()}
    return Config(**values)


def refuse_unknown(given: Mapping[str, Any], where: str) -> None:
    unknown = [str(key) for key in given if key not in OPTIONS]
    if unknown:
        raise ValueError(f"{where}: unknown key{'s' * (len(unknown) > 1)} {', '.join(map(_hint, unknown))}")


def config_text(config: Config) -> str:
    """The resolved config as YAML, in the order of the fields."""
    import yaml

    values = {name: getattr(config, name) for name in OPTIONS}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    text = yaml.safe_dump(plain, sort_keys=False, default_flow_style=None, allow_unicode=True)
    return str(text)


def _hint(key: str) -> str:
    close = [_OTHER_WORDS[key]] if key in _OTHER_WORDS else get_close_matches(key, OPTIONS, n=1, cutoff=0.4)
    return f"{key!r} (did you mean {close[0]!r}?)" if close else repr(key)


def _load(path: Path) -> dict[Any, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold keys and values, such as 'steps: 100', not {type(found).__name__}")
    return found


def _typed(kind: Any, value: Any, where: str) -> Any:
    """`value` as a `kind`. Text is read as a number where a number is due: YAML takes 3e-4 for text."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        return _typed(next(a for a in arguments if a is not type(None)), value, where)
    if origin is tuple:
        return _pair(value, where)
    if kind is str:
        return _text(value, where)
    if kind is bool:
        return _truth(value, where)
    return _number(kind, value, where)


def _pair(value: Any, where: str) -> tuple[float, ...]:
    items = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)) or len(items) != 2:
        raise ValueError(f"{where} must be two numbers, such as 0.9, 0.95, not {value!r}")
    return tuple(_number(float, item, where) for item in items)


def _text(value: Any, where: str) -> str:
    if isinstance(value, (str, Path)) or (isinstance(value, int) and where.endswith("memory")):
        return str(value)
    raise ValueError(f"{where} must be text, not {value!r}")


def _truth(value: Any, where: str) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(f"{where} must be true or false, not {value!r}")


def _number(kind: Any, value: Any, where: str) -> Any:
    name = "a whole number" if kind is int else "a number"
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{where} must be {name}, not {value!r}")
    if kind is int and isinstance(value, float) and not value.is_integer():
        raise ValueError(f"{where} must be {name}, not {value!r}")
    try:
        number = kind(value)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{where} must be {name}, not {value!r}") from error
    if not math.isfinite(number):
        raise ValueError(f"{where} must be finite, not {value!r}")
    return number
