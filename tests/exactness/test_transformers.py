"""Hugging Face models: weights, optimizer state and buffers after five steps are those of the plain loop."""

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from tests import where
from tests.small_transformers import (
    Batch,
    causal,
    images,
    llama,
    mixtral,
    padded,
    qwen2,
    resnet,
    untied_bert,
    untied_gpt2,
    vit,
)

from .bench import ALL_FITS, Problem, Setting, differences, train, train_plainly

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "gpt2": (untied_gpt2, causal),
    "llama": (llama, padded),
    "qwen2": (qwen2, causal),
    "mixtral": (mixtral, causal),
    "bert": (untied_bert, padded),
    "vit": (vit, images),
    "resnet": (resnet, images),
}
if where.is_played():
    del MODELS["mixtral"]  # it counts whole numbers with a kernel that accelerators have and the CPU has not

# Pairs of what matters rather than all combinations; every model meets three of them.
SETTINGS = [
    Setting("recompute", pack=1, budget=1.0, microbatch=2),
    Setting("evict", pack=2, budget=1.0, microbatch=3),
    Setting("keep", pack=3, budget=1.3, microbatch=2),
    Setting("evict", pack=1, budget=1.5, microbatch=2, schedule="plain"),
    Setting("evict", pack=1, budget=1.5, microbatch=2, stows=True),
    Setting("recompute", pack=3, budget=1.2, microbatch=3, schedule="plain"),
    Setting("keep", pack=1, budget=ALL_FITS, microbatch=6),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_same_as_plain(name: str, setting: Setting, tmp_path: Path) -> None:
    problem = Problem(*MODELS[name])
    expected = train_plainly(problem, setting.microbatch)
    assert differences(train(problem, setting, tmp_path).outcome, expected) == []
