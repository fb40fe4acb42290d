"""Frozen dataclasses into JSON and back; unknown, missing or mistyped keys are refused by name."""

import json
import types
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from counterpoint.core.units import parse_bytes

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Plain JSON data; fields at their default are left out."""
    if is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: to_json(getattr(value, field.name))
            for field in fields(value)
            if field.default is MISSING or getattr(value, field.name) != field.default
        }
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    return value


def from_json(kind: type[T], data: Any, where: str) -> T:
    """`data` as a `kind`; `where` names the place in errors, which are ValueErrors."""
    result = _read(kind, data, where)
    assert isinstance(result, kind)
    return result


def load(kind: type[T], path: str | Path) -> T:
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    return from_json(kind, data, str(path))


def save(value: Any, path: str | Path) -> None:
    Path(path).write_text(json.dumps(to_json(value), indent=1) + "\n")


def _read(kind: Any, data: Any, where: str) -> Any:
    if is_dataclass(kind):
        return _read_fields(kind, data, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        return _read_tuple(arguments, data, where)
    if origin in (Union, types.UnionType):
        if data is None and type(None) in arguments:
            return None
        return _read(next(a for a in arguments if a is not type(None)), data, where)
    if kind is int and isinstance(data, str) and where.endswith(("bytes", "bytes_per_s")):
        return parse_bytes(data)
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise ValueError(f"{where} must be {_name(kind)}, not {data!r}")
    return data


def _read_fields(kind: Any, data: Any, where: str) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{where} must be an object with keys {_keys(kind)}, not {type(data).__name__}")
    hints = get_type_hints(kind)
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise ValueError(f"{where} has unknown keys {', '.join(unknown)}; known are {_keys(kind)}")
    missing = [f.name for f in fields(kind) if f.name not in data and f.default is MISSING]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    values = {name: _read(hints[name], item, f"{where}: {name}") for name, item in data.items()}
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _read_tuple(arguments: tuple[Any, ...], data: Any, where: str) -> Any:
    if not isinstance(data, list):
        raise ValueError(f"{where} must be a list, not {data!r}")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_read(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if len(arguments) != len(data):
        raise ValueError(f"{where} must have {len(arguments)} items, not {len(data)}")
    pairs = zip(arguments, data, strict=True)
    return tuple(_read(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(pairs))


def _keys(kind: Any) -> str:
    return ", ".join(field.name for field in fields(kind))


def _name(kind: Any) -> str:
    return {int: "a whole number", str: "text", bool: "true or false"}.get(kind, str(kind))
