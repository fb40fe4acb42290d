"""The schedules and the commands in these pages -> their pictures, grids and output: `python docs/draw.py`.

Everything here is simulated, so that it comes out the same every time. `tests/test_docs.py` tells when a page is stale.
"""

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from counterpoint.cli import main
from counterpoint.core.outline import chain_outline
from counterpoint.core.plan import Plan, equal_packs
from counterpoint.core.profile import Curve, LayerCost, Profile, ValueCost
from counterpoint.core.text import grid
from counterpoint.planner.forecast import run
from counterpoint.planner.machines import machine, with_budget
from counterpoint.schedules import write_program
from counterpoint.viewer import draw

DOCS = Path(__file__).resolve().parent
MIB = 2**20
MS = 10**6
WIDTH = 1100
_FENCE = re.compile(r"(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)```", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Case:
    """One picture: a plan on devices with so much memory; `versions` shows them in the grid."""

    title: str
    plan: Plan
    memory_bytes: int
    steps: int = 2
    versions: bool = False


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page; `mark` is the comment above it."""

    mark: str
    language: str
    text: str


def _cases() -> dict[str, Case]:
    three, four, six = equal_packs(3, 1), equal_packs(4, 1), equal_packs(6, 1)
    enough = 512 * MIB

    def staged(name: str, num_microbatches: int = 4, policy: str = "recompute") -> Plan:
        return Plan(name, num_microbatches, 1, four, four, (policy,) * 4, num_devices=4, stages=four)

    on_demand = Plan("plain", 3, 1, three, three, ("recompute",) * 3, residency="lru")
    grouped = Plan("harmony", 3, 1, three, three[:-1], ("recompute",) * 3)
    wrapped = Plan("harmony_pp", 3, 1, six, six[:-1], ("recompute",) * 6, num_devices=3)
    return {
        "plain": Case("a plain loop, least recently used out first", on_demand, 288 * MIB),
        "harmony": Case("harmony: all microbatches pack by pack, planned residency", grouped, 288 * MIB),
        "harmony_pp": Case("harmony_pp: packs go round the devices", wrapped, 448 * MIB),
        "model_parallel": Case("model_parallel: one device at a time", staged("model_parallel", 2, "keep"), enough),
        "gpipe": Case("gpipe: all forwards, all backwards, flush", staged("gpipe"), enough),
        "flush": Case("flush: one forward, one backward, flush", staged("flush"), enough),
        "2bw": Case("2bw: no flush, two weight versions", staged("2bw"), enough, steps=3, versions=True),
    }


CASES = _cases()


def small_chain(num_layers: int) -> Profile:
    """Equal layers of 64 MiB of weights; a forward takes 10 ms, a backward 20 ms, and an update 2 ms."""
    layer = LayerCost(
        "layer", Curve.proportional(10 * MS), Curve.proportional(20 * MS), 2 * MS, 20 * MS,
        weight_bytes=64 * MIB, grad_bytes=64 * MIB, state_bytes=128 * MIB, saved_bytes=Curve.proportional(8 * MIB),
    )  # fmt: skip
    values = tuple(ValueCost(i, (i + 1,), Curve.proportional(2 * MIB)) for i in range(num_layers - 1))
    return Profile("small chain", (layer,) * num_layers, values)


def picture(case: Case) -> str:
    server = with_budget(machine("1080ti", case.plan.num_devices), case.memory_bytes)
    program, timeline = run(small_chain(case.plan.num_layers), server, case.plan, case.steps)
    return draw(timeline, case.title, program.budgets, width=WIDTH)


def text_grid(case: Case) -> str:
    program = write_program(case.plan, chain_outline(case.plan.num_layers))
    return grid(program, 3 if program.epilogue_steps else 1, versions=case.versions)


def blocks(page: str) -> Iterator[Block]:
    for found in _FENCE.finditer(page):
        yield Block(found["mark"] or "", found["language"], found["text"])


def renewed(page: str) -> str:
    """The page with its grids and the output of its commands as they are today."""
    examples = {block.mark: block.text for block in blocks(page) if block.language == "json" and block.mark}

    def renew(found: re.Match[str]) -> str:
        mark, language, text = found["mark"] or "", found["language"], found["text"]
        if mark.startswith("grid "):
            text = text_grid(CASES[mark.removeprefix("grid ")]) + "\n"
        elif language == "console":
            text = "".join(f"{line}\n{_output(line, examples)}" for line in text.splitlines() if line.startswith("$ "))
        above = f"<!-- {mark} -->\n" if mark else ""
        return f"{above}```{language}\n{text}```"

    return _FENCE.sub(renew, page)


def _output(command: str, examples: dict[str, str]) -> str:
    """What a command prints in a folder that has the page's example files."""
    words = shlex.split(command.removeprefix("$ "))
    if words[:2] != ["counterpoint", "simulate"]:
        raise ValueError(f"{command!r} is not simulated: its output is not the same every time")
    printed, here = io.StringIO(), Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for name, text in examples.items():
                Path(name).write_text(text)
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                main(words[1:])
        finally:
            os.chdir(here)
    return printed.getvalue()


def write_all() -> None:
    for name, case in CASES.items():
        (DOCS / "pictures" / f"{name}.svg").write_text(picture(case))
    for path in sorted(DOCS.glob("*.md")):
        path.write_text(renewed(path.read_text()))


if __name__ == "__main__":
    sys.exit(write_all())
