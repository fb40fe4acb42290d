"""What the config calls data -> files, each of one kind: text, lines of JSON, or tokens."""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from counterpoint.job.config import STDLIB

TEXT, JSONL, TOKENS = "text", "jsonl", "tokens"
_KINDS = {".jsonl": JSONL, ".ndjson": JSONL, ".npy": TOKENS, ".bin": TOKENS}
_PEEK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class SourceFile:
    path: Path
    kind: str
    num_bytes: int
    changed_ns: int


def find_sources(data: str) -> tuple[SourceFile, ...]:
    """In the order of their names; a folder is searched to its depths, without what is hidden or binary in it."""
    root = Path(sysconfig.get_path("stdlib")) if data == STDLIB else Path(data)
    if not root.exists():
        raise ValueError(f"no data at {data}: give a file, a folder, or {STDLIB}")
    if root.is_file():
        if _kind(root) != TOKENS and _is_binary(root):
            raise ValueError(f"{data} is binary: tokens go into .npy or .bin files, text into any other")
        paths = [root]
    else:
        paths = sorted(_standard_library(root) if data == STDLIB else _readable(root))
    found = tuple(_file(path) for path in paths)
    if not sum(file.num_bytes for file in found):
        raise ValueError(f"{data} holds no data: {len(found)} readable files, all empty")
    if len({file.kind == TOKENS for file in found}) > 1:
        raise ValueError(f"{data} mixes token files with text: give one of them")
    return found


def _file(path: Path) -> SourceFile:
    facts = path.stat()
    return SourceFile(path, _kind(path), facts.st_size, facts.st_mtime_ns)


def _kind(path: Path) -> str:
    return _KINDS.get(path.suffix.lower(), TEXT)


def _readable(root: Path) -> Iterator[Path]:
    for path in root.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        if not hidden and path.is_file() and (_kind(path) == TOKENS or not _is_binary(path)):
            yield path


def _standard_library(root: Path) -> Iterator[Path]:
    """Sources that come with every Python; tests and what others installed are left out."""
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    return (path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts))


def _is_binary(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" in file.read(_PEEK_BYTES)
