"""A failed file operation -> what the user is told."""

from pathlib import Path

from counterpoint.core.errors import ExecutionError


def cannot(verb: str, path: Path, error: OSError, what: str = "") -> ExecutionError:
    """What a failed file operation tells the user."""
    return ExecutionError(f"cannot {verb} {path}{what}: {error.strerror}; make room there or choose another folder")
