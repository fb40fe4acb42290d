"""Layers are measured as the executor runs them: once per kind, at the sizes that fit, gradients collected."""

import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from counterpoint.core.profile import Profile
from counterpoint.decomposer import chain_of_modules
from counterpoint.profiler import measure, meter
from counterpoint.profiler.measure import measured_sizes, profile_of
from counterpoint.runtime.frame import Flat, frame_of
from counterpoint.runtime.optimizer import UpdateRule
from counterpoint.runtime.products import Product

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def profile_at(*sizes: int, limit_bytes: int | None = None) -> Profile:
    model = nn.ModuleList([Block() for _ in range(4)])
    example = {"x": torch.zeros(2, WIDTH), "y": torch.zeros(2, WIDTH)}
    chain = chain_of_modules(list(model), example, lambda output, batch: (output - batch["y"]).square().mean())
    frame = frame_of(chain)
    rule = UpdateRule(torch.optim.SGD(model.parameters(), lr=0.1), {id(p): n for n, p in model.named_parameters()})
    return profile_of(frame, (Flat.of([]),) * frame.num_layers, rule, sizes, "blocks", limit_bytes=limit_bytes)


def test_bytes_are_those_of_the_layer() -> None:
    """A block saves its input and what tanh gives; its gradients are as large as its weights."""
    block = profile_at(16).layers[1]
    assert block.weight_bytes == block.grad_bytes == 2 * 4 * WIDTH * WIDTH * 4
    assert block.saved_bytes.at(16) == 16 * (WIDTH + 4 * WIDTH) * 4
    assert block.forward_ns.at(16) > 0 < block.backward_ns.at(16)


@pytest.mark.parametrize(("making", "grads"), [("whole", 1), ("panels", 1), ("added", 0)])
def test_the_workspace_of_a_backward_is_what_it_makes_itself(
    making: str, grads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what was saved for it; and of the weights' gradients one at a time, for each is collected at once."""
    monkeypatch.setattr(Product, "try_out", lambda product, grad: making)
    for size in (16, 1024):
        block = profile_at(size).layers[1]
        inside = size * 4 * WIDTH * 4
        one_grad = grads * 4 * WIDTH * WIDTH * 4  # smaller than a panel
        arrived = size * WIDTH * 4
        least, most = max(one_grad + inside, 2 * inside), one_grad + 2 * inside
        assert least <= block.backward_workspace_bytes.at(size) - arrived <= most


def test_what_is_too_large_for_the_heap_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a block its values are four times as wide as outside."""
    inside = 1024 * 4 * WIDTH * 4
    monkeypatch.setattr(meter, "HEAP_BYTES", inside)
    large = profile_at(16, 1024).layers[1].large_bytes
    assert large.at(16) == 0
    assert large.at(1024) in (2 * inside, 3 * inside)  # what tanh gave is saved; its gradient, and that of its input


def test_sizes_that_would_not_fit_are_left_out_but_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Product, "try_out", lambda product, grad: "whole")
    one = profile_at(1).layers[1]
    held = one.saved_bytes.at(1) + one.backward_workspace_bytes.at(1)
    assert measured_sizes(profile_at(4, 1, 2, limit_bytes=3 * held)) == (1, 2, 4)  # weights do not grow with the size
    assert measured_sizes(profile_at(1, 2, limit_bytes=held)) == (1,)
    assert measured_sizes(profile_at(8, limit_bytes=0)) == (8,)


def test_layers_of_one_kind_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, runner = [], measure._Runner
    monkeypatch.setattr(measure, "_Runner", lambda *args: made.append(args[1].name) or runner(*args))
    profile = profile_at(1, 2)
    assert len(made) == 3  # the first one's input has no gradient, the last one has the loss
    assert profile.layers[1].forward_ns == profile.layers[2].forward_ns


def test_time_to_collect_gradients_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(make: Callable[..., None]) -> Callable[..., None]:
        def counted(*args: object) -> None:
            calls.append(make.__name__)
            time.sleep(0.01)
            make(*args)

        return counted

    calls: list[str] = []
    for name in ("put", "add"):
        monkeypatch.setattr(Product, name, slowly(getattr(Product, name)))
    block = profile_at(1).layers[1]
    assert block.backward_ns.at(1) >= 2 * 10_000_000  # it has two weights
    metered = 5  # of three kinds of layers with two weights, but for that of the first one, whose input has no gradient
    assert calls.count("put") == calls.count("add") - metered  # copied and added to in turn


@pytest.mark.parametrize("making", ["whole", "panels"])
def test_gradients_are_made_as_their_bits_allow(making: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each size by itself."""
    assert set(profile_at(2).makings(2)) <= {"panels", "added"}
    made: list[tuple[int, str]] = []
    monkeypatch.setattr(Product, "try_out", lambda product, grad: making if len(grad) == 4 else "added")
    monkeypatch.setattr(Product, "add", lambda product, grad, target, how: made.append((len(grad), how)))
    profile = profile_at(2, 4)
    assert (profile.makings(2), profile.makings(4)) == (("added",) * 4, (making,) * 4)
    assert set(made) == {(2, "added")} | ({(4, making)} if making != "whole" else set())
    assert profile.makings(3) == ("whole",) * 4  # nobody has tried that
