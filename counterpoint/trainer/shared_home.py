"""A program and a folder -> this device's part of its server's home: names, files and the table of versions."""

import contextlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

from counterpoint.core.duties import Duties
from counterpoint.runtime.home import home_sizes, unused_sizes
from counterpoint.runtime.home_names import HomeNames
from counterpoint.runtime.peers import Peers
from counterpoint.runtime.tiers import Home, Tiers
from counterpoint.runtime.versions import Versions
from counterpoint.trainer.parts import Parts
from counterpoint.trainer.tiered_home import host_folder, open_tiers


@dataclass(frozen=True)
class SharedHome:
    """`disk` is the server's, `passing` this device's own; `fills` are the layers that it puts home at the start."""

    disk: Home
    passing: Home
    names: HomeNames
    versions: Versions
    fills: frozenset[int]


def common_folder(stack: contextlib.ExitStack, peers: Peers, folder: Path | None) -> Path:
    """The folder that was given, or one that the server's first device makes and removes."""
    made = ""
    if folder is None and peers.leads:
        made = stack.enter_context(tempfile.TemporaryDirectory(prefix="counterpoint-"))
    found = peers.gather("folder", made if folder is None else str(folder))
    chosen = Path(found[peers.server_devices[0]])
    chosen.mkdir(parents=True, exist_ok=True)
    return chosen


def open_home(
    stack: contextlib.ExitStack, peers: Peers, folder: Path, parts: Parts, duties: Duties, host_bytes: int = 0
) -> SharedHome:
    """The server's first device makes the files, then the others open them.

    Of its host memory, what is left beside what lasts is shared out among the devices for what passes.
    """
    here, device = peers.server_devices, peers.device
    copies = {layer: [d for d in duties.writers[layer] if d in here] for layer in sorted(duties.copied)}
    holders = {layer: device if device in found else found[0] for layer, found in copies.items() if found}
    sizes = {
        **home_sizes(parts.frame, parts.states, duties.two_versions, copies),
        **unused_sizes(parts.chain),
    }
    keys = [key for key in sizes if key.startswith(("weight", "old"))]
    in_memory = host_folder(stack, host_bytes) if peers.leads else None
    where, host_bytes = peers.gather("the host memory", [str(in_memory or ""), host_bytes])[here[0]]
    tiers = (parts.backend, Path(where) if where else None, host_bytes)
    versions_path = folder / "versions.bin"

    def let_others_in() -> None:
        Versions(versions_path, keys, make=True).close()
        stack.callback(versions_path.unlink, missing_ok=True)
        peers.barrier("the home is made")
        peers.barrier("all are home")

    if peers.leads:
        disk = open_tiers(stack, folder, sizes, *tiers, all_have_it=let_others_in)
    else:
        peers.barrier("the home is made")
        disk = open_tiers(stack, folder, sizes, *tiers, make=False, all_have_it=lambda: peers.barrier("all are home"))
    versions = Versions(versions_path, keys, make=False)
    stack.callback(versions.close)
    own = folder / f"device {device}"
    stack.callback(_remove_empty, own)
    spare = disk.spare_bytes // len(here) if isinstance(disk, Tiers) else 0
    own_memory = host_folder(stack, spare)
    passing = open_tiers(stack, own, {}, parts.backend, own_memory, spare)
    fills = frozenset(i for i in range(parts.frame.num_layers) if duties.fills(i, device, peers.servers))
    return SharedHome(disk, passing, HomeNames(holders, duties.two_versions), versions, fills)


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()
