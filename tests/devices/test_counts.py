"""What devices really moved and held is what their programs say, and what the papers say of the schedules."""

from dataclasses import replace
from pathlib import Path

import pytest

from counterpoint.core.plan import Plan
from tests.devices.launch import Crew, launch
from tests.devices.problems import (
    Problem,
    Setting,
    differences,
    folder_of,
    plain_loop,
    replicated,
    staged,
    train,
    wrapped,
)
from tests.devices.workers import act_on_servers, count

PROBLEM = Problem(minibatch=16, dtype="float64")


@pytest.mark.parametrize(
    ("plan", "in_flight", "versions"),
    [
        (staged("gpipe", PROBLEM, stages=4), [8, 8, 8, 8], 1),
        (staged("flush", PROBLEM, stages=4), [4, 3, 2, 1], 1),
        (staged("2bw", PROBLEM, stages=4), [4, 3, 2, 1], 2),
        (staged("2bw", PROBLEM, stages=2, replicas=2), [2, 2, 1, 1], 2),
        (replicated(PROBLEM, 2, shard_updates=True), None, None),
        (wrapped(PROBLEM, 2), None, None),
    ],
    ids=["gpipe", "flush", "2bw", "2bw 2x2", "harmony-dp", "harmony-pp"],
)
def test_devices_do_what_the_program_says(
    plan: Plan, in_flight: list[int] | None, versions: int | None, tmp_path: Path
) -> None:
    found = launch(plan.num_devices, count, PROBLEM, Setting(plan), folder_of(tmp_path))
    for device in found:
        assert {name: measured for name, (measured, _) in device.items()} == {
            name: expected for name, (_, expected) in device.items()
        }
    if in_flight is not None:
        assert [device["in flight"][0] for device in found] == in_flight
        assert max(device["versions"][0] for device in found) == versions


def test_servers_have_homes_of_their_own(tmp_path: Path) -> None:
    """Replicas of a stage on one server, the pipeline across."""
    problem = Problem()
    environments = [{"GROUP_RANK": str(server)} for server in (0, 1)]
    with Crew(2, act_on_servers, problem, Setting(staged("flush", problem)), str(tmp_path / "home"),
              environments=environments) as crew:  # fmt: skip
        found = crew.results()
    weights, losses = plain_loop(problem)
    half = [{n: w for n, w in weights.items() if n.split(".")[0] in names}
            for names in (("first", "second", "third"), ("fourth", "fifth", "last"))]  # fmt: skip
    assert [differences(device["weights"], part) for device, part in zip(found, half, strict=True)] == [{}, {}]
    assert found[0]["losses"][:-1] == found[1]["losses"][:-1] == losses


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        (Setting(replicated(PROBLEM, 2, shard_updates=True)), "on another server uses it"),
        (Setting(options={"schedule": "harmony_pp"}), "harmony_pp needs devices that share a home"),
    ],
    ids=["sharded updates", "harmony-pp"],
)
def test_updates_for_another_server_are_refused(setting: Setting, says: str, tmp_path: Path) -> None:
    environments = [{"GROUP_RANK": str(server)} for server in (0, 1)]
    with Crew(2, act_on_servers, PROBLEM, setting, str(tmp_path / "home"), environments=environments) as crew:
        found = crew.outcomes()
    assert all(says in outcome.error for outcome in found), found


@pytest.mark.parametrize("schedule", ["flush", "2bw"])
def test_replicas_on_servers_of_their_own(schedule: str, tmp_path: Path) -> None:
    """Pipelines side by side: sums of gradients cross between servers, and their bits are the same."""
    problem = Problem(dtype="float64", max_grad_norm=0.05)
    plan = staged(schedule, problem, replicas=2)
    expected = launch(4, train, problem, Setting(plan), folder_of(tmp_path))
    setting = Setting(replace(plan, replicas_apart=True))
    environments = [{"GROUP_RANK": str(server)} for server in (0, 0, 1, 1)]
    with Crew(4, act_on_servers, problem, setting, str(tmp_path / "home"), environments=environments) as crew:
        found = crew.results()
    assert [differences(device["weights"], expected[0]["weights"]) for device in found] == [{}] * 4
    assert [device["losses"][1:] for device in found] == [expected[0]["losses"][1:]] * 4
