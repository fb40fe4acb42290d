"""What is about to come into memory -> free pages given back in time, so that the process stays below its limit.

Pages wait in two places: freed regions in the pool, freed tensors in the heap. Neither gives any back before the
process as it is, and what it is about to allocate, would pass the limit together: getting a page anew costs far more.
"""

import threading
from collections.abc import Callable

from counterpoint.core.task import Buffer, Task
from counterpoint.runtime.memory import Pool
from counterpoint.runtime.memory_process import resident_bytes, trim

_UNLIMITED = 1 << 62


class Headroom:
    """Keeps the process below a limit.

    What a computation allocates comes from the heap's free pages as far as they go, except tensors that are too large
    for the heap. `expected_bytes` is what the process will occupy when the computation at hand has allocated all it
    needs and what is under way from elsewhere has landed; loads beside it leave room for that. Where its large tensors
    would not fit beside as much that was freed, it is `tight` and must be relieved not only between layers but before
    each operation.

    Far below its limit a process keeps freed tensors of all sizes; what it is expected to grow to then, and is cut back
    to if it does grow further, is its `target_bytes`. Near the limit only `trusted_bytes` of the heap's free pages are
    counted on, for they do not always lie where they fit: by so much the process may pass its limit.
    """

    def __init__(
        self,
        pool: Pool,
        base_bytes: int,
        limit_bytes: int,
        workspace_bytes: Callable[[Task], int],
        target_bytes: int | None = None,
        trusted_bytes: int = 0,
    ) -> None:
        """`base_bytes` is what the process takes beside its tensors and regions, `workspace_bytes` what a task does."""
        self.pool, self.workspace_bytes = pool, workspace_bytes
        self.base_bytes, self.limit_bytes = base_bytes, limit_bytes
        self.target_bytes = limit_bytes if target_bytes is None else target_bytes
        self.trusted_bytes = trusted_bytes
        self.maps_large = target_bytes is None  # else large tensors come from the heap too
        self.expected_bytes = self._needed_bytes = self._coming_bytes = self._made_bytes = self._spare_bytes = 0
        self._lock = threading.Lock()
        self._under_way: dict[Buffer, int] = {}

    @classmethod
    def without_limit(cls) -> "Headroom":
        return cls(Pool(0), 0, _UNLIMITED, lambda task: 0)

    def compute(self, num_bytes: int, fresh_bytes: int, made_bytes: int, outside_bytes: int) -> None:
        """A computation begins that needs so many bytes of tensors, some of them fresh, and so many of regions.

        `outside_bytes` are those of tensors that live.
        """
        with self._lock:
            resident = self._occupied_bytes()
            waiting = max(0, resident - self.base_bytes - self.pool.mapped_bytes - outside_bytes)
            least = fresh_bytes + max(num_bytes - fresh_bytes - waiting, 0)
            regions = max(0, made_bytes - self.pool.free_bytes)
            new = num_bytes - min(self.trusted_bytes, waiting, num_bytes - fresh_bytes)
            excess = max(new - self.limit_bytes, least - self.target_bytes) + resident + regions
            self._spare_bytes = max(0, waiting - (num_bytes - fresh_bytes))
            if self._give_back(excess, made_bytes):
                resident, new, self._spare_bytes = self._occupied_bytes(), num_bytes, 0
            self.expected_bytes = resident + new + regions
            self._needed_bytes, self._made_bytes = new + regions, made_bytes
            self._coming_bytes = fresh_bytes if self.expected_bytes + fresh_bytes > self.limit_bytes else 0

    @property
    def tight(self) -> bool:
        return self._coming_bytes > 0

    def relieve(self) -> None:
        """Within a computation: free pages that lie in the way of what may come go back."""
        with self._lock:
            self._give_back(self._occupied_bytes() + self._coming_bytes - min(self.limit_bytes, self.target_bytes))

    def load(self, buffer: Buffer, num_bytes: int) -> None:
        """A region of so many bytes is about to be taken, beside a computation."""
        with self._lock:
            free = max(0, self.pool.free_bytes - self._made_bytes)
            self._arrive(buffer, max(0, num_bytes - free), self._made_bytes + num_bytes)

    def receive(self, buffer: Buffer, num_bytes: int) -> None:
        """A value of so many bytes is about to come from a peer: into pages of the heap that nobody needs, if any."""
        with self._lock:
            found = min(num_bytes, self._spare_bytes)
            self._spare_bytes -= found
            self._arrive(buffer, num_bytes - found, 0)

    def _arrive(self, buffer: Buffer, num_bytes: int, kept_bytes: int) -> None:
        """So many bytes are about to come, beside a computation and so many free ones of regions.

        They are under way until the buffer has `landed`.
        """
        expected = max(self._occupied_bytes(), self.expected_bytes)
        if num_bytes and self._give_back(expected + num_bytes - self.limit_bytes, kept_bytes):
            self.expected_bytes = min(self.expected_bytes, self._occupied_bytes() + self._needed_bytes)
            self._spare_bytes = 0
        self.expected_bytes += num_bytes
        self._under_way[buffer] = num_bytes

    def landed(self, buffer: Buffer) -> None:
        """The memory of what was under way is resident, if not its content."""
        with self._lock:
            self._under_way.pop(buffer, None)

    def forget(self) -> None:
        """Nothing is under way any more."""
        with self._lock:
            self._under_way.clear()

    def _occupied_bytes(self) -> int:
        """What is resident, and what will be."""
        return resident_bytes() + sum(self._under_way.values())

    def _give_back(self, num_bytes: int, kept_bytes: int = 0) -> bool:
        """Free regions first, except so many bytes of them; whether the heap's free pages had to go too."""
        if num_bytes <= 0:
            return False
        released = self.pool.release(max(0, min(num_bytes, self.pool.free_bytes - kept_bytes)))
        if released >= num_bytes:
            return False
        return trim()
