"""What is said when a peer takes nothing any more; the rest of the transport is tested with peers, in tests/devices."""

from typing import Any

import pytest
import torch

from counterpoint.core.task import Forward
from counterpoint.runtime import transport
from counterpoint.runtime.awaited import Awaited
from counterpoint.runtime.transport import PeerGone, Transport


class Arrived:
    def wait(self) -> None:
        pass


@pytest.mark.parametrize("when", ["sending", "waiting"])
def test_a_peer_that_takes_nothing_is_named(monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Whichever computation hands something out to it."""

    class Refused:
        def wait(self) -> None:
            raise RuntimeError("[gloo/pair.cc:534] Connection closed by peer. More words")

    def send(message: torch.Tensor, peer: int, tag: int) -> Any:
        if peer != 2:
            return Arrived()
        if when == "sending":
            Refused().wait()
        return Refused()

    monkeypatch.setattr(transport, "post_send", send)
    device = Transport(0, 3)

    def spread() -> None:
        for _ in range(100):
            device.spread_losses(torch.zeros(1))

    with pytest.raises(PeerGone) as caught:
        spread()
    assert Awaited(0).gone(Forward(0, 1, 0, 0), caught.value) == "device 2 is gone (Connection closed by peer)"
