"""Signals to stop -> a flag the loop looks at between two steps."""

import signal
from collections.abc import Callable
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
