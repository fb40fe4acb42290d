"""The environment that torchrun makes -> a process group, and its store behind questions that can be given up."""

import datetime
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch._C._distributed_c10d
import torch.distributed as dist

from counterpoint.core.errors import ExecutionError

JOIN_SECONDS = 120.0  # unless the environment says COUNTERPOINT_JOIN_SECONDS
_LOOK_SECONDS = 0.5
_HEAR_SECONDS = 1.5


def patience_seconds(variable: str, usual_seconds: float) -> float:
    """How long to wait, by a variable of the environment if it is there."""
    text = os.environ.get(variable, "")
    try:
        seconds = float(text) if text else usual_seconds
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds < math.inf:
        raise ValueError(f"{variable} must be a number of seconds from 1 on, not {text!r}")
    return seconds


class Asked:
    """The store behind a thread of its own: whoever asks gets an answer, or hears that there will be none."""

    def __init__(self, store: Any, failure: Callable[[], str | None], silence_seconds: float) -> None:
        """`failure` says why there will be no answer, as soon as that is known."""
        self._store, self._failure, self._silence_seconds = store, failure, silence_seconds
        self._questions: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="counterpoint store", daemon=True).start()

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> Any:
        return self._ask(lambda: self._store.get(key))

    def add(self, key: str, number: int) -> None:
        """Of several devices the first counts."""
        self._ask(lambda: self._store.compare_set(key, "", str(number)))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(lambda: self._store.check(keys)))

    def _ask(self, question: Callable[[], Any]) -> Any:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._questions.put((question, answers))
        since = time.monotonic()
        while True:
            try:
                answer = answers.get(timeout=_LOOK_SECONDS)
                break
            except queue.Empty:
                waited = time.monotonic() - since
                if waited > self._silence_seconds or (self._failure() is not None and waited > _HEAR_SECONDS):
                    text = self._failure() or "device 0 does not answer: its rendezvous store hangs"
                    raise ExecutionError(text) from None
        if isinstance(answer, RuntimeError):
            raise ExecutionError(self._failure() or f"the rendezvous store is gone: {first_line(answer)}") from answer
        return answer

    def _serve(self) -> None:
        while True:
            question, answers = self._questions.get()
            try:
                answers.put(question())
            except RuntimeError as error:
                answers.put(error)


def join_group() -> None:
    """Make the process group, apart from that of an earlier attempt: the launcher's store outlives its processes."""
    device, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    seconds = patience_seconds("COUNTERPOINT_JOIN_SECONDS", JOIN_SECONDS)
    limit = datetime.timedelta(seconds=seconds)
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "29500"))
    holds = device == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store: Any = torch._C._distributed_c10d.TCPStore(address, port, count, holds, limit)
        attempt = f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        dist.init_process_group(
            "gloo",
            timeout=limit,
            store=dist.distributed_c10d.PrefixStore(attempt, store),
            rank=device,
            world_size=count,
        )
    except (RuntimeError, ValueError) as error:
        raise ExecutionError(
            f"device {device} did not find the other {count - 1} devices within {seconds:.0f} s: "
            f"{first_line(error)}; start all of them, with the same MASTER_ADDR and MASTER_PORT"
        ) from error


def own_store(prefix: str) -> Any:
    """A connection of one's own to the rendezvous store: another thread may be waiting on the first one."""
    base: Any = dist.distributed_c10d._get_default_store()
    return dist.distributed_c10d.PrefixStore(prefix, base.clone())


def first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__
