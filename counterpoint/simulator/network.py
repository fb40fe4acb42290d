"""Transfers under way into when they end: links are shared fairly (max-min), in whole nanoseconds."""

import heapq
from collections import defaultdict
from dataclasses import dataclass

from counterpoint.core.machine import Link, Machine

SECOND = 10**9


@dataclass(slots=True)
class _Flow:
    path: tuple[str, ...]
    remaining: int  # bytes times nanoseconds per second
    rate: int = 0  # bytes per second
    since_ns: int = 0
    stamp: int = 0


class Network:
    """Active transfers. Whoever drives it asks when the next one ends, and takes it off then."""

    def __init__(self, machine: Machine) -> None:
        self.links: dict[str, Link] = {link.name: link for link in machine.links}
        self.order = {link.name: position for position, link in enumerate(machine.links)}
        self.flows: dict[int, _Flow] = {}
        self.on_link: defaultdict[str, dict[int, None]] = defaultdict(dict)
        self.ends: list[tuple[int, int, int]] = []

    def add(self, key: int, path: tuple[str, ...], size: int, now_ns: int) -> None:
        self.flows[key] = _Flow(path, size * SECOND, since_ns=now_ns)
        for name in path:
            self.on_link[name][key] = None
        self._share(key, now_ns)

    def next_end_ns(self) -> int | None:
        while self.ends:
            end, key, stamp = self.ends[0]
            flow = self.flows.get(key)
            if flow is not None and flow.stamp == stamp:
                return end
            heapq.heappop(self.ends)
        return None

    def finish(self, now_ns: int) -> int:
        """Take off the transfer that ends now."""
        key = heapq.heappop(self.ends)[1]
        neighbours = self._neighbours(key)
        flow = self.flows.pop(key)
        for name in flow.path:
            del self.on_link[name][key]
        neighbours.pop(key)
        if neighbours:
            self._assign(neighbours, now_ns)
        return key

    def latency_ns(self, path: tuple[str, ...]) -> int:
        return sum(self.links[name].latency_ns for name in path)

    def _share(self, key: int, now_ns: int) -> None:
        flow = self.flows[key]
        if all(len(self.on_link[name]) == 1 for name in flow.path):
            self._set(key, min(self.links[name].bytes_per_s for name in flow.path), now_ns)
        else:
            self._assign(self._neighbours(key), now_ns)

    def _neighbours(self, key: int) -> dict[int, None]:
        """All transfers that share links with this one, directly or through others."""
        found, stack = {key: None}, [key]
        while stack:
            for name in self.flows[stack.pop()].path:
                for other in self.on_link[name]:
                    if other not in found:
                        found[other] = None
                        stack.append(other)
        return found

    def _assign(self, keys: dict[int, None], now_ns: int) -> None:
        """Max-min fairness: fill the tightest link first, share it equally, go on with the rest."""
        names = dict.fromkeys(name for key in keys for name in self.flows[key].path)
        capacity = {name: self.links[name].bytes_per_s for name in names}
        waiting = {name: len(self.on_link[name]) for name in names}
        fixed: dict[int, int] = {}
        while len(fixed) < len(keys):
            tightest = min(
                (name for name in names if waiting[name]),
                key=lambda name: (capacity[name] // waiting[name], self.order[name]),
            )
            share = max(1, capacity[tightest] // waiting[tightest])
            for key in self.on_link[tightest]:
                if key in fixed:
                    continue
                fixed[key] = share
                for name in self.flows[key].path:
                    capacity[name] = max(0, capacity[name] - share)
                    waiting[name] -= 1
        for key, rate in fixed.items():
            self._set(key, rate, now_ns)

    def _set(self, key: int, rate: int, now_ns: int) -> None:
        flow = self.flows[key]
        if flow.rate == rate:
            return
        flow.remaining = max(0, flow.remaining - flow.rate * (now_ns - flow.since_ns))
        flow.since_ns, flow.rate, flow.stamp = now_ns, rate, flow.stamp + 1
        end = now_ns - (-flow.remaining // rate)
        heapq.heappush(self.ends, (end, key, flow.stamp))
