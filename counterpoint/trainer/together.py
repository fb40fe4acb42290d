"""A process among others, or alone -> its peers, who are told what fails here."""

import contextlib
from collections.abc import Callable, Iterator

from counterpoint.runtime.peers import Peers, started_by_launcher


def join(stack: contextlib.ExitStack, devices: int | None) -> Peers | None:
    """The other processes, if there are any."""
    if not started_by_launcher():
        if devices not in (None, 1):
            raise ValueError(f"{devices} devices are as many processes, this is one: start it with torchrun")
        return None
    peers = Peers()
    stack.callback(peers.part)
    if devices not in (None, peers.count):
        raise ValueError(f"{devices} devices are asked for and {peers.count} processes were started")
    return peers


@contextlib.contextmanager
def telling(fail: Callable[[BaseException], None] | None) -> Iterator[None]:
    """Whatever fails here is told to the others, if there are any."""
    try:
        yield
    except BaseException as error:
        if fail is not None:
            fail(error)
        raise
