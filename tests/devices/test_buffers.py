"""Statistics that layers keep: replicas take those of the first after every step, as DistributedDataParallel does."""

from pathlib import Path

import pytest
import torch

from tests.devices.launch import launch
from tests.devices.problems import Problem, Setting, differences, folder_of, replicated, staged
from tests.devices.workers import train_beside_ddp

PROBLEM = Problem(model="normed", optimizer="sgd", dtype="float64")


def test_statistics_of_replicas_are_those_of_ddp(tmp_path: Path) -> None:
    found = launch(2, train_beside_ddp, PROBLEM, Setting(replicated(PROBLEM, 2)), folder_of(tmp_path))
    for step in range(PROBLEM.steps):
        assert differences(found[1]["ours"][step], found[0]["ours"][step]) == {}
        torch.testing.assert_close(found[0]["ours"][step], found[0]["ddp"][step], rtol=1e-12, atol=1e-14)
    assert set(found[0]["ours"][0]) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert int(found[1]["ours"][-1]["norm.num_batches_tracked"]) == PROBLEM.steps * 2


@pytest.mark.parametrize("schedule", ["flush", "gpipe"])
def test_replicas_of_a_stage_have_the_same_statistics_after_every_step(schedule: str, tmp_path: Path) -> None:
    plan = staged(schedule, PROBLEM, replicas=2)
    found = launch(4, train_beside_ddp, PROBLEM, Setting(plan), folder_of(tmp_path), False)
    for step in range(PROBLEM.steps):  # the norm is in the first stage
        assert differences(found[1]["ours"][step], found[0]["ours"][step]) == {}
        assert int(found[1]["ours"][step]["norm.num_batches_tracked"]) == (step + 1) * 2
    assert [differences(device["settled"], found[0]["settled"]) for device in found] == [{}] * 4


def test_2bw_agrees_when_it_is_settled(tmp_path: Path) -> None:
    plan = staged("2bw", PROBLEM, replicas=2)
    found = launch(4, train_beside_ddp, PROBLEM, Setting(plan), folder_of(tmp_path), False)
    assert [differences(device["settled"], found[0]["settled"]) for device in found] == [{}] * 4
    assert int(found[3]["settled"]["norm.num_batches_tracked"]) == PROBLEM.steps * 2
