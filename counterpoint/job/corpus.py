"""Token files -> windows of tokens, read when they are needed, so that no data stays in memory.

They are read, not memory-mapped: touched pages of a mapping would count against the budget.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from counterpoint.core.errors import ExecutionError
from counterpoint.job.encoders import Tokens
from counterpoint.job.sources import SourceFile

_LOOKED_AT_BYTES = 1 << 30
_BLOCK_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one type, one after the other, from `offset` bytes into a file."""

    path: Path
    offset: int
    num_tokens: int
    dtype: str


class Corpus:
    """Tokens of all pieces, cut into windows of `length`; what is left of a piece behind its last window is unused."""

    def __init__(self, pieces: Sequence[Piece], length: int, digest: str) -> None:
        self.pieces = tuple(pieces)
        self.length = length
        self.digest = digest
        self._ends = list(accumulate(piece.num_tokens // length for piece in pieces))
        self._files: list[int] = []
        for piece in pieces:
            self._files.append(os.open(piece.path, os.O_RDONLY))

    @property
    def num_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.pieces)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def window(self, index: int) -> Tokens:
        number = int(np.searchsorted(self._ends, index, side="right"))
        piece = self.pieces[number]
        within = index - (self._ends[number - 1] if number else 0)
        size = np.dtype(piece.dtype).itemsize * self.length
        read = os.pread(self._files[number], size, piece.offset + within * size)
        if len(read) < size:
            raise ExecutionError(f"{piece.path} became shorter while it was read: window {within} is not whole")
        return np.frombuffer(read, dtype=piece.dtype).astype(np.int64)

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())


def token_corpus(files: Sequence[SourceFile], dtype: str, vocabulary: int | None, length: int) -> Corpus:
    """Token files as they are: .npy says its type, .bin is uint16 unless the vocabulary needs more."""
    usual = "uint32" if vocabulary is not None and vocabulary > 1 << 16 else "uint16"
    pieces = [
        _npy(file) if file.path.suffix == ".npy" else _bin(file, usual if dtype == "auto" else dtype) for file in files
    ]
    if dtype == "auto":
        _refuse_mistaken_type(pieces)
    if vocabulary is not None:
        _refuse_unknown_tokens(pieces, vocabulary)
    facts = [(piece.path.name, piece.num_tokens, piece.dtype) for piece in pieces]
    return Corpus(pieces, length, hashlib.blake2b(json.dumps(facts).encode()).hexdigest()[:32])


def _npy(file: SourceFile) -> Piece:
    try:
        array = np.load(file.path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{file.path} is not an array of tokens: {error}") from error
    if not isinstance(array, np.memmap) or array.ndim != 1 or array.dtype.kind not in "ui":
        raise ValueError(
            f"{file.path} must be a one-dimensional array of whole numbers, not {array.dtype}{array.shape}"
        )
    return Piece(file.path, array.offset, len(array), array.dtype.str)


def _bin(file: SourceFile, dtype: str) -> Piece:
    size = np.dtype(dtype).itemsize
    if file.num_bytes % size:
        raise ValueError(f"{file.path} has {file.num_bytes} bytes, no multiple of {dtype}'s {size}")
    return Piece(file.path, 0, file.num_bytes // size, np.dtype(dtype).newbyteorder("<").str)


def _refuse_mistaken_type(pieces: Sequence[Piece]) -> None:
    """Small tokens written as uint32 look like uint16 with every second one zero."""
    for piece in pieces:
        if piece.path.suffix != ".bin" or np.dtype(piece.dtype).itemsize != 2 or piece.num_tokens < 64:
            continue
        head = np.fromfile(piece.path, dtype=piece.dtype, count=4096)
        if not head[1::2].any() and head[::2].any():
            raise ValueError(f"{piece.path} looks like uint32 tokens: say token_dtype: uint32, or uint16 if it is not")


def _refuse_unknown_tokens(pieces: Sequence[Piece], vocabulary: int) -> None:
    """The first gibibyte of each file; what lies behind it is looked at when it is read."""
    for piece in pieces:
        size = np.dtype(piece.dtype).itemsize
        for first in range(0, min(piece.num_tokens, _LOOKED_AT_BYTES // size), _BLOCK_TOKENS):
            count = min(_BLOCK_TOKENS, piece.num_tokens - first)
            block = np.fromfile(piece.path, piece.dtype, count, offset=piece.offset + first * size)
            low, high = int(block.min()), int(block.max())
            if low < 0 or high >= vocabulary:
                raise ValueError(
                    f"{piece.path} holds token {low if low < 0 else high}, the model's vocabulary is {vocabulary}: "
                    f"use token files made with the model's own tokenizer"
                )
