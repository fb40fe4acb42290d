"""A device that dies, hangs or disagrees: the others end within seconds and say who it was and what they waited for."""

import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from counterpoint.runtime.calls import Calls, disagreement
from tests.devices.launch import Crew
from tests.devices.problems import Problem, Setting, act, replicated, staged
from tests.devices.workers import differ, quarrel, stumble, train_for_ever

PROBLEM = Problem()
FLUSH = Setting(staged("flush", PROBLEM))
HALVES = Setting(replicated(PROBLEM, 2, shard_updates=True))
SOON_SECONDS = 8.0
SILENT_SECONDS = 25.0
IMPATIENT = [{"COUNTERPOINT_SILENCE_SECONDS": "6"}] * 2


@pytest.mark.parametrize(
    ("sent", "victim", "setting", "limit", "says"),
    [
        (
            signal.SIGKILL,
            1,
            FLUSH,
            SOON_SECONDS,
            r"device 1 .*gone.*device 0 was waiting for .*(R \w+\.m\d+ <1|losses)",
        ),
        (signal.SIGKILL, 0, FLUSH, SOON_SECONDS, r"device 0 .*gone.*device 1 (was waiting for|had come to) "),
        (signal.SIGKILL, 1, HALVES, SOON_SECONDS, r"device.* 1 .*gone"),
        (signal.SIGSTOP, 1, FLUSH, SILENT_SECONDS, r"device 1 has not answered for \d+ s"),
        (signal.SIGSTOP, 0, FLUSH, SILENT_SECONDS, r"device 0 has not answered for \d+ s"),
    ],
    ids=["killed", "first killed", "replica killed", "stopped", "first stopped"],
)
def test_others_end_soon(
    sent: signal.Signals, victim: int, setting: Setting, limit: float, says: str, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    home = str(tmp_path / "home")
    environments = IMPATIENT if sent == signal.SIGSTOP else ()
    with Crew(2, train_for_ever, PROBLEM, setting, home, str(mark), environments=environments) as crew:
        while not all(mark.with_suffix(f".{device}").exists() for device in range(2)):
            assert all(process.is_alive() for process in crew.processes)
            time.sleep(0.05)
        pid = crew.processes[victim].pid
        assert pid is not None
        os.kill(pid, sent)
        other = crew.processes[1 - victim]
        other.join(limit)
        assert other.exitcode == 0, "it hangs"
        error = crew.outcome(1 - victim).error
    assert error.startswith("ExecutionError: ")
    assert re.search(says, error), error


def test_a_mistake_of_one_is_told_to_the_others(tmp_path: Path) -> None:
    with Crew(2, stumble, PROBLEM, FLUSH, str(tmp_path / "home")) as crew:
        first, second = crew.outcomes()
    said = r"ExecutionError: device 1 failed: KeyError: .*mistake.*; device 0 (was waiting for|had come to) \w"
    assert re.match(said, first.error), first.error
    assert second.error.startswith("KeyError")
    assert list((tmp_path / "home").iterdir()) == []


def test_a_killed_run_leaves_a_folder_that_the_next_one_can_use(tmp_path: Path) -> None:
    mark, home = tmp_path / "mark", str(tmp_path / "home")
    with Crew(2, train_for_ever, PROBLEM, FLUSH, home, str(mark)) as crew:
        while not mark.with_suffix(".0").exists():
            time.sleep(0.05)
    with Crew(2, act, PROBLEM, FLUSH, home, [("steps", 2)]) as crew:
        assert [found["steps"] for found in crew.results()] == [2, 2]


@pytest.mark.parametrize(
    ("problem", "setting", "says"),
    [
        (replace(PROBLEM, model="normed"), FLUSH, "the model on device 1 is Mlp"),
        (replace(PROBLEM, optimizer="sgd"), FLUSH, "the optimizer on device 1 is SGD"),
        (replace(PROBLEM, seed=4), FLUSH, "the seed on device 1 is 4, on device 0 3"),
        (PROBLEM, Setting(staged("gpipe", PROBLEM)), "the plan on device 1 is"),
        (PROBLEM, replace(FLUSH, memory="3GiB"), "memory on device 1 is 3221225472, on device 0 4294967296"),
    ],
    ids=["model", "optimizer", "seed", "plan", "memory"],
)
def test_processes_that_differ_are_named(problem: Problem, setting: Setting, says: str, tmp_path: Path) -> None:
    with Crew(2, differ, [PROBLEM, problem], [FLUSH, setting], str(tmp_path / "home")) as crew:
        found = crew.outcomes()
    assert all("the processes differ: " in outcome.error and says in outcome.error for outcome in found), found


@pytest.mark.parametrize(
    ("setting", "calls", "says"),
    [
        (FLUSH, ("step", "save"), "device 0 is at step 2, device 1 at save; "),
        (FLUSH, ("evaluate", "step"), "device 0 is at evaluate, device 1 at step 2; "),
        (FLUSH, ("evaluate", "save"), "device 0 is at evaluate, device 1 at save; "),
        (FLUSH, ("step", "close"), "device 0 is at step 2, device 1 at close; "),
        (FLUSH, ("close", "step"), "device 0 is at close, device 1 at step 2; "),
        (Setting(staged("2bw", PROBLEM)), ("save", "step"), "device 0 is at save, device 1 at step 2; "),
        (HALVES, ("step", "export"), "device 0 is at step 2, device 1 at export; "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_different_calls_are_named(setting: Setting, calls: tuple[str, str], says: str, tmp_path: Path) -> None:
    with Crew(2, quarrel, PROBLEM, setting, str(tmp_path / "home"), calls) as crew:
        found = crew.results()
    wanted = f"{says}every process must make the same calls in the same order"
    assert all(wanted in text and seconds < SOON_SECONDS for text, seconds in found), found


def test_calls_are_compared_by_their_number() -> None:
    ahead = Calls().then("step 0").then("step 1").then("save")
    assert disagreement({0: ahead, 1: Calls().then("step 0"), 2: Calls()}) is None
    text = disagreement({0: ahead, 1: Calls().then("step 0").then("evaluate"), 2: ahead})
    assert text is not None
    assert text.startswith("device 0 is at step 1, device 1 at evaluate, device 2 at step 1; ")
    for step in range(40):
        ahead = ahead.then(f"step {step}")
    assert ahead.at(43) == "step 39"
    assert ahead.at(44) is None
    assert ahead.at(3) is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"schedule": "flush", "replicas": 3}, "2 devices do not divide into 3 replicas"),
        ({"schedule": "2bw", "devices": 4}, "4 devices are asked for and 2 processes were started"),
        ({"schedule": "flash"}, "unknown schedule 'flash'"),
        ({"schedule": "harmony", "microbatch": 8}, "does not divide into microbatches of 8 on 2 replicas"),
    ],
    ids=["replicas", "devices", "schedule", "minibatch"],
)
def test_bad_options_are_refused_on_every_device(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    setting = Setting(options=options)
    with Crew(2, act, PROBLEM, setting, str(tmp_path / "home"), [("steps", 1)]) as crew:
        found = crew.outcomes()
    assert all(says in outcome.error for outcome in found), found


def test_2bw_with_too_few_microbatches_and_more_devices_than_layers(tmp_path: Path) -> None:
    few = Setting(options={"schedule": "2bw", "microbatch": 8})
    with Crew(4, act, PROBLEM, few, str(tmp_path / "home"), [("steps", 1)]) as crew:
        assert all("2bw needs at least 3" in outcome.error for outcome in crew.outcomes())
    many = Setting(options={"schedule": "flush"})
    with Crew(7, act, PROBLEM, many, str(tmp_path / "home"), [("steps", 1)]) as crew:
        assert all("7 stages for 6 layers" in outcome.error for outcome in crew.outcomes())
