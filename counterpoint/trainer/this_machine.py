"""A folder and budgets -> this machine as the planner sees it: devices under budgets, their homes, their wires."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from counterpoint.core.machine import Device, Home, Link, Machine, Tier
from counterpoint.runtime.backend import CPU, Backend
from counterpoint.runtime.disk_file import free_bytes
from counterpoint.runtime.probe import DiskSpeed, probe_disk
from counterpoint.runtime.probe_copies import CopySpeed, probe_copies

LOOPBACK_BYTES_PER_S = 1_000_000_000  # of gloo between processes of one machine
_LOOPBACK_NS = 100_000
NETWORK_BYTES_PER_S = 1_250_000_000  # 10 Gbit/s, unless the user says how fast it is
_NETWORK_NS = 200_000
_DISK_NS = 100_000
_COPY_NS = 20_000
_PROBE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What devices have around them: a folder on a disk and, beside accelerators, so much host memory."""

    folder: Path
    backend: Backend = CPU
    host_bytes: int = 0


def this_machine(budget: int, around: Surroundings) -> Machine:
    """One process."""
    return replace(these_devices([budget], around), name="this machine")


def these_devices(
    budgets: Sequence[int],
    around: Surroundings,
    servers: Sequence[str] = (),
    network_bytes_per_s: int | None = None,
) -> Machine:
    """Processes, each with its budget and a wire to the others; those of one server share its disk and its memory.

    `servers` names the server of each, by default one for all. The others' disks and devices are taken to be as fast as
    those here, and one network of so many bytes per second joins each server to the rest.
    """
    names = list(dict.fromkeys(servers)) or [""]
    count, speed = len(names), network_bytes_per_s or NETWORK_BYTES_PER_S
    copies = None if around.backend.is_process else probe_copies(around.backend)
    links = [link for server in range(count) for link in _links_of_server(around.folder, server, count, speed)]
    for index in range(len(budgets)):
        links += _links_of_device(index, len(budgets), copies)
    places = [names.index(name) for name in servers] or [0] * len(budgets)
    devices = [
        _device(index, max(budget, 1), places[index], count, len(budgets), around)
        for index, budget in enumerate(budgets)
    ]
    held = sum(file.stat().st_size for file in around.folder.iterdir() if file.is_file())
    tiers: list[Tier] = []
    for server in range(count):
        tiers += [Tier(_at("host", server, count), around.host_bytes)] if around.host_bytes else []
        tiers.append(Tier(_at("disk", server, count), free_bytes(around.folder) + held))
    text = f"{len(budgets)} processes" + (f" on {count} servers" if count > 1 else "")
    return Machine(text, tuple(devices), tuple(links), tuple(tiers))


def _device(index: int, budget: int, server: int, num_servers: int, num_devices: int, around: Surroundings) -> Device:
    read, write, disk = (_at(name, server, num_servers) for name in ("disk read", "disk write", "disk"))
    kind, alone = around.backend.device.type, num_devices == 1
    name = kind if alone else f"{kind} {index}"
    homes: tuple[Home, ...] = (Home(disk, (read, disk), (write, disk)),)
    if not around.backend.is_process:
        load, evict = _copy_names(index)
        homes = (Home(disk, (read, disk, load), (evict, write, disk)),)
        if around.host_bytes:
            homes = (Home(_at("host", server, num_servers), (load,), (evict,)), *homes)
    if alone:
        return Device(name, budget, homes)
    out, into = ((f"from server {server}",), (f"to server {server}",)) if num_servers > 1 else ((), ())
    return Device(name, budget, homes, (f"send {index}",), (f"receive {index}",), out, into, server)


def _links_of_device(index: int, num_devices: int, copies: CopySpeed | None) -> list[Link]:
    """To the memory of its server, if it is not that itself; and to its peers."""
    links: list[Link] = []
    if copies is not None:
        into, out = _copy_names(index)
        links += [Link(into, copies.load_bytes_per_s, _COPY_NS), Link(out, copies.evict_bytes_per_s, _COPY_NS)]
    if num_devices > 1:
        speed, latency = LOOPBACK_BYTES_PER_S, _LOOPBACK_NS
        if copies is not None:  # between accelerators through the same bus
            speed, latency = min(copies.load_bytes_per_s, copies.evict_bytes_per_s), _COPY_NS
        links += [Link(f"{way} {index}", speed, latency) for way in ("send", "receive")]
    return links


def _copy_names(index: int) -> tuple[str, str]:
    return f"host to device {index}", f"device {index} to host"


def _links_of_server(folder: Path, server: int, num_servers: int, network_bytes_per_s: int) -> list[Link]:
    """A server's disk, whose two directions share the bandwidth, and its wires to other servers if there are any."""
    speed = _disk_speed(folder.stat().st_dev, folder)
    both = max(speed.read_bytes_per_s, speed.write_bytes_per_s, speed.both_bytes_per_s)
    links = [
        Link(_at("disk read", server, num_servers), speed.read_bytes_per_s, _DISK_NS),
        Link(_at("disk write", server, num_servers), speed.write_bytes_per_s, _DISK_NS),
        Link(_at("disk", server, num_servers), both),
    ]
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
