"""Built-in machines and profiles: all of them load, and their numbers are those we say."""

from pathlib import Path

import pytest

from counterpoint.core import files
from counterpoint.core.machine import GIB, Machine
from counterpoint.core.profile import Profile
from counterpoint.planner import catalog
from counterpoint.planner.machines import MACHINES, machine, usual_precision, with_budget


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_every_machine_joins_all_its_devices(name: str, num_devices: int) -> None:
    found = machine(name, num_devices)
    assert len(found.devices) == num_devices
    for device in range(num_devices):
        assert found.devices[device].homes
        for peer in range(num_devices):
            if peer != device:
                assert found.path(device, peer)


def test_harmonys_server() -> None:
    found = machine("1080ti", 4)
    assert {device.capacity_bytes for device in found.devices} == {10 * GIB}
    assert {device.homes[0].load for device in found.devices} == {("host to devices",)}
    assert found.link("host to devices").bytes_per_s == 11.5 * GIB
    assert [found.link(name).bytes_per_s / GIB for name in found.path(0, 3)] == pytest.approx([8.2, 8.2])


def test_servers_are_joined_by_a_network() -> None:
    found = machine("v100-10gbit", 16)
    assert [device.server for device in found.devices] == [0] * 8 + [1] * 8
    assert found.path(0, 7) == ("from device 0", "to device 7")
    assert found.path(7, 8) == ("from server 0", "to server 1")
    assert found.link("from server 0").bytes_per_s == 1_250_000_000
    assert [tier.name for tier in found.tiers if "host" in tier.name] == ["host of server 0", "host of server 1"]


def test_two_v100_share_an_uplink() -> None:
    found = machine("v100", 4)
    assert [device.homes[0].load for device in found.devices] == [
        ("host to devices 0-1",), ("host to devices 0-1",), ("host to devices 2-3",), ("host to devices 2-3",)
    ]  # fmt: skip


def test_disk_lies_behind_the_host() -> None:
    home = machine("4090", 2).home(1, "disk")
    assert home.load == ("disk read", "host to device 1")
    assert home.evict == ("device 1 to host", "disk write")


def test_a_4090_reaches_its_peer_through_the_host() -> None:
    assert machine("4090", 2).path(0, 1) == ("device 0 to host", "host to device 1")


def test_a_laptop_has_only_a_disk() -> None:
    assert [tier.name for tier in machine("laptop", 1).tiers] == ["disk"]


def test_precision_chooses_the_speed() -> None:
    assert machine("a100", 1, "bf16").devices[0].flops_per_s == 2 * machine("a100", 1, "fp32").devices[0].flops_per_s
    assert usual_precision("1080ti") == usual_precision("laptop") == "fp32"
    assert usual_precision("h100") == "bf16"


def test_a_budget_replaces_the_capacity() -> None:
    assert {d.capacity_bytes for d in with_budget(machine("3090", 2), 5 * GIB).devices} == {5 * GIB}


@pytest.mark.parametrize(
    ("name", "num_devices", "text"),
    [
        ("1080 ti", 4, r"unknown machine '1080 ti' \(did you mean 1080ti\?\)"),
        ("4090", 9, "'4090' is one server of up to 8 devices, not 9"),
        ("4090", 0, "at least 1 device"),
    ],
)
def test_what_cannot_be_built_is_refused(name: str, num_devices: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        machine(name, num_devices)


def test_machines_and_profiles_come_from_files_too(tmp_path: Path) -> None:
    built = catalog.machine("3090", 2)
    files.save(built, tmp_path / "machine.json")
    assert catalog.machine(str(tmp_path / "machine.json")) == built
    with pytest.raises(ValueError, match="describes 2 devices, not 4"):
        catalog.machine(str(tmp_path / "machine.json"), 4)
    profile = catalog.profile("tiny", built)
    files.save(profile, tmp_path / "profile.json")
    assert catalog.profile(str(tmp_path / "profile.json"), built) == profile


@pytest.mark.parametrize("name", catalog.models())
def test_every_model_has_a_profile(name: str) -> None:
    profile = catalog.profile(name, catalog.machine("a100", 1))
    assert isinstance(profile, Profile)
    assert isinstance(catalog.machine("laptop"), Machine)
    assert all(layer.forward_ns.at(1) > 0 and layer.backward_ns.at(1) > 0 for layer in profile.layers)


def test_measured_profiles_are_what_harmony_measured() -> None:
    bert = catalog.profile("bert96-1080ti", catalog.machine("1080ti", 1))
    assert (len(bert.layers), bert.tokens_per_sample) == (100, 512)
    assert bert.layers[1].forward_ns.at(16) == 39_981_000
    assert bert.layers[1].forward_ns.at(16) + bert.layers[1].backward_ns.at(16) == 120_847_000
    assert bert.layers[1].host_update_ns == 24_158_000
    gpt2 = catalog.profile("gpt2-xl-1080ti", catalog.machine("1080ti", 1))
    assert (len(gpt2.layers), gpt2.layers[1].constant_bytes) == (52, 4_194_304)
    layer, size = gpt2.layers[1], 8
    held = layer.saved_bytes.at(size) + layer.backward_workspace_bytes.at(size)
    boundary = 2 * gpt2.values[1].value_bytes.at(size)
    fixed = 4_993_161_216 - held - boundary
    assert layer.weight_bytes + layer.constant_bytes <= fixed <= 2 * layer.weight_bytes + layer.constant_bytes
