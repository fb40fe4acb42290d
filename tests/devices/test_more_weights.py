"""Processes that build a model without a common seed are told so, instead of training different copies."""

from dataclasses import replace
from pathlib import Path

from tests.devices.launch import Crew, launch
from tests.devices.problems import Problem, Setting, differences, folder_of, replicated, staged, train
from tests.devices.unseeded import Unseeded, save

PROBLEM = Problem(steps=1)
SAYS = "initial weights on device 1 are not those on device 0; call torch.manual_seed"


def test_models_of_different_seeds_are_refused(tmp_path: Path) -> None:
    for plan in (replicated(PROBLEM, 2), staged("flush", PROBLEM)):
        with Crew(2, train, Unseeded(steps=1), Setting(plan), folder_of(tmp_path)) as crew:
            assert [SAYS in outcome.error for outcome in crew.outcomes()] == [True, True]


def test_a_checkpoint_makes_them_equal(tmp_path: Path) -> None:
    saved, setting = str(tmp_path / "saved"), Setting(replicated(PROBLEM, 2))
    launch(2, save, PROBLEM, setting, folder_of(tmp_path), saved)
    found = launch(2, train, Unseeded(steps=1), replace(setting, options={"resume": saved}), folder_of(tmp_path))
    assert differences(found[0]["weights"], found[1]["weights"]) == {}
