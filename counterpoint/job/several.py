"""A command line and a number of devices -> as many processes of it, started by torch's own launcher."""

import logging
import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fcntl import LOCK_EX, LOCK_UN, flock
from pathlib import Path

_NO_CODE = 1


def is_first() -> bool:
    """Whether this process speaks for the run: it writes the log and says what happens."""
    return int(os.environ.get("RANK", "0")) == 0


def is_started() -> bool:
    """Whether a launcher has started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def is_restarted() -> bool:
    """Whether the launcher has started this run again after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def start(arguments: Sequence[str], devices: int, restarts: int) -> int:
    """Run `counterpoint` with these arguments in so many processes of this machine; the code of the first failure."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // devices)))
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=devices, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=restarts, monitor_interval=0.2,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-m", "counterpoint.cli", *arguments)
    except ChildFailedError as error:
        return error.get_first_failure()[1].exitcode or _NO_CODE
    return 0


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """While entered, no other process of this run is: what one has put into the folder, the next finds there."""
    if not is_started():
        yield
        return
    with (folder / ".turn").open("w") as file:
        flock(file, LOCK_EX)
        try:
            yield
        finally:
            flock(file, LOCK_UN)
