"""Bytes over the host link per step against Harmony's table (PVLDB 2022): every byte is accounted for.

Moved is the formula, less the share of the fused last pack, less what is still there when it is wanted again. The
shares come from the numbers of devices, microbatches and layers alone (`benchmarks/swap_volume.py`).
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _benchmark() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "swap_volume.py"
    spec = importlib.util.spec_from_file_location("swap_volume", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["swap_volume"] = module
    spec.loader.exec_module(module)
    return module


volume = _benchmark()
SYSTEMS = [case.title for case in volume.cases(volume.bare(8), 2, 2)]
SHAPES = [(1, 1, 5), (1, 3, 7), (2, 1, 10), (2, 4, 11), (3, 2, 16), (3, 5, 15), (4, 3, 20), (4, 8, 23), (5, 4, 26)]


def moved_and_account(title: str, n: int, m: int, layers: int, spare: int = 0) -> tuple[tuple[int, int, int], Any]:
    profile = volume.bare(layers)
    case = next(case for case in volume.cases(profile, n, m) if case.title == title)
    return volume.moved_layers(profile, case, spare), volume.account(case, spare)


@pytest.mark.parametrize(("n", "m", "layers"), SHAPES)
@pytest.mark.parametrize("title", SYSTEMS)
def test_moved_is_the_formula_less_its_shares(title: str, n: int, m: int, layers: int) -> None:
    moved, account = moved_and_account(title, n, m, layers)
    assert moved == account.expected


@pytest.mark.parametrize("spare", [1, 2, 3])
@pytest.mark.parametrize(("n", "m", "layers"), [(1, 1, 6), (1, 2, 9), (2, 3, 12), (1, 8, 20)])
@pytest.mark.parametrize("title", ["Harmony-DP", "Harmony-DP, last pack not fused"])
def test_room_for_one_more_layer_saves_all_three_transfers_of_it(
    title: str, n: int, m: int, layers: int, spare: int
) -> None:
    moved, account = moved_and_account(title, n, m, layers, spare)
    assert moved == account.expected
    assert account.stays >= 3 * n * spare


@pytest.mark.parametrize(
    ("title", "weights", "grads", "state"),
    [
        ("DP + lru, writes clean pages", (4 * 32 + 2) * 4, 2 * 32 * 4, 2 * 4),
        ("DP + lru, drops clean pages", (2 * 32 + 2) * 4, 2 * 32 * 4, 2 * 4),
        ("PP + lru, writes clean pages", 4 * 32 + 2, 2 * 32, 2),
        ("PP + lru, drops clean pages", 2 * 32 + 2, 2 * 32, 2),
        ("Harmony-DP", 3 * 4, 0, 2 * 4),
        ("Harmony-PP", 3, 0, 2),
    ],
)
def test_formulas_are_those_of_the_table(title: str, weights: int, grads: int, state: int) -> None:
    layers = 24
    case = next(case for case in volume.cases(volume.bare(layers), 4, 32) if case.title == title)
    account = volume.account(case)
    assert (account.weights, account.grads, account.state) == (weights * layers, grads * layers, state * layers)


@pytest.mark.parametrize("layers", [8, 12, 15])
def test_apart_from_fusing_harmony_pp_on_four_devices_moves_the_formula_itself(layers: int) -> None:
    moved, account = moved_and_account("Harmony-PP, last pack not fused", 4, 3, layers)
    assert moved == (3 * layers, 0, 2 * layers)
    assert account.fused == account.stays == 0


def test_harmony_pp_moves_a_hundredth_of_data_parallelism() -> None:
    (baseline, _, _), _ = moved_and_account("DP + lru, writes clean pages", 4, 32, 32)
    (ours, _, _), _ = moved_and_account("Harmony-PP", 4, 32, 32)
    assert baseline > 100 * ours
