"""What a training keeps alive -> what its whole process will occupy, may occupy, and is cut back to."""

from dataclasses import dataclass

from counterpoint.core.units import format_bytes
from counterpoint.trainer.decision import MARGIN_BYTES, kept_by_allocator, margin_bytes
from counterpoint.trainer.freed_memory import growth_bytes


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The budget is for the whole process, also what an allocator keeps.

    It is expected to occupy `peak_bytes` at most. Near `limit_bytes` free pages are given back, with room above it for
    what a computation takes unforeseen.
    """

    memory_bytes: int
    peak_bytes: int
    limit_bytes: int
    freed_stay: bool = False

    @property
    def target_bytes(self) -> int | None:
        """What it is cut back to where all its freed tensors stay, though the limit be far."""
        return self.peak_bytes if self.freed_stay else None

    @classmethod
    def of(cls, memory_bytes: int, live_bytes: int, staying_bytes: int | None) -> "ProcessMemory":
        """`live_bytes` are alive at once, and so many freed ones stay beside them."""
        limit = memory_bytes - max(MARGIN_BYTES, margin_bytes(memory_bytes) // 2)  # for what nobody foresees
        if staying_bytes is None:
            return cls(memory_bytes, min(memory_bytes, live_bytes + kept_by_allocator(live_bytes)), limit)
        target = live_bytes + staying_bytes
        target = min(limit, target + growth_bytes(target))
        return cls(memory_bytes, target, limit, freed_stay=True)

    def __str__(self) -> str:
        """The last line of the forecast."""
        spare = self.memory_bytes - self.peak_bytes
        text = f"{'  whole process':<28}{format_bytes(self.peak_bytes):>9} of {format_bytes(self.memory_bytes)}: fits"
        text += f", {format_bytes(spare)} to spare" if spare > 0 else ""
        return text + ("; freed tensors stay within it" if self.freed_stay else "")
