"""The trainer's forecast -> the few numbers that a report sets beside what was measured."""

from dataclasses import dataclass

from counterpoint.trainer import Trainer


@dataclass(frozen=True, slots=True)
class Expected:
    """One step as it was forecast; `state_bytes` are weights, gradients and optimizer state together."""

    budget_bytes: int
    state_bytes: int
    step_ns: int
    peak_bytes: int
    read_bytes: int
    written_bytes: int


def expected_of(trainer: Trainer) -> Expected:
    forecast = trainer.forecast
    moved = dict(forecast.link_bytes)
    return Expected(
        budget_bytes=trainer.memory_bytes,
        state_bytes=forecast.training_bytes,
        step_ns=forecast.step_ns,
        peak_bytes=trainer.peak_bytes,
        read_bytes=moved.get("disk read", 0),
        written_bytes=moved.get("disk write", 0),
    )
