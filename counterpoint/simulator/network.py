"""Transfers under way into when they end: links are shared fairly (max-min), in whole nanoseconds."""

import heapq
from dataclasses import dataclass

from counterpoint.core.machine import Machine

SECOND = 10**9


@dataclass(slots=True)
class _Flow:
    """`stamp` counts the changes of its rate: an expected end with an older one no longer holds."""

    links: tuple[int, ...]
    remaining: int  # bytes times nanoseconds per second
    since_ns: int
    rate: int = 0  # bytes per second
    stamp: int = 0


class Network:
    """Active transfers. Whoever drives it asks when the next one ends, and takes it off then.

    Rates are shared out anew when that is asked: transfers that begin or end at one moment cost one sharing.
    """

    def __init__(self, machine: Machine) -> None:
        self.speeds = [link.bytes_per_s for link in machine.links]
        self.indices = {link.name: index for index, link in enumerate(machine.links)}
        self.latencies = {link.name: link.latency_ns for link in machine.links}
        self.flows: dict[int, _Flow] = {}
        self.on_link: list[dict[int, None]] = [{} for _ in machine.links]
        self.changed: dict[int, None] = {}
        self.ends: list[tuple[int, int, int]] = []

    def add(self, key: int, path: tuple[str, ...], size: int, now_ns: int) -> None:
        links = tuple(dict.fromkeys(self.indices[name] for name in path))
        self.flows[key] = _Flow(links, size * SECOND, now_ns)
        for link in links:
            self.on_link[link][key] = None
            self.changed[link] = None

    def next_end_ns(self, now_ns: int) -> int | None:
        end = self._first_end()
        if self.changed and (end is None or end > now_ns):
            self._assign(self._touched(), now_ns)
            end = self._first_end()
        return end

    def finish(self) -> int:
        """Take off the transfer that ends next."""
        key = heapq.heappop(self.ends)[1]
        for link in self.flows.pop(key).links:
            del self.on_link[link][key]
            self.changed[link] = None
        return key

    def latency_ns(self, path: tuple[str, ...]) -> int:
        return sum(self.latencies[name] for name in path)

    def _first_end(self) -> int | None:
        while self.ends:
            end, key, stamp = self.ends[0]
            flow = self.flows.get(key)
            if flow is not None and flow.stamp == stamp:
                return end
            heapq.heappop(self.ends)
        return None

    def _touched(self) -> dict[int, int]:
        """Links in use whose transfers share links with changed ones, directly or through others; how many on each."""
        found: dict[int, int] = {}
        stack, self.changed = list(self.changed), {}
        while stack:
            link = stack.pop()
            if link not in found and self.on_link[link]:
                found[link] = len(self.on_link[link])
                for key in self.on_link[link]:
                    stack += [other for other in self.flows[key].links if other not in found]
        return found

    def _assign(self, waiting: dict[int, int], now_ns: int) -> None:
        """Max-min fairness: fill the tightest link first, share it equally, go on with the rest."""
        capacity = {link: self.speeds[link] for link in waiting}
        fixed: set[int] = set()
        while waiting:
            least, tightest = min((capacity[link] // count, link) for link, count in waiting.items())
            share = max(1, least)
            for key in self.on_link[tightest]:
                if key in fixed:
                    continue
                fixed.add(key)
                self._set(self.flows[key], key, share, now_ns)
                for link in self.flows[key].links:
                    capacity[link] = max(0, capacity[link] - share)
                    waiting[link] -= 1
                    if not waiting[link]:
                        del waiting[link]

    def _set(self, flow: _Flow, key: int, rate: int, now_ns: int) -> None:
        if flow.rate == rate:
            return
        flow.remaining = max(0, flow.remaining - flow.rate * (now_ns - flow.since_ns))
        flow.since_ns, flow.rate, flow.stamp = now_ns, rate, flow.stamp + 1
        heapq.heappush(self.ends, (now_ns - (-flow.remaining // rate), key, flow.stamp))
