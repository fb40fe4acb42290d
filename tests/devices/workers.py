"""What processes do in tests of failures: train for ever, stumble, differ from one another."""

import os
from pathlib import Path
from typing import Any

from tests.devices.problems import Problem, Setting, make_trainer, train


def train_for_ever(problem: Problem, setting: Setting, folder: str, mark: str) -> None:
    with make_trainer(problem, setting, folder) as trainer:
        batch = problem.batches(1)[0]
        while True:
            trainer.step(batch)
            Path(f"{mark}.{trainer.device}").write_text(str(trainer.step_count))


def stumble(problem: Problem, setting: Setting, folder: str) -> None:
    with make_trainer(problem, setting, folder) as trainer:
        for number, batch in enumerate(problem.batches()):
            if number == 2 and trainer.device == 1:
                raise KeyError("a mistake of the caller's own")
            trainer.step(batch)


def differ(problems: list[Problem], settings: list[Setting], folder: str) -> dict[str, Any]:
    device = int(os.environ["RANK"])
    return train(problems[device], settings[device], folder)


def quarrel(problem: Problem, setting: Setting, folder: str) -> None:
    with make_trainer(problem, setting, folder) as trainer:
        if trainer.device:
            trainer.save(Path(folder) / "saved")
        else:
            trainer.evaluate(problem.batches(1)[0])
