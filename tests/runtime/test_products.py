"""Gradients of weights made where they are kept: the bits of autograd's own, and no memory for a whole one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from counterpoint.profiler.meter import Meter
from counterpoint.runtime import products
from counterpoint.runtime.gradients import Target, differentiate
from counterpoint.runtime.products import Product, find_products

ROWS, WIDTH, WIDER = 40, 96, 200
Layer = Callable[[Tensor, dict[str, Tensor]], Tensor]

LAYERS: dict[str, tuple[Layer, dict[str, tuple[int, ...]], list[str]]] = {
    "linear": (lambda x, p: nn.functional.linear(x, p["w"], p["b"]), {"w": (WIDER, WIDTH), "b": (WIDER,)}, ["w"]),
    "without bias": (lambda x, p: nn.functional.linear(x, p["w"]), {"w": (WIDER, WIDTH)}, ["w"]),
    "not transposed": (lambda x, p: torch.addmm(p["b"], x, p["w"]), {"w": (WIDTH, WIDER), "b": (WIDER,)}, ["w"]),
    "in three dimensions": (
        lambda x, p: nn.functional.linear(x.view(4, 10, WIDTH), p["w"], p["b"]),
        {"w": (WIDER, WIDTH), "b": (WIDER,)},
        ["w"],
    ),
    "two in a row": (lambda x, p: (x @ p["v"]).tanh() @ p["w"], {"v": (WIDTH, WIDER), "w": (WIDER, 70)}, ["v", "w"]),
    "used twice": (lambda x, p: x @ p["w"] + x.tanh() @ p["w"], {"w": (WIDTH, WIDER)}, []),
    "used otherwise too": (lambda x, p: x @ p["w"] + p["w"].sum(), {"w": (WIDTH, WIDER)}, []),
    "scaled": (lambda x, p: torch.addmm(p["b"], x, p["w"], alpha=2), {"w": (WIDTH, WIDER), "b": (WIDER,)}, []),
    "cut": (lambda x, p: x @ p["w"][:, 3:50], {"w": (WIDTH, WIDER)}, []),
    "one column": (lambda x, p: x @ p["w"], {"w": (WIDTH, 1)}, []),
}


@pytest.fixture(autouse=True)
def _small_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "PANEL_BYTES", 1)  # of 64 rows


def made(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    torch.manual_seed(7)
    return {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}


def microbatches(enters: bool = True) -> list[Tensor]:
    return [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(i), requires_grad=enters) for i in (1, 2)]


def possible(output: Tensor, parameters: dict[str, Tensor], seed: Tensor) -> set[str]:
    """Makings that leave the bits as they are; panels always should, with kernels that this was written for."""
    found = {"panels", "added"}

    def try_out(product: Product) -> Callable[[tuple[Tensor, ...]], None]:
        return lambda grads: found.intersection_update({"panels", product.try_out(grads[0])})

    edge = get_gradient_edge(output)
    hooks = [p.node.register_prehook(try_out(p)) for p in find_products([edge], parameters).values()]
    torch.autograd.grad(output, list(parameters.values()), seed, retain_graph=True)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("making", ["panels", "added"])
@pytest.mark.parametrize("name", LAYERS)
def test_bits_are_those_of_autograd(name: str, making: str) -> None:
    layer, shapes, expected = LAYERS[name]
    parameters, plain = made(shapes), made(shapes)
    started: set[str] = set()
    targets = {n: Target(torch.full_like(p, torch.nan), started) for n, p in parameters.items()}
    for ours, theirs in zip(microbatches(), microbatches(), strict=True):
        output = layer(ours, parameters)
        assert sorted(find_products([get_gradient_edge(output)], parameters)) == expected
        seed = torch.randn_like(output)
        if making not in possible(output, parameters, seed):
            pytest.skip("kernels of this machine round otherwise when they add")
        differentiate([get_gradient_edge(output)], [seed], parameters, targets, [ours], making)
        layer(theirs, plain).backward(seed)
        assert ours.grad is not None
        assert torch.equal(ours.grad, theirs.grad)
        for parameter in parameters.values():
            parameter.grad = None
    for n, parameter in plain.items():
        assert torch.equal(targets[n].tensor, parameter.grad), n
    assert started == set(shapes)


@pytest.mark.parametrize("name", ["linear", "without bias"])
def test_a_product_of_values_without_a_gradient(name: str) -> None:
    """Autograd comes by for the bias; for the weight alone it has to make its gradient itself."""
    layer, shapes, _ = LAYERS[name]
    parameters, plain = made(shapes), made(shapes)
    ours, theirs = microbatches(enters=False)[0], microbatches(enters=False)[0]
    targets = {n: Target(torch.empty_like(p), set()) for n, p in parameters.items()}
    output = layer(ours, parameters)
    seed = torch.randn_like(output)
    assert sorted(find_products([get_gradient_edge(output)], parameters)) == (["w"] if "b" in shapes else [])
    differentiate([get_gradient_edge(output)], [seed], parameters, targets, [], "panels")
    layer(theirs, plain).backward(seed)
    assert all(torch.equal(targets[n].tensor, p.grad) for n, p in plain.items())


@pytest.mark.parametrize(("making", "most"), [("added", 0), ("panels", 64 * 1024 * 4), ("whole", 512 * 1024 * 4)])
def test_memory_is_that_of_a_panel(making: str, most: int) -> None:
    """Of a gradient that is added to; beside that of the input."""
    value, weight = torch.randn(8, 512, requires_grad=True), torch.randn(512, 1024, requires_grad=True)
    target, seed = Target(torch.zeros_like(weight), {"w"}), torch.randn(8, 1024)
    edge = get_gradient_edge(value @ weight)
    with Meter([value, weight, target.tensor, seed]) as meter:
        differentiate([edge], [seed], {"w": weight}, {"w": target}, [value], making)
    assert most <= meter.peak_bytes <= most + 2 * value.nbytes


def test_products_in_another_precision_than_their_gradients_are_left_to_autograd() -> None:
    value, weight = torch.randn(8, 16, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    target = Target(torch.zeros(16, 32, dtype=torch.float64), set())
    output = value @ weight
    differentiate([get_gradient_edge(output)], [torch.ones(8, 32)], {"w": weight}, {"w": target}, [value], "panels")
    assert torch.equal(target.tensor, (value.detach().t() @ torch.ones(8, 32)).double())


def test_a_trial_sees_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    value, weight = torch.randn(8, 512, requires_grad=True), torch.randn(512, 32, requires_grad=True)
    product = find_products([get_gradient_edge(value @ weight)], {"w": weight})["w"]
    grad = torch.randn(8, 32)
    with torch.no_grad():
        assert product.try_out(grad) in ("panels", "added")
        monkeypatch.setattr(torch, "addmm", lambda before, left, right: before + (left @ right) * (1 + 1e-6))
        assert product.try_out(grad) == "panels"
        monkeypatch.setattr(torch, "equal", lambda one, other: len(one) == 512)
        assert product.try_out(grad) == "whole"
