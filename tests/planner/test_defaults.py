"""Default plans: legal for every schedule, packs that leave room, and clear refusals."""

import pytest

from counterpoint.core.costs import Costs
from counterpoint.core.plan import SCHEDULES, Pack
from counterpoint.core.task import Update
from counterpoint.planner import catalog
from counterpoint.planner.defaults import PIPELINES, PlanWishes, default_plan, task_bytes


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", ["tiny", "gpt2-xl", "bert96-1080ti", "gpt2-10b"])
@pytest.mark.parametrize("num_devices", [1, 4])
def test_every_schedule_gets_a_plan(schedule: str, model: str, num_devices: int) -> None:
    machine = catalog.machine("1080ti", num_devices)
    profile = catalog.profile(model, machine)
    plan = default_plan(profile, machine, PlanWishes(schedule, minibatch=64))
    assert plan.schedule == schedule
    assert plan.minibatch_size == 64
    assert plan.num_devices == num_devices
    assert plan.num_layers == len(profile.layers)
    assert len(plan.stages) == (num_devices if schedule in PIPELINES else 0)


def test_what_fits_is_kept_and_what_does_not_is_recomputed() -> None:
    machine = catalog.machine("1080ti", 4)
    for model, policy in (("tiny", "keep"), ("gpt2-xl", "recompute")):
        plan = default_plan(catalog.profile(model, machine), machine, PlanWishes("gpipe"))
        assert set(plan.activations) == {policy}


def test_early_stages_are_not_overloaded() -> None:
    """The head costs as much as several blocks, so the last stage gets fewer of them."""
    machine = catalog.machine("v100", 8)
    stages = default_plan(catalog.profile("gpt-2.2b", machine), machine, PlanWishes("2bw", 64)).stages
    assert stages[-1].last - stages[-1].first < stages[1].last - stages[1].first


def test_wishes_are_followed() -> None:
    machine = catalog.machine("1080ti", 4)
    profile = catalog.profile("gpt2-medium", machine)
    wishes = PlanWishes("flush", 32, microbatch=2, replicas=2, activations="evict", layers_per_pack=3, clipping=True)
    plan = default_plan(profile, machine, wishes)
    assert (plan.num_microbatches, plan.microbatch_size, plan.num_replicas, len(plan.stages)) == (8, 2, 2, 2)
    assert set(plan.activations) == {"evict"}
    assert plan.clipping
    assert max(pack.last - pack.first for pack in plan.backward_packs) == 2


def test_an_update_in_place_counts_weights_once() -> None:
    machine = catalog.machine("1080ti", 1)
    profile = catalog.profile("tiny", machine)
    costs = Costs(profile, default_plan(profile, machine, PlanWishes("plain")))
    layer = profile.layers[1]
    expected = layer.weight_bytes + layer.grad_bytes + layer.state_bytes
    assert task_bytes(Update(1, 1, 0), costs, profile.outline()) == expected


@pytest.mark.parametrize(
    ("wishes", "text"),
    [
        (PlanWishes("harmny"), r"unknown schedule 'harmny' \(did you mean harmony\?\)"),
        (
            PlanWishes("flush", 30, microbatch=4),
            "a minibatch of 30 does not divide into microbatches of 4 on 1 replicas",
        ),
        (PlanWishes("flush", 32, replicas=3), "4 devices do not divide into 3 replicas"),
    ],
)
def test_what_cannot_be_is_refused(wishes: PlanWishes, text: str) -> None:
    machine = catalog.machine("1080ti", 4)
    with pytest.raises(ValueError, match=text):
        default_plan(catalog.profile("tiny", machine), machine, wishes)


def test_more_stages_than_layers_are_refused() -> None:
    machine = catalog.machine("v100", 16)
    with pytest.raises(ValueError, match="16 stages for 10 layers"):
        default_plan(catalog.profile("tiny", machine), machine, PlanWishes("flush", 64))


def test_single_layer_packs() -> None:
    machine = catalog.machine("1080ti", 2)
    plan = default_plan(catalog.profile("tiny", machine), machine, PlanWishes("harmony_pp", layers_per_pack=1))
    assert plan.backward_packs[:2] == (Pack(0, 0), Pack(1, 1))
