"""One thread: the same kernels on every machine, and no quarrel between tests that run at once. Panels are small."""

import os
from collections.abc import Iterator

import pytest
import torch

from counterpoint.runtime import products

# Some virtual machines announce AMX and kill whoever uses it; oneDNN reads this before its first product in bf16.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")


@pytest.fixture(autouse=True)
def _single_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _small_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "PANEL_BYTES", 1)  # the fewest rows: these models are small
