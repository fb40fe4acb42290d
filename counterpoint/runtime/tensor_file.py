"""Tensors in memory and at home -> one safetensors file, streamed; and such a file -> where its tensors lie."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from counterpoint.core.errors import ExecutionError
from counterpoint.core.units import format_bytes
from counterpoint.runtime.file_errors import cannot
from counterpoint.runtime.home import Place
from counterpoint.runtime.share import Share
from counterpoint.runtime.store import Store

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_NAMES = {name: dtype for dtype, name in _DTYPES.items()}
_MAX_HEADER_BYTES = 100 << 20
_SMALL_BYTES = 256 << 10  # below this a copy from file to file costs more than one through memory
_CAST_ELEMENTS = 1 << 20

Source = Place | Tensor


@dataclass(frozen=True, slots=True)
class Stretch:
    """A tensor in a file."""

    offset_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def write_tensors(
    path: Path, tensors: Mapping[str, Source], store: Store, metadata: Mapping[str, str], share: Share | None = None
) -> int:
    """Write the file and make it durable; its size. What is at home is copied from file to file.

    Of several devices each writes its share; the file is whole when all of them are done.
    """
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)  # for each to be aligned
    header, offsets, size = _header(order, tensors, metadata)
    try:
        if share is None or share.first:
            _make(path, header, size)
        if share is not None:
            share.peers.barrier(f"{path.name} is there")
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            for name in order:
                if share is None or share.has(name):
                    _write(descriptor, offsets[name], tensors[name], store)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise cannot("write", path, error, f" ({format_bytes(size)})") from error
    return size


def _make(path: Path, header: bytes, size: int) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
    try:
        os.posix_fallocate(descriptor, 0, size)
        _write_all(descriptor, header, 0)
    finally:
        os.close(descriptor)


def read_layout(path: Path) -> dict[str, Stretch]:
    """Where the file's tensors lie; refuses a file that is not whole."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= _MAX_HEADER_BYTES:
                raise ExecutionError(f"{path} is torn: it does not begin with a header; use another copy")
            entries = json.loads(file.read(length))
            size = os.fstat(file.fileno()).st_size
        found = {name: _stretch(entry, 8 + length) for name, entry in entries.items() if name != "__metadata__"}
    except OSError as error:
        raise cannot("read", path, error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExecutionError(f"{path} is torn: its header cannot be read; use another copy") from error
    expected = max((s.offset_bytes + s.num_bytes for s in found.values()), default=8 + length)
    if size != expected:
        raise ExecutionError(f"{path} is torn: it has {size} bytes, its header says {expected}; use another copy")
    return found


def read_tensor(path: Path, stretch: Stretch) -> Tensor:
    """A tensor of a file, in memory."""
    with path.open("rb") as file:
        data = bytearray(os.pread(file.fileno(), stretch.num_bytes, stretch.offset_bytes))
    if not data:
        return torch.empty(stretch.shape, dtype=stretch.dtype)
    return torch.frombuffer(data, dtype=stretch.dtype).view(stretch.shape)


def copy_home(descriptor: int, stretch: Stretch, place: Place, store: Store) -> None:
    """A tensor of an open file to its place at home, whose shape is known to be the same; cast if the type is not."""
    if stretch.dtype != place.dtype:
        _cast_home(descriptor, stretch, place, store)
        return
    if stretch.num_bytes > _SMALL_BYTES:
        store.disk.copy_from(
            place.key,
            descriptor,
            stretch.offset_bytes,
            offset_bytes=place.offset_bytes,
            num_bytes=stretch.num_bytes,
        )
        return
    if stretch.num_bytes:
        store.write_place(place.key, place.offset_bytes, _read(descriptor, stretch).view(torch.uint8))


def _read(descriptor: int, stretch: Stretch) -> Tensor:
    data = os.pread(descriptor, stretch.num_bytes, stretch.offset_bytes)
    if len(data) != stretch.num_bytes:
        raise ExecutionError(f"the file copied from ends {stretch.num_bytes - len(data)} bytes early: it is torn")
    return torch.frombuffer(bytearray(data), dtype=stretch.dtype)


def _cast_home(descriptor: int, stretch: Stretch, place: Place, store: Store) -> None:
    count = prod(stretch.shape)
    for start in range(0, count, _CAST_ELEMENTS):
        size = min(_CAST_ELEMENTS, count - start)
        part = Stretch(stretch.offset_bytes + start * stretch.dtype.itemsize, (size,), stretch.dtype)
        content = _read(descriptor, part).to(place.dtype).view(torch.uint8)
        store.write_place(place.key, place.offset_bytes + start * place.dtype.itemsize, content)


def _header(
    order: list[str], tensors: Mapping[str, Source], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int], int]:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offsets: dict[str, int] = {}
    end = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise ExecutionError(f"tensor {name!r} is {tensor.dtype}, which safetensors files cannot hold")
        offsets[name], end = end, end + prod(tensor.shape) * tensor.dtype.itemsize
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: start + o for name, o in offsets.items()}, start + end


def _write(descriptor: int, offset: int, source: Source, store: Store) -> None:
    if isinstance(source, Place):
        if source.num_bytes > _SMALL_BYTES:
            store.disk.copy_to(
                source.key, descriptor, offset, offset_bytes=source.offset_bytes, num_bytes=source.num_bytes
            )
            return
        source = store.read_place(source.key, source.offset_bytes, source.shape, source.dtype)
    if source.numel():
        _write_all(descriptor, source.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data, offset)


def _write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def _stretch(entry: dict[str, object], start: int) -> Stretch:
    begin, end = entry["data_offsets"]  # type: ignore[misc]
    found = Stretch(start + begin, tuple(entry["shape"]), _NAMES[str(entry["dtype"])])  # type: ignore[has-type,arg-type]
    if found.num_bytes != end - begin:  # type: ignore[has-type]
        raise ValueError("offsets and shape differ")
    return found
