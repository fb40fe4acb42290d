"""Devices that write one folder together -> which of its tensors each of them writes."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from counterpoint.core.duties import Duties
from counterpoint.decomposer.chain import NO_LAYER, Chain
from counterpoint.runtime.peers import Peers
from counterpoint.runtime.whole_folder import unfinished_folder, whole_folder


@dataclass(frozen=True)
class Share:
    """Each layer's tensors are written by the device that answers for it, everything else by the first device."""

    peers: Peers
    duties: Duties
    chain: Chain
    names: Mapping[str, str] = field(default_factory=dict)  # where tensors of the folder are called otherwise

    def under(self, names: Mapping[str, str]) -> "Share":
        return replace(self, names=names)

    @property
    def first(self) -> bool:
        return self.peers.device == 0

    def has(self, tensor: str) -> bool:
        """A parameter by its name, or its optimizer state, `parameter:key`."""
        tensor = self.names.get(tensor, tensor)
        name = tensor if tensor in self.chain.parameters else tensor.rpartition(":")[0]
        spec = self.chain.parameters.get(name)
        if spec is None or spec.owner == NO_LAYER:
            return self.first
        return self.duties.owner(spec.owner) == self.peers.device


@contextlib.contextmanager
def written_folder(folder: Path, markers: tuple[str, ...], share: Share | None) -> Iterator[Path]:
    """As `whole_folder`; of several devices the first makes and completes it, and the others write into it."""
    if share is None:
        with whole_folder(folder, markers) as unfinished:
            yield unfinished
        return
    if share.first:
        with whole_folder(folder, markers) as unfinished:
            share.peers.barrier(f"{folder} is made")
            yield unfinished
            share.peers.barrier(f"{folder} is written")
    else:
        share.peers.barrier(f"{folder} is made")
        yield unfinished_folder(folder)
        share.peers.barrier(f"{folder} is written")
    share.peers.barrier(f"{folder} is complete")
