"""What stays against an exhaustive search, and what the planner takes against the least traffic."""

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


benchmark = _benchmark()


def test_planned_moves_hardly_more_than_the_least_possible() -> None:
    found = list(benchmark.ratios(count=150, seed=2))
    assert min(found) >= 1.0
    assert statistics.median(found) <= 1.05
    assert max(found) <= 1.3


def test_what_the_planner_takes_is_never_slower_than_the_least_traffic() -> None:
    """More bytes are moved only where that saves time."""
    found = list(benchmark.time_ratios(count=60, seed=3))
    assert max(time for time, _ in found) <= 1.0
    assert all(time < 1.0 for time, traffic in found if traffic > 1.0)
    assert statistics.median(traffic for _, traffic in found) <= 1.05
