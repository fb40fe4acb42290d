"""The planned choice against an exhaustive search, on the cases of the benchmark."""

import importlib.util
import statistics
from pathlib import Path
from types import ModuleType


def _benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "residency_optimality.py"
    spec = importlib.util.spec_from_file_location("residency_optimality", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_planned_moves_hardly_more_than_the_least_possible() -> None:
    found = [planned for planned, _ in _benchmark().ratios(count=150, seed=2)]
    assert min(found) >= 1.0
    assert statistics.median(found) <= 1.05
    assert max(found) <= 1.3
