"""The device that tests train on: the CPU, or a played accelerator where the environment says COUNTERPOINT_PLAYED=1.

`make test` runs the comparisons with plain loops on both. What is played computes with the CPU's own kernels, so the
bits must be the same; its memory, streams, copies and messages are an accelerator's.
"""

import os

import torch

VARIABLE = "COUNTERPOINT_PLAYED"


def is_played() -> bool:
    return os.environ.get(VARIABLE) == "1"


def device() -> torch.device:
    if not is_played():
        return torch.device("cpu")
    from tests.played import install

    os.environ.setdefault("PLAYED_MEMORY", str(8 << 30))
    install()
    return torch.device("played", 0)
