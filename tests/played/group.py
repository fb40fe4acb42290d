"""A store, a rank and a size -> the process group backend "pccl", which treats played tensors as NCCL treats CUDA's.

The compiled part queues the operations; the bytes travel through a gloo group of its own.
"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from tests.played import native


def register() -> None:
    """Makes "pccl" known to torch.distributed as the backend of played tensors."""
    dist.Backend.register_backend("pccl", _create, devices=["played"])


def _create(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    inner = ProcessGroupGloo(PrefixStore("pccl", store), rank, size, timeout=timeout)
    return native().group(inner, rank, size)
