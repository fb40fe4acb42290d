"""What a program runs on: devices, the tiers that are home to what does not fit, and the links between them."""

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a wire; transfers that cross it at the same time share it fairly."""

    name: str
    bytes_per_s: int
    latency_ns: int = 0

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.latency_ns < 0:
            raise ValueError(f"link {self.name!r} needs bytes_per_s > 0 and latency_ns >= 0")


@dataclass(frozen=True, slots=True)
class Tier:
    """Memory outside the devices: a server's RAM or disk."""

    name: str
    capacity_bytes: int

    def __post_init__(self) -> None:
        if self.capacity_bytes < 0:
            raise ValueError(f"tier {self.name!r} has a negative capacity: {self.capacity_bytes}")


@dataclass(frozen=True, slots=True)
class Home:
    """A tier as one device reaches it: the links a load and an evict cross, in order."""

    tier: str
    load: tuple[str, ...]
    evict: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or the RAM and cores of a machine that has none.

    `homes` are in order of preference. `send` and `receive` are the links to peers of the same server, the
    `far` ones those to other servers. `speed_percent` is relative to the device that was profiled.
    """

    name: str
    capacity_bytes: int
    homes: tuple[Home, ...] = ()
    send: tuple[str, ...] = ()
    receive: tuple[str, ...] = ()
    send_far: tuple[str, ...] = ()
    receive_far: tuple[str, ...] = ()
    server: int = 0
    speed_percent: int = 100
    flops_per_s: int = 10**13
    memory_bytes_per_s: int = 4 * 10**11

    def __post_init__(self) -> None:
        if self.capacity_bytes <= 0:
            raise ValueError(f"device {self.name!r} needs capacity_bytes > 0, not {self.capacity_bytes}")
        if min(self.speed_percent, self.flops_per_s, self.memory_bytes_per_s) <= 0:
            raise ValueError(f"device {self.name!r} needs positive speeds")


@dataclass(frozen=True, slots=True)
class Machine:
    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    tiers: tuple[Tier, ...] = ()
    host_memory_bytes_per_s: int = 2 * 10**10

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError(f"machine {self.name!r} has no device")
        links = {link.name for link in self.links}
        tiers = {tier.name for tier in self.tiers}
        if len(links) < len(self.links) or len(tiers) < len(self.tiers):
            raise ValueError(f"machine {self.name!r} has two links or two tiers of one name")
        for device in self.devices:
            _refuse_unknown(device, links, tiers)

    def link(self, name: str) -> Link:
        return next(link for link in self.links if link.name == name)

    def path(self, sender: int, receiver: int) -> tuple[str, ...]:
        """The links that a transfer between two devices crosses."""
        a, b = self.devices[sender], self.devices[receiver]
        return a.send + b.receive if a.server == b.server else a.send_far + b.receive_far

    def home(self, device: int, tier: str) -> Home:
        return next(home for home in self.devices[device].homes if home.tier == tier)


def _refuse_unknown(device: Device, links: set[str], tiers: set[str]) -> None:
    paths = [device.send, device.receive, device.send_far, device.receive_far]
    paths += [path for home in device.homes for path in (home.load, home.evict)]
    unknown = sorted({name for path in paths for name in path} - links)
    unknown += sorted({home.tier for home in device.homes} - tiers)
    if unknown:
        raise ValueError(f"device {device.name!r} names unknown links or tiers: {', '.join(unknown)}")
