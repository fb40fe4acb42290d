"""Text files -> one file of tokens, written once and taken again while the texts and the tokenizer stay the same."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from counterpoint.core.errors import ExecutionError
from counterpoint.core.units import format_bytes
from counterpoint.job.corpus import Corpus, Piece
from counterpoint.job.encoders import Encoder
from counterpoint.job.sources import JSONL, SourceFile

_BLOCK_BYTES = 1 << 20
_SAY_EVERY_BYTES = 256 << 20


def text_corpus(
    files: Sequence[SourceFile], encoder: Encoder, cache: Path, length: int, say: Callable[[str], None]
) -> Corpus:
    """Tokenised into `cache` unless it holds the tokens of these very files."""
    key = _key(files, encoder)
    facts = _facts(cache)
    if facts.get("key") != key or not cache.is_file():
        facts = {"key": key, **_write_cache(files, encoder, cache, say)}
        cache.with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")
    piece = Piece(cache, 0, facts["num_tokens"], facts["dtype"])
    if cache.stat().st_size != piece.num_tokens * np.dtype(piece.dtype).itemsize:
        raise ExecutionError(f"the token cache {cache} is damaged: remove it, it will be written again")
    return Corpus([piece], length, facts["digest"])


def _facts(cache: Path) -> dict[str, Any]:
    """What lies in a cache; empty if there is none."""
    try:
        found = json.loads(cache.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _key(files: Sequence[SourceFile], encoder: Encoder) -> str:
    facts = [(str(file.path.resolve()), file.num_bytes, file.changed_ns) for file in files]
    return hashlib.blake2b(json.dumps([facts, encoder.identity]).encode()).hexdigest()[:32]


def _write_cache(
    files: Sequence[SourceFile], encoder: Encoder, cache: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Under another name first: a cache is whole or not there."""
    cache.parent.mkdir(parents=True, exist_ok=True)
    unfinished = cache.with_suffix(".unfinished")
    try:
        with unfinished.open("wb") as out:
            facts = _write_tokens(files, encoder, out, say)
        os.replace(unfinished, cache)
    finally:
        unfinished.unlink(missing_ok=True)
    return facts


def _write_tokens(
    files: Sequence[SourceFile], encoder: Encoder, out: BinaryIO, say: Callable[[str], None]
) -> dict[str, Any]:
    end = np.asarray(encoder.end, dtype=encoder.dtype)
    digest, num_tokens, done, said = hashlib.blake2b(), 0, 0, 0
    for file in files:
        for text, last in _texts(file):
            tokens = np.concatenate((encoder.encode(text).astype(encoder.dtype, copy=False), end[: len(end) * last]))
            out.write(tokens.data)
            digest.update(tokens.data)
            num_tokens += len(tokens)
            done += len(text)
            if done - said >= _SAY_EVERY_BYTES:
                say(f"tokenising: {format_bytes(done)} read, {num_tokens:,} tokens")
                said = done
    return {"dtype": encoder.dtype.str, "num_tokens": num_tokens, "digest": digest.hexdigest()[:32]}


def _texts(file: SourceFile) -> Iterator[tuple[bytes, bool]]:
    """Parts of documents; True with a document's last part."""
    with file.path.open("rb") as lines:
        if file.kind == JSONL:
            yield from (
                (_json_text(line, file.path, number), True) for number, line in enumerate(lines, 1) if line.strip()
            )
            return
        rest = b""
        while block := lines.read(_BLOCK_BYTES):
            cut = _cut(block)
            yield rest + block[:cut], False
            rest = block[cut:]
        yield rest, True


def _cut(block: bytes) -> int:
    """Where a text may be parted: behind a line, else behind a word, else between two characters."""
    behind = block.rfind(b"\n") + 1 or block.rfind(b" ") + 1
    if behind:
        return behind
    leads = (len(block) - back for back in range(1, 4) if len(block) >= back and block[-back] >= 0xC0)
    return next(leads, 0) or len(block)


def _json_text(line: bytes, path: Path, number: int) -> bytes:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} line {number} is not a JSON object with a text: {error!r}") from error
    if not isinstance(text, str):
        raise ValueError(f"{path} line {number}: text must be text, not {type(text).__name__}")
    return text.encode()
