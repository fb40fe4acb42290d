"""Program x Costs x Machine -> Timeline, by discrete events: deterministic, in whole nanoseconds."""

from counterpoint.simulator.engine import simulate

__all__ = ["simulate"]
