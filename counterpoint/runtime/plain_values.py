"""Numbers, strings, tuples, dicts and small tensors -> JSON, and back the same."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

_MAX_TENSOR_ELEMENTS = 1 << 16


def encode(value: Any, where: str) -> Any:
    """`where` names the value in the error for one that has no plain form.

    >>> decode(encode({"betas": (0.9, 0.95), "on": None}, "group")) == {"betas": (0.9, 0.95), "on": None}
    True
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [encode(item, f"{where}[{i}]") for i, item in enumerate(value)]}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[encode(k, where), encode(v, f"{where}[{k!r}]")] for k, v in value.items()]}
    if isinstance(value, Tensor) and value.numel() <= _MAX_TENSOR_ELEMENTS:
        return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    raise ValueError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold; "
        "use numbers, strings, tuples, lists, dicts and small tensors"
    )


def decode(data: Any) -> Any:
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    if "tensor" in data:
        return torch.tensor(data["tensor"], dtype=getattr(torch, data["dtype"]))
    ((kind, items),) = data.items()
    if kind == "tuple":
        return tuple(decode(item) for item in items)
    pairs = {decode(key): decode(item) for key, item in items}
    return Counter(pairs) if kind == "counter" else pairs
