"""A mistyped name into the suggestion of the nearest known one."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str:
    """Text to put behind an unknown name in an error.

    >>> nearest("gpt2xl", ("gpt2-xl", "bert96"))
    ' (did you mean gpt2-xl?)'
    """
    found = get_close_matches(name.lower(), list(known), n=1, cutoff=0.5)
    return f" (did you mean {found[0]}?)" if found else ""
