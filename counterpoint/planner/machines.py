"""Names such as "1080ti" and a number of devices into a Machine: servers people own, from their data sheets."""

from dataclasses import dataclass, replace

from counterpoint.core.machine import GIB, Device, Home, Link, Machine, Tier
from counterpoint.planner.counting import Precision
from counterpoint.planner.names import nearest

GB = 10**9
TFLOPS = 10**12


@dataclass(frozen=True, slots=True)
class Server:
    """One kind of server. Speeds are per direction.

    `devices_per_uplink` devices share one link to the host. Without `peer_bytes_per_s` devices reach one another
    through the host's links. More devices than `devices_per_server` are spread over several servers, joined by a
    network.
    """

    about: str
    capacity_bytes: int
    flops_per_s: int
    half_flops_per_s: int
    memory_bytes_per_s: int
    uplink_bytes_per_s: int
    devices_per_uplink: int = 1
    peer_bytes_per_s: int = 0
    devices_per_server: int = 8
    network_bytes_per_s: int = 0
    host_bytes: int = 512 * GIB
    host_memory_bytes_per_s: int = 40 * GB
    disk_bytes: int = 4000 * GB
    disk_read_bytes_per_s: int = 6 * GB
    disk_write_bytes_per_s: int = 3 * GB
    usual_precision: Precision = "bf16"


_1080TI = Server(
    "Harmony's server: GTX 1080 Ti, one host link for all",
    10 * GIB, 11_340 * 10**9, 11_340 * 10**9, 484 * GB,
    uplink_bytes_per_s=12_348_030_976, devices_per_uplink=8, peer_bytes_per_s=8_804_682_956,
    host_bytes=750 * GB, host_memory_bytes_per_s=15 * GB,
    disk_read_bytes_per_s=3 * GB, disk_write_bytes_per_s=2 * GB, usual_precision="fp32",
)  # fmt: skip
_V100 = Server(
    "V100 16 GB, 8 per server with NVLink, servers joined by 25 Gbit/s",
    15 * GIB, 15_700 * 10**9, 125 * TFLOPS, 900 * GB,
    uplink_bytes_per_s=12 * GB, devices_per_uplink=2, peer_bytes_per_s=130 * GB, network_bytes_per_s=25 * GB // 8,
)  # fmt: skip
_A100 = Server(
    "A100 80 GB, 8 per server with NVLink, servers joined by 200 Gbit/s",
    76 * GIB, 156 * TFLOPS, 312 * TFLOPS, 2_000 * GB,
    uplink_bytes_per_s=24 * GB, peer_bytes_per_s=270 * GB, network_bytes_per_s=25 * GB,
    host_bytes=1024 * GIB, host_memory_bytes_per_s=100 * GB,
)  # fmt: skip
_H100 = Server(
    "H100 80 GB, 8 per server with NVLink, servers joined by 400 Gbit/s",
    76 * GIB, 494 * TFLOPS, 989 * TFLOPS, 3_350 * GB,
    uplink_bytes_per_s=50 * GB, peer_bytes_per_s=400 * GB, network_bytes_per_s=50 * GB,
    host_bytes=2048 * GIB, host_memory_bytes_per_s=150 * GB,
)  # fmt: skip

SERVERS: dict[str, Server] = {
    "1080ti": _1080TI,
    "v100": _V100,
    "v100-10gbit": replace(_V100, about=_V100.about.replace("25", "10"), network_bytes_per_s=10 * GB // 8),
    "v100-100gbit": replace(_V100, about=_V100.about.replace("25", "100"), network_bytes_per_s=100 * GB // 8),
    "3090": Server(
        "RTX 3090 24 GB on PCIe 4, peers over PCIe",
        22 * GIB, 35_600 * 10**9, 71 * TFLOPS, 936 * GB,
        uplink_bytes_per_s=24 * GB, peer_bytes_per_s=20 * GB, host_bytes=128 * GIB,
    ),
    "4090": Server(
        "RTX 4090 24 GB on PCIe 4, peers only through the host",
        22 * GIB, 82 * TFLOPS, 165 * TFLOPS, 1_008 * GB, uplink_bytes_per_s=24 * GB, host_bytes=128 * GIB,
    ),
    "a100": _A100,
    "a100-pcie": replace(_A100, about="A100 80 GB on PCIe 4, no NVLink", peer_bytes_per_s=22 * GB),
    "h100": _H100,
    "h100-pcie": replace(
        _H100, about="H100 80 GB on PCIe 5, no NVLink", peer_bytes_per_s=45 * GB, memory_bytes_per_s=2_000 * GB,
        flops_per_s=378 * TFLOPS, half_flops_per_s=756 * TFLOPS,
    ),
}  # fmt: skip

LAPTOP = "laptop"
MACHINES: dict[str, str] = {name: server.about for name, server in SERVERS.items()} | {
    LAPTOP: "no accelerator: 8 GiB of RAM is the device, an SSD is home"
}


def machine(
    name: str,
    num_devices: int = 4,
    precision: Precision | None = None,
    servers: int | None = None,
    network_bytes_per_s: int | None = None,
) -> Machine:
    """A built-in machine; `precision` chooses which of its speeds counts.

    Its devices are spread evenly over so many `servers` (default: as few as hold them), joined by a network.
    """
    if num_devices < 1:
        raise ValueError(f"a machine needs at least 1 device, not {num_devices}")
    if servers is not None and (servers < 1 or num_devices % servers):
        raise ValueError(f"{num_devices} devices do not divide over {servers} servers")
    if name == LAPTOP and (servers or 1) > 1:
        raise ValueError("a laptop is one server; take another machine, or describe yours in a JSON file")
    if name == LAPTOP:
        return _laptop(num_devices)
    if name not in SERVERS:
        raise ValueError(f"unknown machine {name!r}{nearest(name, MACHINES)}; known are {', '.join(MACHINES)}")
    kind = SERVERS[name]
    if servers is not None:
        kind = replace(kind, devices_per_server=num_devices // servers)
    if network_bytes_per_s is not None:
        kind = replace(kind, network_bytes_per_s=network_bytes_per_s)
    return _servers(name, kind, num_devices, precision or kind.usual_precision)


def usual_precision(name: str) -> Precision:
    """What people train in on such a machine."""
    return SERVERS[name].usual_precision if name in SERVERS else "fp32"


def with_budget(machine: Machine, budget_bytes: int) -> Machine:
    """The same machine with less, or more, memory on each device."""
    return replace(machine, devices=tuple(replace(d, capacity_bytes=budget_bytes) for d in machine.devices))


def _servers(name: str, kind: Server, num_devices: int, precision: Precision) -> Machine:
    num_servers = -(-num_devices // kind.devices_per_server)
    if num_servers > 1 and not kind.network_bytes_per_s:
        raise ValueError(
            f"machine {name!r} is one server of up to {kind.devices_per_server} devices, not {num_devices}; say how "
            "fast the network between servers is, in bytes per second"
        )
    wires = [_wires(kind, index, num_servers) for index in range(num_devices)]
    links = {link.name: link for wire in wires for link in wire.all()}
    tiers = [
        Tier(_at(tier, server, num_servers), capacity)
        for server in range(num_servers)
        for tier, capacity in (("host", kind.host_bytes), ("disk", kind.disk_bytes))
    ]
    devices = tuple(_device(name, kind, index, precision, wire, num_servers) for index, wire in enumerate(wires))
    spread = f" on {num_servers} servers" if num_servers > 1 else ""
    return Machine(
        f"{num_devices} x {name}{spread}",
        devices,
        tuple(links.values()),
        tuple(tiers),
        host_memory_bytes_per_s=kind.host_memory_bytes_per_s,
    )


@dataclass(frozen=True, slots=True)
class _Wires:
    """The links one device uses, some of them shared with others."""

    down: Link
    up: Link
    read: Link
    write: Link
    send: Link
    receive: Link
    send_far: Link | None
    receive_far: Link | None

    def all(self) -> tuple[Link, ...]:
        near = (self.down, self.up, self.read, self.write, self.send, self.receive)
        return near + tuple(link for link in (self.send_far, self.receive_far) if link)


def _wires(kind: Server, index: int, num_servers: int) -> _Wires:
    server, position = divmod(index, kind.devices_per_server)
    if kind.devices_per_uplink >= kind.devices_per_server:
        users = _at("devices", server, num_servers)
    elif kind.devices_per_uplink == 1:
        users = f"device {index}"
    else:
        first = index - position % kind.devices_per_uplink
        users = f"devices {first}-{first + kind.devices_per_uplink - 1}"
    down = Link(f"host to {users}", kind.uplink_bytes_per_s, 10_000)
    up = Link(f"{users} to host", kind.uplink_bytes_per_s, 10_000)
    peer, network = kind.peer_bytes_per_s, kind.network_bytes_per_s
    return _Wires(
        down,
        up,
        Link(_at("disk read", server, num_servers), kind.disk_read_bytes_per_s, 100_000),
        Link(_at("disk write", server, num_servers), kind.disk_write_bytes_per_s, 100_000),
        Link(f"from device {index}", peer, 10_000) if peer else up,
        Link(f"to device {index}", peer, 10_000) if peer else down,
        Link(f"from server {server}", network, 30_000) if num_servers > 1 else None,
        Link(f"to server {server}", network, 30_000) if num_servers > 1 else None,
    )


def _at(text: str, server: int, num_servers: int) -> str:
    return text if num_servers == 1 else f"{text} of server {server}"


def _device(name: str, kind: Server, index: int, precision: Precision, wires: _Wires, num_servers: int) -> Device:
    server, down, up = index // kind.devices_per_server, wires.down.name, wires.up.name
    host = Home(_at("host", server, num_servers), (down,), (up,))
    disk = Home(_at("disk", server, num_servers), (wires.read.name, down), (up, wires.write.name))
    return Device(
        f"{name} {index}",
        kind.capacity_bytes,
        (host, disk),
        (wires.send.name,),
        (wires.receive.name,),
        (wires.send_far.name,) if wires.send_far else (),
        (wires.receive_far.name,) if wires.receive_far else (),
        server,
        flops_per_s=kind.flops_per_s if precision == "fp32" else kind.half_flops_per_s,
        memory_bytes_per_s=kind.memory_bytes_per_s,
    )


def _laptop(num_devices: int) -> Machine:
    """Processes share cores, RAM and disk; what they send one another crosses RAM."""
    home = Home("disk", ("disk read",), ("disk write",))
    device = Device(
        "cpu", 8 * GIB // num_devices, (home,), ("ram",), ("ram",),
        flops_per_s=400 * GB // num_devices, memory_bytes_per_s=30 * GB // num_devices,
    )  # fmt: skip
    links = (
        Link("disk read", 3 * GB, 100_000), Link("disk write", 15 * GB // 10, 100_000), Link("ram", 10 * GB, 10_000),
    )  # fmt: skip
    devices = tuple(replace(device, name=f"cpu {index}") for index in range(num_devices))
    return Machine(
        f"{num_devices} x laptop" if num_devices > 1 else "laptop", devices, links, (Tier("disk", 500 * GB),),
        host_memory_bytes_per_s=30 * GB,
    )  # fmt: skip
