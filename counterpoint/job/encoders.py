"""Text -> tokens: bytes as they are, or a tokenizer that lies in a local folder or file."""

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[Any]


@dataclass(frozen=True)
class Encoder:
    """`end` stands behind every document; `identity` changes when the tokenizer does."""

    encode: Callable[[bytes], Tokens]
    vocabulary: int
    end: tuple[int, ...]
    identity: str

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest that holds every token."""
        return np.dtype(np.min_scalar_type(self.vocabulary - 1))


def byte_encoder() -> Encoder:
    """256 tokens; a document ends in a zero byte, which text does not contain."""
    return Encoder(lambda text: np.frombuffer(text, dtype=np.uint8), 256, (0,), "bytes")


def load_encoder(place: str | Path | None) -> Encoder:
    """Reads local files only; None means bytes."""
    if place is None:
        return byte_encoder()
    path = Path(place)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        return _fast(file)
    if path.is_dir():
        return _any_kind(path)
    raise ValueError(f"no tokenizer at {path}: give a folder with a tokenizer in it, or a tokenizer.json")


def has_tokenizer(folder: Path) -> bool:
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
    return any((folder / name).is_file() for name in names)


def _fast(file: Path) -> Encoder:
    try:
        tokenizer = _import("tokenizers").Tokenizer.from_file(str(file))
    except ImportError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file} is not a tokenizer: {error}") from error

    def encode(text: bytes) -> Tokens:
        found = tokenizer.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False)
        return np.asarray(found.ids, dtype=np.uint32)

    token = _end_token(file.parent / "tokenizer_config.json")
    end = tokenizer.token_to_id(token) if token else None
    vocabulary = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0) + 1
    return Encoder(encode, vocabulary, () if end is None else (end,), _identity(file))


def _end_token(config: Path) -> str | None:
    if not config.is_file():
        return None
    try:
        found = json.loads(config.read_text()).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{config} is not a JSON object: {error}") from error
    token = found.get("content") if isinstance(found, dict) else found
    return token if isinstance(token, str) else None


def _any_kind(folder: Path) -> Encoder:
    try:
        tokenizer = _import("transformers").AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} holds no tokenizer that can be read: {str(error).splitlines()[0]}") from error

    def encode(text: bytes) -> Tokens:
        return np.asarray(tokenizer.encode(text.decode("utf-8", errors="replace"), add_special_tokens=False), np.uint32)

    end = tokenizer.eos_token_id
    return Encoder(encode, len(tokenizer), () if end is None else (end,), _identity(folder))


def _identity(path: Path) -> str:
    facts = path.stat()
    return f"{path.resolve()} {facts.st_size} {facts.st_mtime_ns}"


def _import(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(f"this tokenizer needs the package {package}: pip install {package}") from error
