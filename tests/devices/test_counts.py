"""What devices really moved and held is what their programs say, and what the papers say of the schedules."""

from pathlib import Path

import pytest

from counterpoint.core.plan import Plan
from tests.devices.launch import Crew, launch
from tests.devices.problems import Problem, Setting, differences, folder_of, plain_loop, replicated, staged, wrapped
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


def test_updates_for_another_server_are_refused(tmp_path: Path) -> None:
    problem = Problem()
    environments = [{"GROUP_RANK": str(server)} for server in (0, 1)]
    with Crew(2, act_on_servers, problem, Setting(replicated(problem, 2, shard_updates=True)), str(tmp_path / "home"),
              environments=environments) as crew:  # fmt: skip
        found = crew.outcomes(60)
    assert any("on another server uses it" in outcome.error for outcome in found), found
