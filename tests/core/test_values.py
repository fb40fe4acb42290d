"""Machines, profiles, plans and outlines: what they refuse, and JSON that gives the same value back."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from counterpoint.core.costs import Costs
from counterpoint.core.files import from_json, load, save, to_json
from counterpoint.core.machine import Device, Home, Link, Machine, Tier
from counterpoint.core.outline import LayerOutline, Outline, Value, chain_outline
from counterpoint.core.plan import Pack, Plan, equal_packs
from counterpoint.core.profile import Curve, LayerCost, Profile, ValueCost
from counterpoint.core.task import Backward, Forward, activation, saved, weight

HOST = Home("host", ("down",), ("up",))
MACHINE = Machine(
    "pair",
    (Device("gpu 0", 2**30, (HOST,), server=0), Device("gpu 1", 2**31, (HOST,), ("peer",), speed_percent=50)),
    (Link("down", 10**9), Link("up", 10**9, 5), Link("peer", 10**9)),
    (Tier("host", 2**34),),
)
TIME = Curve.proportional(10, fixed=2)
PROFILE = Profile(
    "tiny",
    (
        LayerCost("embed", TIME, TIME, 3, 4, 100, 100, 200, saved_bytes=Curve.proportional(5)),
        LayerCost("head", TIME, TIME, 3, 4, 50, 50, 100, constant_bytes=8, tied=(0,)),
    ),
    (ValueCost(0, (1,), Curve.proportional(7), False),),
    tokens_per_sample=512,
)
PLAN = Plan("harmony", 4, 2, equal_packs(2, 1), (Pack(0, 0),), ("recompute", "keep"))


@pytest.mark.parametrize("value", [MACHINE, PROFILE, PLAN])
def test_json_gives_the_same_value_back(value: Machine | Profile | Plan, tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    save(value, path)
    assert load(type(value), path) == value


def changed(value: Any, *keys: str | int, to: Any) -> Any:
    data = json.loads(json.dumps(to_json(value)))
    place = data
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = to
    return data


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        (Machine, [], "machine.json must be an object with keys name, devices"),
        (Machine, {"name": "x"}, "machine.json lacks devices"),
        (Machine, changed(MACHINE, "gpus", to=2), "unknown keys gpus; known are name, devices"),
        (Machine, changed(MACHINE, "name", to=3), "machine.json: name must be text, not 3"),
        (Machine, changed(MACHINE, "devices", to=[]), "machine 'pair' has no device"),
        (Machine, changed(MACHINE, "devices", to="two"), "devices must be a list, not 'two'"),
        (Machine, changed(MACHINE, "devices", 1, "capacity_bytes", to="lots"), "cannot read 'lots' as a size"),
        (Machine, changed(MACHINE, "devices", 1, "capacity_bytes", to=True), r"devices\[1\]: capacity_bytes must be"),
        (Machine, changed(MACHINE, "devices", 1, "speed_percent", to="fast"), "speed_percent must be a whole number"),
        (Machine, changed(MACHINE, "links", 0, "bytes_per_s", to=0), "link 'down' needs bytes_per_s > 0"),
        (Profile, changed(PROFILE, "layers", 0, "forward_ns", "points", to=[[1, 2, 3]]), "must have 2 items, not 3"),
        (Profile, changed(PROFILE, "values", 0, "has_grad", to=1), "has_grad must be true or false, not 1"),
        (Plan, changed(PLAN, "schedule", to="magic"), "plan for 'magic': unknown schedule; known are plain"),
    ],
)
def test_bad_json_is_refused_by_name(kind: type, data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_json(kind, data, f"{kind.__name__.lower()}.json")


def test_sizes_in_json_may_have_units() -> None:
    data = changed(MACHINE, "devices", 0, "capacity_bytes", to="2GiB")
    assert from_json(Machine, data, "machine.json").devices[0].capacity_bytes == 2**31


def test_files_that_are_not_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*nothing.json: No such file"):
        load(Plan, tmp_path / "nothing.json")
    (tmp_path / "torn.json").write_text('{"schedule": ')
    with pytest.raises(ValueError, match=r"torn.json is not JSON"):
        load(Plan, tmp_path / "torn.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"binary.json is not JSON"):
        load(Plan, tmp_path / "binary.json")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Device("gpu", 0), "device 'gpu' needs capacity_bytes > 0, not 0"),
        (lambda: Device("gpu", 1, speed_percent=0), "device 'gpu' needs positive speeds"),
        (lambda: Tier("host", -1), "tier 'host' has a negative capacity: -1"),
        (lambda: Link("wire", 1, -1), "link 'wire' needs .* latency_ns >= 0"),
        (lambda: replace(MACHINE, tiers=()), "device 'gpu 0' names unknown links or tiers: host"),
        (lambda: replace(MACHINE, links=MACHINE.links[1:]), "unknown links or tiers: down"),
        (lambda: replace(MACHINE, links=MACHINE.links * 2), "two links or two tiers of one name"),
        (lambda: Pack(2, 1), "a pack needs 0 <= first <= last, not 2 to 1"),
        (lambda: Curve(()), "ascending microbatch sizes from 1 on"),
        (lambda: Curve(((2, 1), (1, 1))), r"ascending microbatch sizes from 1 on, not \[2, 1\]"),
        (lambda: Curve(((1, -5),)), "a curve cannot be negative"),
        (lambda: LayerCost("x", TIME, TIME, weight_bytes=-1), "layer 'x': weight_bytes cannot be negative: -1"),
        (lambda: LayerCost("x", TIME, TIME, weight_bytes=4, old_bytes=4), "old weights of 4 bytes must be smaller"),
        (lambda: Outline((), ()), "a chain needs at least one layer"),
        (lambda: Outline((LayerOutline(False, narrows=True),), ()), "layer 0 narrows, but has no weights"),
        (lambda: Outline((LayerOutline(),), (Value(1, ()),)), "value 0 is produced by layer 1; layers are 0 to 0"),
        (lambda: Outline((LayerOutline(),) * 2, (Value(1, (0,)),)), "a chain only goes forward"),
        (lambda: Outline((LayerOutline(False), LayerOutline(tied=(0,))), ()), "layer 1 is tied to layer 0"),
        (lambda: replace(PLAN, num_microbatches=0), "must be at least 1"),
        (lambda: replace(PLAN, backward_packs=()), "at least one backward pack"),
        (lambda: replace(PLAN, backward_packs=(Pack(1, 1),)), "layer 0 expected, pack 1-1 found"),
        (lambda: replace(PLAN, forward_packs=(Pack(0, 5),)), "forward packs end at layer 5, the chain at layer 1"),
        (lambda: replace(PLAN, activations=("keep",)), "2 backward packs need as many activation policies, not 1"),
        (lambda: replace(PLAN, activations=("keep", "burn")), "unknown activation policies burn"),
        (lambda: replace(PLAN, forward_group=3), "forward groups of 3 do not divide 4 microbatches"),
        (lambda: replace(PLAN, forward_group=2), "may differ only if every pack recomputes"),
        (lambda: replace(PLAN, residency="magic"), "unknown residency 'magic'"),
        (lambda: replace(PLAN, flush_steps=2), "the first 2 steps by flush are for 2bw"),
        (lambda: replace(PLAN, flush_steps=-2), "flush_steps must be at least 0, not -2"),
        (lambda: replace(PLAN, stages=(Pack(0, 1),), num_devices=2), "need 1 devices, not 2"),
        (lambda: Costs(PROFILE, replace(PLAN, backward_packs=equal_packs(3, 1), activations=("keep",) * 3,
                                        forward_packs=equal_packs(3, 1))), "they end at layer 2, profile 'tiny'"),
    ],
)  # fmt: skip
def test_bad_values_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_pack_that_keeps_cannot_cross_a_forward_pack() -> None:
    with pytest.raises(ValueError, match="pack 0-1 keeps what autograd saves, so it cannot cross"):
        Plan("plain", 1, 1, (Pack(0, 1),), equal_packs(2, 1), ("keep",))


def test_costs_of_buffers_and_tasks() -> None:
    costs = Costs(PROFILE, PLAN)
    assert costs.buffer_bytes(weight(0, 5)) == 100
    assert costs.buffer_bytes(activation(0, 3)) == 14
    assert costs.buffer_bytes(saved(0, 3)) == 10
    assert costs.duration_ns(Forward(0, 1, 0, 0)) == 2 * 22
    assert costs.duration_ns(Forward(0, 1, 0, 0, count=2), speed_percent=50) == 2 * 2 * 42
    assert costs.duration_ns(Backward(0, 0, 0, 0, 0, recompute=True)) == 44
    assert costs.workspace_bytes(Backward(0, 0, 0, 0, 0, recompute=True)) == 10


def test_outline_says_what_enters_and_leaves_a_pack() -> None:
    skip = Outline((LayerOutline(),) * 4, (Value(0, (1, 3)), Value(1, (2,)), Value(2, (3,))))
    assert skip.inputs(1, 2) == (0,)
    assert skip.outputs(0, 1) == (0, 1)
    assert skip.inputs(3, 3) == (0, 2)
    assert chain_outline(1).values == ()


def test_a_recomputation_spares_what_only_the_outputs_of_its_last_layer_need() -> None:
    spared = replace(PROFILE, layers=tuple(replace(c, unread_ns=Curve.constant(4)) for c in PROFILE.layers))
    whole, less = Costs(PROFILE, PLAN), Costs(spared, PLAN)
    again, once = Backward(0, 1, 0, 0, 0, recompute=True), Backward(0, 1, 0, 0, 0, recompute=False)
    assert whole.duration_ns(again) - less.duration_ns(again) == 4
    assert whole.duration_ns(once) == less.duration_ns(once)
    assert whole.duration_ns(Forward(0, 1, 0, 0)) == less.duration_ns(Forward(0, 1, 0, 0))


def test_makings_are_known_by_name() -> None:
    with pytest.raises(ValueError, match="makings are whole, panels, added"):
        replace(PROFILE.layers[0], makings=((1, "somehow"),))
