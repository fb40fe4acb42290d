"""A folder and budgets -> this machine as the planner sees it: RAM under budgets, a disk, wires between processes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from counterpoint.core.machine import Device, Home, Link, Machine, Tier
from counterpoint.runtime.disk_file import free_bytes
from counterpoint.runtime.probe import DiskSpeed, probe_disk

LOOPBACK_BYTES_PER_S = 1_000_000_000  # of gloo between processes of one machine
_LOOPBACK_NS = 100_000
NETWORK_BYTES_PER_S = 1_250_000_000  # 10 Gbit/s, unless the user says how fast it is
_NETWORK_NS = 200_000
_DISK_NS = 100_000
_PROBE_BYTES = 256 << 20


def this_machine(budget: int, folder: Path) -> Machine:
    """One process; the two directions of its disk share the bandwidth."""
    speed = _disk_speed(folder.stat().st_dev, folder)
    home = Home("disk", ("disk read", "disk"), ("disk write", "disk"))
    links = (
        Link("disk read", speed.read_bytes_per_s, _DISK_NS),
        Link("disk write", speed.write_bytes_per_s, _DISK_NS),
        Link("disk", max(speed.read_bytes_per_s, speed.write_bytes_per_s, speed.both_bytes_per_s)),
    )
    held = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    return Machine("this machine", (Device("cpu", budget, (home,)),), links, (Tier("disk", free_bytes(folder) + held),))


def these_devices(
    budgets: Sequence[int], folder: Path, servers: Sequence[str] = (), network_bytes_per_s: int | None = None
) -> Machine:
    """Processes, each with its budget and a wire to the others; those of one server share its disk.

    `servers` names the server of each, by default one for all. The others' disks are taken to be as fast as this one,
    and one network of so many bytes per second joins each server to the rest.
    """
    single = this_machine(max(min(budgets), 1), folder)
    names = list(dict.fromkeys(servers)) or [""]
    count, speed = len(names), network_bytes_per_s or NETWORK_BYTES_PER_S
    links = [link for server in range(count) for link in _links_of_server(single, server, count, speed)]
    for index in range(len(budgets)):
        links += [Link(f"{way} {index}", LOOPBACK_BYTES_PER_S, _LOOPBACK_NS) for way in ("send", "receive")]
    places = [names.index(name) for name in servers] or [0] * len(budgets)
    devices = [_device(index, budget, places[index], count) for index, budget in enumerate(budgets)]
    tiers = [
        Tier(_at(tier.name, server, count), tier.capacity_bytes) for server in range(count) for tier in single.tiers
    ]
    text = f"{len(budgets)} processes" + (f" on {count} servers" if count > 1 else "")
    return Machine(text, tuple(devices), tuple(links), tuple(tiers))


def _device(index: int, budget: int, server: int, num_servers: int) -> Device:
    read, write, disk = (_at(name, server, num_servers) for name in ("disk read", "disk write", "disk"))
    out, into = ((f"from server {server}",), (f"to server {server}",)) if num_servers > 1 else ((), ())
    home = Home(disk, (read, disk), (write, disk))
    return Device(f"cpu {index}", max(budget, 1), (home,), (f"send {index}",), (f"receive {index}",), out, into, server)


def _links_of_server(single: Machine, server: int, num_servers: int, network_bytes_per_s: int) -> list[Link]:
    """A server's disk, and its wires to other servers if there are any."""
    links = [replace(link, name=_at(link.name, server, num_servers)) for link in single.links]
    if num_servers > 1:
        links += [Link(f"{way} server {server}", network_bytes_per_s, _NETWORK_NS) for way in ("from", "to")]
    return links


def _at(text: str, server: int, num_servers: int) -> str:
    return text if num_servers == 1 else f"{text} of server {server}"


_SPEEDS: dict[int, DiskSpeed] = {}


def _disk_speed(device: int, folder: Path) -> DiskSpeed:
    """Measured once for each file system."""
    if device not in _SPEEDS:
        _SPEEDS[device] = probe_disk(folder, min(_PROBE_BYTES, free_bytes(folder) // 2))
    return _SPEEDS[device]
