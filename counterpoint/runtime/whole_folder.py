"""A folder's content -> the folder, whole or not at all: written beside it, made durable, then renamed."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from counterpoint.core.errors import ExecutionError
from counterpoint.runtime.file_errors import cannot

_UNFINISHED, _PREVIOUS = ".unfinished", ".previous"


@contextlib.contextmanager
def whole_folder(folder: Path, markers: tuple[str, ...]) -> Iterator[Path]:
    """Yields the folder to write into. An older folder of the name is replaced if it holds one of `markers`.

    Whatever happens, `folder` is what it was before or all of the new content: after a kill between the two renames
    that replace it, `recover` finds the older one.
    """
    recover(folder)
    _refuse_foreign(folder, markers)
    unfinished = unfinished_folder(folder)
    try:
        if unfinished.exists():  # left behind by a process that was killed
            shutil.rmtree(unfinished)
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise cannot("write", folder, error) from error
    try:
        yield unfinished
        _make_durable(unfinished)
        _replace(folder, unfinished)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError):
            raise cannot("write", folder, error) from error
        raise


def unfinished_folder(folder: Path) -> Path:
    """Where the content of a folder is written before it is complete."""
    return _beside(folder, _UNFINISHED)


def recover(folder: Path) -> None:
    """Undo a replacement that was cut short, or finish it."""
    previous = _beside(folder, _PREVIOUS)
    if not previous.exists():
        return
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
    else:
        os.rename(previous, folder)


def _beside(folder: Path, suffix: str) -> Path:
    folder = Path(os.path.abspath(folder))
    return folder.with_name(f".{folder.name}{suffix}")


def _refuse_foreign(folder: Path, markers: tuple[str, ...]) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ExecutionError(f"{folder} is a file, not a folder; choose another name")
    if any(folder.iterdir()) and not any((folder / marker).exists() for marker in markers):
        raise ExecutionError(
            f"{folder} holds other things (none of {', '.join(markers)}) and would be replaced; choose another name"
        )


def _make_durable(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        _sync(path)
    _sync(folder)


def _replace(folder: Path, unfinished: Path) -> None:
    parent = unfinished.parent
    if folder.exists():
        previous = _beside(folder, _PREVIOUS)
        os.rename(folder, previous)
        os.rename(unfinished, folder)
        _sync(parent)
        shutil.rmtree(previous, ignore_errors=True)
    else:
        os.rename(unfinished, folder)
        _sync(parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
