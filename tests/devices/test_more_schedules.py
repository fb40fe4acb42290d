"""The plain loop on several devices, the baseline of benchmarks: it trains as the others do, in memory or paged."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from counterpoint.core.plan import equal_packs
from tests.devices.launch import launch
from tests.devices.problems import (
    NUM_LAYERS,
    Problem,
    Setting,
    differences,
    folder_of,
    plain_loop,
    replicated,
    train,
    train_swapping,
)

PROBLEM = Problem(max_grad_norm=0.05, optimizer="momentum")
PLAN = replace(replicated(PROBLEM, 2), schedule="plain", forward_packs=equal_packs(NUM_LAYERS, 1))


@pytest.mark.parametrize("paged", [False, True], ids=["in memory", "paged"])
def test_plain_replicas_agree_with_one_another_and_nearly_with_the_plain_loop(paged: bool, tmp_path: Path) -> None:
    setting = Setting(replace(PLAN, residency="lru" if paged else "planned"))
    found = launch(2, train_swapping if paged else train, PROBLEM, setting, folder_of(tmp_path))
    weights, losses = plain_loop(PROBLEM)
    assert differences(found[0]["weights"], found[1]["weights"]) == {}
    torch.testing.assert_close(found[0]["weights"], weights, rtol=1e-5, atol=1e-6)
    assert found[0]["losses"][:-1] == pytest.approx(losses, rel=1e-6)
    assert not paged or all(device["loaded"] > 0 for device in found)
