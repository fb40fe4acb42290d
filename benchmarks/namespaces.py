"""Two network namespaces with a thin link between them: two servers on one machine. Needs root."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

LINK = "wire"
ADDRESSES = ("10.77.0.1", "10.77.0.2")


@dataclass(frozen=True)
class Servers:
    """Two namespaces; the link between them lets `megabits` per second through if it is `limited`."""

    names: tuple[str, str]
    megabits: int
    limited: bool

    @property
    def rate(self) -> str:
        return f"{self.megabits} Mbit/s" if self.limited else "without a limit"

    def cut(self) -> None:
        _ip("-n", self.names[0], "link", "set", LINK, "down")


@contextmanager
def two_servers(megabits: int) -> Iterator[Servers]:
    """Made, joined, limited; and removed with whatever still runs in them."""
    names = (f"counterpoint-{os.getpid()}-0", f"counterpoint-{os.getpid()}-1")
    with ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_remove, name)
        _ip("-n", names[0], "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", LINK)
            for device in ("lo", LINK):
                _ip("-n", name, "link", "set", device, "up")
        yield Servers(names, megabits, False not in [_limited(name, f"{megabits}mbit") for name in names])


def _limited(name: str, rate: str) -> bool:
    """Whether the system knows one of the two ways to hold a link to a rate."""
    for way in (["tbf", "rate", rate, "burst", "256kb", "latency", "200ms"], ["netem", "rate", rate]):
        command = ["tc", "-n", name, "qdisc", "add", "dev", LINK, "root", *way]
        try:
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return True
        except FileNotFoundError:
            return False
    return False


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"ip {' '.join(arguments)}: {done.stderr.strip()}; this needs root and network namespaces")
    return done.stdout


def _remove(name: str) -> None:
    for process in _ip("netns", "pids", name).split():
        os.kill(int(process), signal.SIGKILL)
    _ip("netns", "delete", name)
