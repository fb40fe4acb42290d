"""What was measured, or counted, of a model: per layer times and bytes as functions of the microbatch size."""

from bisect import bisect_left
from dataclasses import dataclass, replace

from counterpoint.core.outline import LayerOutline, Outline, Value


@dataclass(frozen=True, slots=True)
class Curve:
    """A quantity known at some microbatch sizes, linear between them and beyond.

    >>> curve = Curve(((1, 10), (4, 40), (8, 60)))
    >>> curve.at(2), curve.at(6), curve.at(16)
    (20, 50, 100)
    >>> Curve.constant(7).at(3), Curve.proportional(7).at(3)
    (7, 21)
    """

    points: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError(f"a curve needs ascending microbatch sizes from 1 on, not {sizes}")
        if any(value < 0 for _, value in self.points):
            raise ValueError(f"a curve cannot be negative: {self.points}")

    @staticmethod
    def constant(value: int) -> "Curve":
        return Curve(((1, value), (2, value)))

    @staticmethod
    def proportional(value: int, fixed: int = 0) -> "Curve":
        """`fixed` plus `value` per sample."""
        return Curve(((1, fixed + value), (2, fixed + 2 * value)))

    def plus(self, other: "Curve", percent: int = 100) -> "Curve":
        """Each point with so many percent of what the other has there."""
        return Curve(tuple((size, value + other.at(size) * percent // 100) for size, value in self.points))

    def at(self, size: int) -> int:
        if len(self.points) == 1:
            known, value = self.points[0]
            return value * size // known
        right = min(max(bisect_left(self.points, (size, -1)), 1), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[right - 1], self.points[right]
        return max(0, y0 + (y1 - y0) * (size - x0) // (x1 - x0))


ZERO = Curve.constant(0)
MAKINGS = ("whole", "panels", "added")  # at once; some rows at a time; by products that add to what is there


@dataclass(frozen=True, slots=True)
class LayerCost:
    """One layer. `backward_ns` does not include recompute; `saved_bytes` is what autograd keeps without recompute.

    The workspaces are what a forward or backward needs for its own duration beyond what it reads and writes.
    `old_bytes` is what weights take that are only computed with, 0 if that is no less than `weight_bytes`. The fresh
    times are what it takes longer if all memory that it makes comes from the operating system. `large_bytes` is
    what of its memory lies in tensors too large for the heap, forward or backward, saved ones included. `makings`
    say how gradients of its weights are made at each microbatch size: the best way that leaves their bits as they are.
    By `unread_ns` a forward is shorter that is recomputed without anybody to read its outputs.
    """

    name: str
    forward_ns: Curve
    backward_ns: Curve
    update_ns: int = 0
    host_update_ns: int = 0
    weight_bytes: int = 0
    grad_bytes: int = 0
    state_bytes: int = 0
    constant_bytes: int = 0
    saved_bytes: Curve = ZERO
    forward_workspace_bytes: Curve = ZERO
    backward_workspace_bytes: Curve = ZERO
    tied: tuple[int, ...] = ()
    old_bytes: int = 0
    forward_fresh_ns: Curve = ZERO
    backward_fresh_ns: Curve = ZERO
    large_bytes: Curve = ZERO
    makings: tuple[tuple[int, str], ...] = ()
    unread_ns: Curve = ZERO

    def __post_init__(self) -> None:
        for name in (
            "update_ns", "host_update_ns", "weight_bytes", "grad_bytes", "state_bytes", "constant_bytes", "old_bytes"
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise ValueError(f"layer {self.name!r}: {name} cannot be negative: {getattr(self, name)}")
        if any(making not in MAKINGS for _, making in self.makings):
            raise ValueError(f"layer {self.name!r}: makings are {', '.join(MAKINGS)}, not {self.makings}")
        if self.old_bytes and self.old_bytes >= self.weight_bytes:
            raise ValueError(
                f"layer {self.name!r}: old weights of {self.old_bytes} bytes must be smaller than the newest of "
                f"{self.weight_bytes}; give 0 if they are not"
            )

    def with_fresh(self, percent: int) -> "LayerCost":
        return replace(
            self,
            forward_ns=self.forward_ns.plus(self.forward_fresh_ns, percent),
            backward_ns=self.backward_ns.plus(self.backward_fresh_ns, percent),
            forward_fresh_ns=ZERO,
            backward_fresh_ns=ZERO,
        )

    @property
    def two_versions_bytes(self) -> int:
        """The newest weights and those before them."""
        return self.weight_bytes + (self.old_bytes or self.weight_bytes)


@dataclass(frozen=True, slots=True)
class ValueCost:
    """A value that leaves layer `producer` for later layers, and its size."""

    producer: int
    consumers: tuple[int, ...]
    value_bytes: Curve
    has_grad: bool = True


@dataclass(frozen=True, slots=True)
class Profile:
    """`samples` names what one sample of a microbatch is; `tokens_per_sample` turns samples/s into tokens/s.

    `tidy_heap` if freed memory of the process that it was measured in is found again by what comes next.
    """

    name: str
    layers: tuple[LayerCost, ...]
    values: tuple[ValueCost, ...]
    tokens_per_sample: int = 1
    tidy_heap: bool = False

    def __post_init__(self) -> None:
        self.outline()

    def outline(self) -> Outline:
        return Outline(
            tuple(LayerOutline(c.weight_bytes > 0, c.constant_bytes > 0, c.tied, c.old_bytes > 0) for c in self.layers),
            tuple(Value(v.producer, v.consumers, v.has_grad) for v in self.values),
        )

    def with_fresh(self, percent: int) -> "Profile":
        """As it is when so much of what computations make comes from the operating system: that is in their times."""
        return replace(self, layers=tuple(layer.with_fresh(percent) for layer in self.layers))

    @property
    def has_fresh(self) -> bool:
        """Whether memory that is not there yet costs anything."""
        curves = [curve for layer in self.layers for curve in (layer.forward_fresh_ns, layer.backward_fresh_ns)]
        return any(time for curve in curves for _, time in curve.points)

    def makings(self, microbatch_size: int) -> tuple[str, ...]:
        """How the gradients of each layer's weights are made."""
        return tuple(dict(layer.makings).get(microbatch_size, "whole") for layer in self.layers)

    @property
    def weight_bytes(self) -> int:
        return sum(layer.weight_bytes for layer in self.layers)

    @property
    def state_bytes(self) -> int:
        return sum(layer.state_bytes for layer in self.layers)

    @property
    def grad_bytes(self) -> int:
        return sum(layer.grad_bytes for layer in self.layers)
