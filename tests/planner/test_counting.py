"""Counted profiles: right bytes, and times close to the measured ones."""

from typing import Literal

import pytest

from counterpoint.core.machine import Device
from counterpoint.core.profile import Profile
from counterpoint.planner import catalog
from counterpoint.planner.counting import profile_of
from counterpoint.planner.shapes import SHAPES, Transformer

MACHINE = catalog.machine("1080ti", 1)
DEVICE = MACHINE.devices[0]


def block_times(profile: Profile, size: int, halves: int) -> tuple[int, int]:
    layers = profile.layers[1 : 1 + halves]
    return sum(c.forward_ns.at(size) for c in layers), sum(c.backward_ns.at(size) for c in layers)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("granularity", ["half", "block"])
def test_bytes_follow_from_the_parameters(shape: Transformer, granularity: Literal["half", "block"]) -> None:
    full = profile_of(shape, DEVICE, granularity=granularity)
    half = profile_of(shape, DEVICE, precision="bf16", granularity=granularity)
    assert len(full.layers) == 2 + shape.num_blocks * (2 if granularity == "half" else 1)
    assert (full.weight_bytes, full.grad_bytes, full.state_bytes) == tuple(k * shape.num_parameters for k in (4, 4, 8))
    assert (half.weight_bytes, half.grad_bytes, half.state_bytes) == tuple(k * shape.num_parameters for k in (2, 2, 12))
    assert full.tokens_per_sample == shape.sequence_length
    assert full.layers[-1].tied == ((0,) if shape.tied else ())
    assert len({layer.name for layer in full.layers}) == len(full.layers)


def test_a_block_is_its_two_halves() -> None:
    halves = catalog.profile("gpt2-small", MACHINE)
    blocks = catalog.profile("gpt2-small", MACHINE, granularity="block")
    for size in (1, 8):
        assert block_times(halves, size, 2) == block_times(blocks, size, 1)
    assert blocks.layers[1].saved_bytes.at(3) == sum(c.saved_bytes.at(3) for c in halves.layers[1:3])


@pytest.mark.parametrize(("counted", "measured"), [("bert96", "bert96-1080ti"), ("gpt2-xl", "gpt2-xl-1080ti")])
@pytest.mark.parametrize("size", [4, 8])
def test_counted_times_are_close_to_harmonys_measurements(counted: str, measured: str, size: int) -> None:
    """Within a third, although Harmony's PyTorch of 2020 ran GELU as a dozen kernels."""
    guess = catalog.profile(counted, MACHINE, granularity="block", flash_attention=False)
    truth = catalog.profile(measured, MACHINE)
    for ours, theirs in zip(block_times(guess, size, 1), block_times(truth, size, 1), strict=True):
        assert ours == pytest.approx(theirs, rel=0.33)
    assert guess.layers[1].weight_bytes == truth.layers[1].weight_bytes
    assert guess.values[1].value_bytes.at(size) == truth.values[1].value_bytes.at(size)


def test_flash_attention_saves_memory_and_time() -> None:
    with_flash = catalog.profile("gpt2-xl", MACHINE)
    without = catalog.profile("gpt2-xl", MACHINE, flash_attention=False)
    assert with_flash.layers[1].saved_bytes.at(1) * 3 < without.layers[1].saved_bytes.at(1)
    assert with_flash.layers[1].forward_ns.at(8) < without.layers[1].forward_ns.at(8)


def test_small_microbatches_are_bound_by_memory() -> None:
    """Reading 4 GB of weights takes as long for one token as for ten."""
    slow_memory = Device("slow", 2**30, flops_per_s=10**15, memory_bytes_per_s=10**9)
    layer = profile_of(SHAPES[1], slow_memory).layers[2]
    assert layer.forward_ns.at(2) < 2 * layer.forward_ns.at(1)
