"""The calls that each process makes -> the first of them on which processes disagree, in words.

Processes need not be at the same call at the same moment, only to make the same calls in the same order.
"""

from collections.abc import Mapping
from dataclasses import dataclass

KEPT = 16


@dataclass(frozen=True, slots=True)
class Calls:
    """The newest calls of a process; the last of `names` is its call number `count`."""

    count: int = 0
    names: tuple[str, ...] = ()

    def then(self, name: str) -> "Calls":
        return Calls(self.count + 1, (*self.names[1 - KEPT :], name))

    def at(self, number: int) -> str | None:
        """None for a call that is not made yet, or long past."""
        index = number - self.count + len(self.names) - 1
        return self.names[index] if 0 <= index < len(self.names) else None


def disagreement(calls: Mapping[int, Calls]) -> str | None:
    """Which devices are at which call, where these are not the same."""
    known = calls.values()
    for number in range(min(c.count - len(c.names) for c in known) + 1, max(c.count for c in known) + 1):
        named = {device: name for device, found in calls.items() if (name := found.at(number)) is not None}
        if len(set(named.values())) > 1:
            first, *rest = (f"device {device} {{}}at {name}" for device, name in sorted(named.items()))
            said = ", ".join((first.format("is "), *(text.format("") for text in rest)))
            return f"{said}; every process must make the same calls in the same order"
    return None
