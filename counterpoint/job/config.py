"""What one training run is asked to do: a frozen value, every field with its default, its help and its limits."""

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from typing import Any

from counterpoint.core.plan import POLICIES
from counterpoint.core.units import parse_bytes

STDLIB = "stdlib"
RUN_SCHEDULES = ("harmony", "plain", "harmony_pp", "model_parallel", "gpipe", "flush", "2bw")
LAST = "last"


def _option(default: Any, about: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"about": about, "choices": choices})


@dataclass(frozen=True, slots=True)
class Config:
    """The file's keys and the command line's flags are these names; None means "chosen for you"."""

    model: str = _option("gpt2", "a built-in name, a local Hugging Face folder, or module:function")
    vocabulary: int | None = _option(None, "tokens a built-in model knows (default: as published)")
    data: str = _option(STDLIB, "text, jsonl, .npy or .bin token file, a folder of them, or stdlib: Python's sources")
    validation_data: str | None = _option(None, "held-out data (default: a share of the data)")
    validation_share: float = _option(0.01, "share of the data that is held out at its end")
    tokenizer: str | None = _option(None, "tokenizer folder or file (default: the model folder's, else bytes)")
    token_dtype: str = _option("auto", "of .bin token files", ("auto", "uint16", "uint32"))
    device: str | None = _option(None, "where to train: cpu, cuda, ... (default: an accelerator if there is one)")
    memory: str | None = _option(None, "budget, as 4GiB: of the process, or of each accelerator (default: most of it)")
    host_memory: str | None = _option(None, "memory of the machine beside accelerators (default: most)")
    disk: str | None = _option(None, "scratch folder for what does not fit (default: in the run folder)")
    steps: int = _option(100, "steps to train, in all")
    minibatch: int = _option(8, "samples per step")
    microbatch: int | None = _option(None, "samples per microbatch (default: what is fastest within the budget)")
    sequence_length: int = _option(256, "tokens per sample")
    precision: str = _option("fp32", "bf16: autocast over fp32 weights", ("fp32", "bf16"))
    optimizer: str = _option("adamw", "", ("adamw", "sgd", "adafactor"))
    learning_rate: float = _option(3e-4, "at its highest")
    decay: str = _option("cosine", "of the learning rate over the run", ("constant", "cosine", "linear"))
    warmup: int = _option(0, "steps over which the learning rate rises to its highest")
    final_share: float = _option(0.1, "share of the learning rate that is left at the end of its decay")
    weight_decay: float = _option(0.1, "of matrices")
    betas: tuple[float, float] = _option((0.9, 0.95), "of adamw")
    momentum: float = _option(0.9, "of sgd")
    max_grad_norm: float | None = _option(1.0, "clip gradients to this global norm; none: do not")
    devices: int = _option(1, "processes on this machine, each a device with a budget of its own")
    replicas: int | None = _option(None, "copies of the model among the devices (default: the schedule's usual)")
    network: str | None = _option(None, "bytes per second between servers, for the forecast (default: 1.25 GB)")
    restarts: int = _option(0, "times that a failed run on several devices is started again from its last checkpoint")
    schedule: str = _option("harmony", "order of the computation", RUN_SCHEDULES)
    flush_steps: int = _option(0, "first steps of 2bw that are run by flush, without its delay")
    error_feedback: float = _option(0.0, "strength of error feedback, against the delay of 2bw; 0: none")
    activations: str | None = _option(None, "for backward (default: what is fastest within the budget)", POLICIES)
    evaluate_every: int = _option(0, "steps between evaluations on held-out data; 0: none")
    evaluate_minibatches: int = _option(4, "minibatches per evaluation")
    save_every: int = _option(0, "steps between checkpoints; 0: only at the end")
    keep: int = _option(2, "newest checkpoints to keep")
    resume: str | None = _option(None, "a run folder, one of its checkpoints, or last: the newest of this run folder")
    run: str | None = _option(None, "run folder (default: a new one under runs/)")
    seed: int = _option(0, "of the weights, the order of the data and dropout")
    log_every: int = _option(1, "steps between log lines")
    tensorboard: bool = _option(False, "write TensorBoard events into the run folder")
    trace: bool = _option(True, "write the last steps as trace.json and timeline.html")

    def __post_init__(self) -> None:
        problems = list(_problems(self))
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else parse_bytes(self.memory)

    @property
    def tokens_per_step(self) -> int:
        return self.minibatch * self.sequence_length


OPTIONS: dict[str, Field[Any]] = {option.name: option for option in fields(Config)}

_AT_LEAST = {
    "vocabulary": 2, "steps": 1, "minibatch": 1, "microbatch": 1, "sequence_length": 2, "warmup": 0,
    "evaluate_every": 0, "evaluate_minibatches": 1, "save_every": 0, "keep": 1, "seed": 0, "log_every": 1,
    "weight_decay": 0, "validation_share": 0, "final_share": 0, "momentum": 0, "devices": 1, "replicas": 1,
    "restarts": 0, "flush_steps": 0, "error_feedback": 0,
}  # fmt: skip
_BELOW = {"validation_share": 1.0, "momentum": 1.0}


def _problems(config: Config) -> Iterator[str]:
    for name, option in OPTIONS.items():
        value, choices = getattr(config, name), option.metadata["choices"]
        if choices and value is not None and value not in choices:
            yield f"{name} must be one of {', '.join(choices)}, not {value!r}"
        if name in _AT_LEAST and value is not None and value < _AT_LEAST[name]:
            yield f"{name} must be at least {_AT_LEAST[name]}, not {value}"
        if name in _BELOW and value >= _BELOW[name]:
            yield f"{name} must be below {_BELOW[name]:g}, not {value}"
    yield from _relations(config)


def _relations(config: Config) -> Iterator[str]:
    for name in ("learning_rate", "max_grad_norm"):
        value = getattr(config, name)
        if value is not None and not value > 0:
            yield f"{name} must be above 0, not {value}"
    if not all(0 <= beta < 1 for beta in config.betas):
        yield f"betas must be from 0 to below 1, not {list(config.betas)}"
    if config.final_share > 1:
        yield f"final_share must be at most 1, not {config.final_share}"
    if config.microbatch and config.minibatch % config.microbatch:
        yield f"microbatches of {config.microbatch} do not divide a minibatch of {config.minibatch}"
    if config.flush_steps and config.schedule != "2bw":
        yield f"flush_steps are the first steps of 2bw, and the schedule is {config.schedule}"
    if config.memory is not None and not parse_bytes(config.memory):
        yield "memory must be more than nothing"
    if config.host_memory is not None:
        parse_bytes(config.host_memory)
    if config.network is not None and not parse_bytes(config.network):
        yield "network must be more than 0 bytes per second"
    if config.resume == LAST and config.run is None:
        yield "resume: last needs the run folder too; give run, or resume: FOLDER"
