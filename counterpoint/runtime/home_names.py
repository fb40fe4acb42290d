"""A buffer -> its name at home: one for all devices of a server, or one for each device that updates it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from counterpoint.core.task import Buffer


@dataclass(slots=True)
class HomeNames:
    """`holders` says, for layers with a copy per device, whose copy is meant here.

    `base` updates came before the version that programs call 0. With two versions each has its own place, and the
    next takes that of the one before the last; narrow copies of old versions follow one another in a third.
    """

    holders: Mapping[int, int] = field(default_factory=dict)
    two_versions: bool = False
    base: int = 0

    def weight(self, layer: int, number: int = 0) -> str:
        version = f" {(self.base + number) % 2}" if self.two_versions else ""
        return f"weight {layer}{version}{self._copy(layer)}"

    def old(self, layer: int) -> str:
        return f"old {layer}{self._copy(layer)}"

    def state(self, layer: int) -> str:
        return f"state {layer}{self._copy(layer)}"

    def lasting(self, buffer: Buffer) -> str:
        match buffer.kind:
            case "weight":
                return self.weight(buffer.owner, buffer.number)
            case "old":
                return self.old(buffer.owner)
            case "state":
                return self.state(buffer.owner)
            case _:
                return f"constant {buffer.owner}"

    def _copy(self, layer: int) -> str:
        return f" of {self.holders[layer]}" if layer in self.holders else ""
