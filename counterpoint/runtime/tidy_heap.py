"""The environment that a process began with -> whether its heap finds freed memory again; and how to begin so.

glibc keeps up to seven small freed blocks of each size and thread for itself, in its tcache. Torch asks for tensors
that are aligned to 64 bytes; what is cut off before and behind them to align them are such small blocks, and those that
are kept stay between freed tensors. These then never become one large free block again, the heap grows to three times
what it holds, and its pages must come from the system anew. Only the environment of a new process can switch that off.
"""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from counterpoint.runtime.memory_process import is_glibc

VARIABLE = "GLIBC_TUNABLES"
SETTING = "glibc.malloc.tcache_count"


def is_tidy(environment: Path = Path("/proc/self/environ")) -> bool:
    """Whether this process began without blocks that are kept apart."""
    try:
        pieces = re.split(rb"[:\0]", environment.read_bytes())  # glibc has put zeros between those of its variable
    except OSError:
        return False
    wanted = f"{SETTING}=0".encode()
    return is_glibc() and (wanted in pieces or f"{VARIABLE}=".encode() + wanted in pieces)


def tidy_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The same for a process that is to be tidy; whoever has set the number keeps it.

    >>> tidy_environment({"GLIBC_TUNABLES": "glibc.malloc.perturb=1"})
    {'GLIBC_TUNABLES': 'glibc.malloc.perturb=1:glibc.malloc.tcache_count=0'}
    >>> tidy_environment({"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"})
    {'GLIBC_TUNABLES': 'glibc.malloc.tcache_count=7'}
    """
    given = environment.get(VARIABLE, "")
    if SETTING in given:
        return dict(environment)
    return {**environment, VARIABLE: ":".join(filter(None, (given, f"{SETTING}=0")))}


def begin_tidy() -> None:
    """Begin this process anew with its own command line, if it could be tidy and is not; does not return then."""
    environment = tidy_environment(os.environ)
    if is_glibc() and environment.get(VARIABLE) != os.environ.get(VARIABLE):
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, sys.orig_argv, environment)
