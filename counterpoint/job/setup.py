"""Config -> everything a run needs, each part refused with its reason before the first step."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from counterpoint.core.errors import ExecutionError
from counterpoint.job.config import OPTIONS, STDLIB, Config
from counterpoint.job.config_file import read_config
from counterpoint.job.data import Data, open_data
from counterpoint.job.folder import RunFolder
from counterpoint.job.models import Source, build_model, is_built_in
from counterpoint.job.optimizers import build_optimizer
from counterpoint.runtime.backend import backend_of
from counterpoint.runtime.checkpoint import read_facts
from counterpoint.runtime.probe_compute import gemm_works

Say = Callable[[str], None]
DIGEST = "data digest"  # its name among what a checkpoint keeps for us


@dataclass(frozen=True)
class Setup:
    config: Config
    folder: RunFolder
    checkpoint: Path | None
    source: Source
    data: Data
    optimizer: torch.optim.Optimizer


def resolve(config: Config, folder: RunFolder) -> Config:
    """What was left open filled in, and paths that hold wherever the run goes on from."""
    backend = backend_of(config.device)
    return replace(
        config,
        model=config.model if is_built_in(config.model) else _anchored(config.model),
        data=config.data if config.data == STDLIB else _anchored(config.data),
        validation_data=config.validation_data and _anchored(config.validation_data),
        tokenizer=config.tokenizer and _anchored(config.tokenizer),
        device=backend.device.type,
        memory=config.memory or f"{backend.default_memory_bytes() >> 20}MiB",
        run=str(folder.root),
        resume=None,
    )


def _anchored(place: str) -> str:
    return str(Path(place).resolve()) if Path(place).exists() else place


def set_up(config: Config, folder: RunFolder, checkpoint: Path | None, say: Say) -> Setup:
    """`config` is resolved. The folder is there; what is tokenised goes into it."""
    _refuse_broken_products(config)
    source = build_model(config.model, config.vocabulary)
    if source.max_length is not None and config.sequence_length > source.max_length:
        raise ValueError(
            f"{source.name} takes sequences of up to {source.max_length} tokens, not {config.sequence_length}"
        )
    optimizer = build_optimizer(config, source.model)
    data = open_data(config, source.vocabulary, source.weights, folder.data, say)
    try:
        _refuse_other_data(checkpoint, data)
    except BaseException:
        data.close()
        raise
    return Setup(config, folder, checkpoint, source, data, optimizer)


def _refuse_other_data(checkpoint: Path | None, data: Data) -> None:
    if checkpoint is not None and read_facts(checkpoint).extra.get(DIGEST, data.digest) != data.digest:
        raise ExecutionError(
            f"the data is not what {checkpoint} was trained on: put it back, or start a new run from exported weights"
        )


def stated(config: Config) -> str:
    """What differs from the defaults, in one line."""
    pairs = ((name, getattr(config, name)) for name in OPTIONS if name != "run")
    return ", ".join(f"{name} {value}" for name, value in pairs if value != OPTIONS[name].default)


def changes(config: Config, folder: RunFolder) -> str:
    """What differs from the config the folder was last run with; empty if nothing does."""
    if not folder.config.is_file():
        return ""
    before = read_config(folder.config, {})
    pairs = [(name, getattr(before, name), getattr(config, name)) for name in OPTIONS if name != "run"]
    return ", ".join(f"{name} {old} -> {new}" for name, old, new in pairs if old != new)


def _refuse_broken_products(config: Config) -> None:
    """A product that traps would end the process without a word."""
    if config.precision == "bf16" and config.device == "cpu" and not gemm_works(torch.bfloat16):
        raise ExecutionError(
            "products in bf16 kill a process on this machine: set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 "
            "in the environment, or use precision: fp32"
        )
