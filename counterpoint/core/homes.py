"""Which tier is home to which buffer: as far as the first tier's capacity goes, then the next."""

from dataclasses import dataclass

from counterpoint.core.errors import BudgetError
from counterpoint.core.machine import Device, Machine
from counterpoint.core.profile import Profile
from counterpoint.core.task import PER_MICROBATCH, Buffer
from counterpoint.core.units import format_bytes

UPDATE_STAGING_BYTES = 24 << 20  # memory through which layers are updated at home


@dataclass(frozen=True, slots=True)
class Homes:
    """Tiers by device and layer for what persists, by device for what comes home for a while.

    `evict_bytes_per_s` is how fast each device writes to its first home, if that is known.
    """

    layers: tuple[tuple[str, ...], ...]
    passing: tuple[str, ...]
    evict_bytes_per_s: tuple[int, ...] = ()

    def of(self, device: int, buffer: Buffer) -> str:
        if buffer.kind in PER_MICROBATCH or buffer.kind == "grad":
            return self.passing[device]
        return self.layers[device][buffer.owner]


def single_home(tier: str, num_devices: int, num_layers: int) -> Homes:
    return Homes(((tier,) * num_layers,) * num_devices, (tier,) * num_devices)


def fill_homes(machine: Machine, profile: Profile, num_devices: int) -> Homes:
    """Each layer's weights, state and constants go to the first home of its device that still has room.

    Devices of one server share the home copy of a layer. What passes through goes to the first home.
    """
    room = {tier.name: tier.capacity_bytes for tier in machine.tiers}
    placed: dict[tuple[int, int], str] = {}
    rows: list[tuple[str, ...]] = []
    for device in machine.devices[:num_devices]:
        row: list[str] = []
        for index, layer in enumerate(profile.layers):
            key = (device.server, index)
            if key not in placed:
                size = layer.weight_bytes + layer.state_bytes + layer.constant_bytes
                tiers = [home.tier for home in device.homes if room[home.tier] >= size]
                if not tiers and device.homes:
                    raise BudgetError(
                        f"the home tiers of {device.name} are full at layer {index} of {len(profile.layers)} "
                        f"({format_bytes(size)} more); add a disk tier or a larger one"
                    )
                placed[key] = tiers[0] if tiers else ""
                if tiers:
                    room[tiers[0]] -= size
            row.append(placed[key])
        rows.append(tuple(row))
    passing = tuple(d.homes[0].tier if d.homes else "" for d in machine.devices[:num_devices])
    return Homes(tuple(rows), passing, tuple(_evict_speed(machine, d) for d in machine.devices[:num_devices]))


def _evict_speed(machine: Machine, device: Device) -> int:
    """The slowest link on the way to the first home; 0 if there is none."""
    return min((machine.link(name).bytes_per_s for home in device.homes[:1] for name in home.evict), default=0)
