"""What a training keeps alive -> what its whole process will occupy, may occupy, and is cut back to."""

from dataclasses import dataclass

from counterpoint.core.units import format_bytes
from counterpoint.planner.freed_memory import Freed
from counterpoint.runtime.memory_process import give_back_freed_memory, keep_freed_memory
from counterpoint.trainer.decision import MARGIN_BYTES, margin_bytes

_UNSURE_PERCENT = 8  # processes were seen to settle from 3 % below to 7 % above what was expected of them


def let_be(freed: Freed) -> None:
    """From now on freed tensors of this process are treated so."""
    if freed == "leave":
        give_back_freed_memory()
    else:
        keep_freed_memory(large=freed == "stay")


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The budget is for the whole process, also what an allocator keeps.

    It is expected to occupy `peak_bytes` at most. Near `limit_bytes` free pages are given back, with room above it for
    what a computation takes unforeseen; where all freed tensors stay, already near `target_bytes`, though the limit be
    far.
    """

    memory_bytes: int
    peak_bytes: int
    limit_bytes: int
    target_bytes: int | None = None
    what: str = "whole process"

    @classmethod
    def of(
        cls, memory_bytes: int, settled_bytes: int, freed_stay: bool, what: str = "whole process"
    ) -> "ProcessMemory":
        """`settled_bytes` are what the process is expected to come to without a limit."""
        limit = memory_bytes - max(MARGIN_BYTES, margin_bytes(memory_bytes) // 2)  # for what nobody foresees
        peak = settled_bytes + max(MARGIN_BYTES, settled_bytes * _UNSURE_PERCENT // 100)
        peak = min(memory_bytes, peak)
        return cls(memory_bytes, peak, limit, min(limit, settled_bytes) if freed_stay else None, what)

    @property
    def trusted_bytes(self) -> int:
        """Free pages that a computation may be expected to find; two thirds of the room are left if it does not."""
        return (self.memory_bytes - self.limit_bytes) // 3

    def __str__(self) -> str:
        """The last line of the forecast."""
        spare = self.memory_bytes - self.peak_bytes
        text = f"{f'  {self.what}':<28}{format_bytes(self.peak_bytes):>9} of {format_bytes(self.memory_bytes)}: fits"
        text += f", {format_bytes(spare)} to spare" if spare > 0 else ""
        return text + ("; freed tensors stay within it" if self.target_bytes is not None else "")
