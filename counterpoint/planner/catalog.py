"""Names and files into profiles and machines: everything built in, in one place."""

from pathlib import Path

from counterpoint.core import files
from counterpoint.core.machine import Machine
from counterpoint.core.profile import Profile
from counterpoint.core.units import format_count
from counterpoint.planner import machines
from counterpoint.planner.counting import Granularity, Precision, profile_of
from counterpoint.planner.names import nearest
from counterpoint.planner.shapes import SHAPES, Transformer

_DATA = Path(__file__).parent / "data"
_MEASURED = {"bert96-1080ti": "bert96_1080ti.json", "gpt2-xl-1080ti": "gpt2_xl_1080ti.json"}
_SHAPES: dict[str, Transformer] = {shape.name: shape for shape in SHAPES}


def models() -> dict[str, str]:
    """Names of built-in models, and what they are."""
    counted = {
        name: f"{format_count(s.num_parameters)} parameters, {s.num_blocks} blocks x {s.width}, "
        f"sequences of {s.sequence_length}"
        for name, s in _SHAPES.items()
    }
    measured = dict.fromkeys(_MEASURED, "as Harmony's authors measured it, per block, fp32")
    return counted | measured


def shape(name: str) -> Transformer:
    if name not in _SHAPES:
        raise ValueError(f"unknown model {name!r}{nearest(name, models())}; known are {', '.join(models())}")
    return _SHAPES[name]


def profile(
    name: str,
    machine: Machine,
    *,
    precision: Precision = "fp32",
    flash_attention: bool = True,
    granularity: Granularity = "half",
) -> Profile:
    """A built-in model counted for the machine's first device, a measured one, or a profile's JSON file."""
    if _is_file(name):
        return files.load(Profile, name)
    if name in _MEASURED:
        return files.load(Profile, _DATA / _MEASURED[name])
    return profile_of(
        shape(name),
        machine.devices[0],
        precision=precision,
        flash_attention=flash_attention,
        granularity=granularity,
        host_memory_bytes_per_s=machine.host_memory_bytes_per_s,
    )


def machine(
    name: str,
    num_devices: int | None = None,
    precision: Precision | None = None,
    servers: int | None = None,
    network_bytes_per_s: int | None = None,
) -> Machine:
    """A built-in machine of 4 devices (a laptop: 1) or as many as asked for, or a machine's JSON file."""
    if _is_file(name):
        found = files.load(Machine, name)
        if num_devices not in (None, len(found.devices)):
            raise ValueError(f"{name} describes {len(found.devices)} devices, not {num_devices}")
        if servers is not None or network_bytes_per_s is not None:
            raise ValueError(f"{name} says itself which server each device is on, and how they are joined")
        return found
    count = num_devices or (1 if name == machines.LAPTOP else 4)
    return machines.machine(name, count, precision, servers, network_bytes_per_s)


def _is_file(name: str) -> bool:
    return name.endswith(".json")
