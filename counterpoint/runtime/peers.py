"""The environment that torchrun makes -> this process among the others: who is where, who lives, what all agree on.

The process group is made once and left to the end of the process: made anew on the same port, some would still find
the old one.

Everything here goes through the rendezvous store of torch.distributed: small, rare, and it can be given up at any
moment. Tensors go through `runtime/transport.py`.
"""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from counterpoint.core.errors import ExecutionError
from counterpoint.runtime.calls import Calls, disagreement
from counterpoint.runtime.rendezvous import Asked, first_line, join_group, own_store, patience_seconds

BEAT_SECONDS = 0.5
SILENCE_SECONDS = 8.0  # unless the environment says COUNTERPOINT_SILENCE_SECONDS
STEPS_APART = 3
_POLL_SECONDS = (0.001, 0.05)
_PART_SECONDS = 30.0
_HEAR_SECONDS = 1.5


def started_by_launcher() -> bool:
    """Whether this process is one of several: torchrun's environment, or a process group of the user's own."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


class Peers:
    """All processes of a run. Every one of them must make the same calls in the same order."""

    _runs = 0

    def __init__(self) -> None:
        if not dist.is_initialized():
            join_group()
        self.device, self.count = dist.get_rank(), dist.get_world_size()
        self.silence_seconds = patience_seconds("COUNTERPOINT_SILENCE_SECONDS", SILENCE_SECONDS)
        self.failure: str | None = None
        self.disagreement: str | None = None
        self.on_failure: Callable[[str], None] = lambda text: None
        self._said = False
        Peers._runs += 1
        prefix = f"counterpoint {Peers._runs}"
        self._asked = Asked(own_store(prefix), lambda: self.failure, self.silence_seconds)
        self._watch_store = own_store(prefix)
        self._questions, self._calls = 0, Calls()
        self._ended = threading.Event()
        self._beaten = time.monotonic()
        for work in (self._watch, self._oversee):
            threading.Thread(target=work, name="counterpoint pulse", daemon=True).start()
        self.servers = tuple(self.gather("server", os.environ.get("GROUP_RANK", socket.gethostname())))

    @property
    def others(self) -> tuple[int, ...]:
        return tuple(device for device in range(self.count) if device != self.device)

    @property
    def server_devices(self) -> tuple[int, ...]:
        return tuple(d for d in range(self.count) if self.servers[d] == self.servers[self.device])

    @property
    def leads(self) -> bool:
        """Whether this is the first device of its server."""
        return self.device == self.server_devices[0]

    # ---- agreements

    def gather(self, what: str, data: Any) -> list[Any]:
        """What each device says, in their order; waits for all."""
        key = self._next()
        self._asked.set(f"{key} {self.device}", json.dumps([what, data]))
        return [self._answer(f"{key} {device}", device, what) for device in range(self.count)]

    def broadcast(self, what: str, data: Any = None, source: int = 0) -> Any:
        key = self._next()
        if self.device == source:
            self._asked.set(f"{key} {source}", json.dumps([what, data]))
            return data
        return self._answer(f"{key} {source}", source, what)

    def barrier(self, what: str) -> None:
        self.gather(what, None)

    def agreed(self, wish: bool, step: int) -> bool:
        """Whether the step has come that the first device with a wish has named, later than any device can be."""
        if wish and not self._asked.check(["stop"]):
            self._asked.add("stop", step + STEPS_APART)
        return self._asked.check(["stop"]) and int(self._asked.get("stop")) <= step

    def enter(self, call: str) -> None:
        """The caller's next call: the pulse tells the others, and hears whether they make the same one."""
        self._calls = self._calls.then(call)

    def _next(self) -> str:
        self._questions += 1
        return f"question {self._questions}"

    def _answer(self, key: str, device: int, what: str) -> Any:
        pause = _POLL_SECONDS[0]
        while not self._asked.check([key]):
            if self.failure is not None:
                raise ExecutionError(f"{self.failure}; device {self.device} was waiting for device {device}: {what}")
            time.sleep(pause)
            pause = min(pause * 1.3, _POLL_SECONDS[1])
        said, data = json.loads(self._asked.get(key))
        if said != what:
            text = (
                f"device {device} is at {said!r} where device {self.device} is at {what!r}; "
                "every process must make the same calls in the same order"
            )
            raise ExecutionError(self.explained(text))
        return data

    # ---- who lives

    def fail(self, error: BaseException) -> None:
        """Tell the others that this device cannot go on; only the first time counts."""
        if not self._said and self.failure is None:
            self._said = True
            text = f"device {self.device} failed: {type(error).__name__}: {error}"
            with contextlib.suppress(ExecutionError):
                self._asked.set(f"failed {self.device}", text)

    def explained(self, text: str) -> str:
        """Why a peer is gone, if it said so: its own word, or else `text`."""
        end = time.monotonic() + 2 * BEAT_SECONDS
        while self.failure is None and time.monotonic() < end:
            time.sleep(0.02)
        return self.failure or text

    def _watch(self) -> None:
        """Beat, and look whether the others do."""
        heard = {device: (b"", time.monotonic()) for device in self.others}
        beats = 0
        while not self._ended.wait(BEAT_SECONDS):
            beats, calls = beats + 1, self._calls
            try:
                self._watch_store.set(f"pulse {self.device}", json.dumps([beats, calls.count, calls.names]))
                text = self._silent(heard) or self._disagreeing(calls, {d: pulse for d, (pulse, _) in heard.items()})
            except RuntimeError as error:
                text = f"device 0 is gone: its rendezvous store does not answer ({first_line(error)})"
            self._beaten = time.monotonic()
            if text is not None:
                self._lose(text)
                return

    def _oversee(self) -> None:
        """The store may hang with the process that holds it, and whoever asks it."""
        while not self._ended.wait(BEAT_SECONDS):
            silence = time.monotonic() - self._beaten
            if silence > self.silence_seconds and self.failure is None:
                self._lose(f"device 0 has not answered for {silence:.0f} s: it hangs or lost its network")
                return

    def _lose(self, text: str) -> None:
        if not self._ended.is_set():
            self.failure = text
            self.on_failure(text)

    def _silent(self, heard: dict[int, tuple[bytes, float]]) -> str | None:
        now = time.monotonic()
        for device, (pulse, since) in heard.items():
            if self._watch_store.check([f"failed {device}"]):
                return str(self._watch_store.get(f"failed {device}").decode())
            if not self._watch_store.check([f"pulse {device}"]):
                found = b""
            else:
                found = self._watch_store.get(f"pulse {device}")
            if found != pulse:
                heard[device] = (found, now)
            elif now - since > self.silence_seconds and not self._watch_store.check([f"parted {device}"]):
                return f"device {device} has not answered for {now - since:.0f} s: it died, hangs or lost its network"
        return None

    def _disagreeing(self, own: Calls, pulses: Mapping[int, bytes]) -> str | None:
        known = {self.device: own}
        for device, pulse in pulses.items():
            if pulse:
                _, count, names = json.loads(pulse)
                known[device] = Calls(count, tuple(names))
        if not self._said:
            self.disagreement = disagreement(known)
        return self.disagreement

    def part(self) -> None:
        """Leave when the others leave too, device 0 last: it may hold the store. After a failure all hear of it."""
        failed = self._said or self.failure is not None
        end = time.monotonic() + (_HEAR_SECONDS if failed else _PART_SECONDS)
        with contextlib.suppress(ExecutionError):
            self._asked.set(f"parted {self.device}", "")
            self._await("parted", end)
            if not failed:  # they may have parted because of this call
                pulses = {d: self._asked.get(f"pulse {d}") for d in self.others if self._asked.check([f"pulse {d}"])}
                self._disagreeing(self._calls, pulses)
            self._ended.set()
            if self.device:
                self._asked.set(f"left {self.device}", "")
            else:
                self._await("left", end)
        self._ended.set()

    def _await(self, word: str, end: float) -> None:
        failed = self.failure is not None
        waited = [f"{word} {device}" for device in self.others]
        while time.monotonic() < end and not self._asked.check(waited) and (failed or self.failure is None):
            time.sleep(0.01)
