"""Signals to stop -> a flag the loop looks at between two steps, or an exception where there are no steps yet."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


class Interruption:
    """While entered, the first SIGINT or SIGTERM asks for an end after the step; the second ends at once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.number: int | None = None
        self._say = say
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self.number is not None

    def __enter__(self) -> "Interruption":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.number = number
        self._say(f"{signal.Signals(number).name}: finishing this step, then saving; once more to stop at once")


@contextmanager
def terminable() -> Iterator[None]:
    """While entered, SIGTERM is a KeyboardInterrupt too, so that what was begun is put away."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
