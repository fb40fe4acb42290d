"""What the probe found -> what a person should know before a run: speeds, what is missing, which models are at ease."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from counterpoint.core.units import format_bytes, format_count
from counterpoint.job.models import shape_of
from counterpoint.job.packages import Package
from counterpoint.planner.shapes import Transformer
from counterpoint.runtime.probe import Findings
from counterpoint.runtime.tidy_heap import SETTING, VARIABLE

_MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "gpt-3.8b", "llama-8b", "gpt2-20b")
_STATE_BYTES = 16  # per parameter: weight, gradient and two moments in fp32
_HOME_BYTES = 12  # the same without the gradient, which lives only within a step
_COPIES = 3  # the state at home, the last checkpoint, and the next one while it is written
_TOKENS = 8 * 256
_BASE_BYTES = 512 << 20
_EASY_STEP_S, _SLOW_STEP_S = 60, 600


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to expect of one model: a step of 8 x 256 tokens in fp32 with Adam, in three quarters of the memory."""

    model: str
    num_parameters: int
    state_bytes: int
    step_s: float
    word: str


def examine(findings: Findings, packages: tuple[Package, ...], folder: Path) -> str:
    sections = (
        ("machine", tuple(_machine(findings))),
        (f"disk at {folder}", tuple(_disk(findings))),
        ("packages", tuple(_packages(packages))),
        (f"training in {format_bytes(budget_bytes(findings))}, fp32, Adam, steps of 8 x 256 tokens", _sizes(findings)),
    )
    return "\n\n".join("\n".join((heading, *(f"  {row}" for row in rows))) for heading, rows in sections)


def budget_bytes(findings: Findings) -> int:
    return findings.memory_limit_bytes * 3 // 4


def verdicts(findings: Findings) -> tuple[Verdict, ...]:
    return tuple(_verdict(findings, name, shape_of(name)) for name in _MODELS)


def _verdict(findings: Findings, name: str, shape: Transformer) -> Verdict:
    count = shape.num_parameters
    state = count * _STATE_BYTES
    room = budget_bytes(findings) - _BASE_BYTES
    away = max(0.0, 1 - room / state)
    compute_s = 6 * count * _TOKENS / max(findings.float32_flops_per_s, 1)
    speed = findings.disk
    disk_s = away * count * _HOME_BYTES * (1 / speed.read_bytes_per_s + 1 / speed.write_bytes_per_s)
    slowed_s = compute_s + min(compute_s, disk_s) * findings.contention_percent / 100
    step_s = max(slowed_s, disk_s)
    return Verdict(name, count, state, step_s, _word(findings, count, away > 0, step_s))


def _word(findings: Findings, count: int, away: bool, step_s: float) -> str:
    needed = count * _HOME_BYTES * _COPIES
    if needed > findings.free_bytes:
        return f"needs {format_bytes(needed)} of disk for its state and two checkpoints"
    place = "from disk" if away else "in memory"
    ease = "comfortable" if step_s <= _EASY_STEP_S else "slow" if step_s <= _SLOW_STEP_S else "too slow to be of use"
    return f"{ease}, {place}"


def _machine(findings: Findings) -> Iterator[str]:
    limit = findings.memory_limit_bytes
    limited = f", of which a limit leaves {format_bytes(limit)}" if limit < findings.physical_memory_bytes else ""
    yield f"cores         {findings.num_cores}"
    yield f"memory        {format_bytes(findings.physical_memory_bytes)}{limited}"
    yield f"copies        {findings.copy_bytes_per_s / 1e9:.1f} GB/s within memory"
    for name, flops in (("fp32", findings.float32_flops_per_s), ("bf16", findings.bfloat16_flops_per_s)):
        yield f"{name} products {_flops(flops)}"
    accelerators = [f"{found.name} ({format_bytes(found.memory_bytes)})" for found in findings.accelerators]
    yield f"accelerators  {', '.join(accelerators) or 'none'}"
    yield f"torch         {findings.torch_version}"
    if findings.is_glibc:
        yield f"heap          scripts with a budget: {VARIABLE}={SETTING}=0, as `counterpoint train` has it by itself"


def _flops(flops_per_s: int) -> str:
    if not flops_per_s:
        return "do not run here; ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 in the environment may help"
    return f"{flops_per_s / 1e9:,.0f} GFLOP/s"


def _disk(findings: Findings) -> Iterator[str]:
    speed = findings.disk
    direct = "with O_DIRECT" if findings.direct else "without O_DIRECT: through the page cache"
    yield f"file system   {findings.file_system}, {direct}"
    yield f"free          {format_bytes(findings.free_bytes)}"
    yield f"reads         {speed.read_bytes_per_s / 1e9:.2f} GB/s"
    yield f"writes        {speed.write_bytes_per_s / 1e9:.2f} GB/s"
    yield f"both at once  {speed.both_bytes_per_s / 1e9:.2f} GB/s"
    yield f"contention    products take {findings.contention_percent} % longer while the disk is busy"
    if findings.file_system in ("tmpfs", "ramfs"):
        yield "warning       this folder lies in memory: give one on a disk, or nothing is saved by moving state there"


def _packages(packages: tuple[Package, ...]) -> Iterator[str]:
    for package in packages:
        yield f"{package.name:<13} {package.version or 'missing':<14} {package.purpose}"


def _sizes(findings: Findings) -> tuple[str, ...]:
    return tuple(
        f"{v.model:<13} {format_count(v.num_parameters):>6} parameters  {format_bytes(v.state_bytes):>9} of state  "
        f"{_TOKENS / v.step_s:>7,.0f} tokens/s  {v.word}"
        for v in verdicts(findings)
    )
