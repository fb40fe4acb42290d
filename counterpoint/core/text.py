"""A program as lines and as a grid: `parse(dump(program)) == program`; a task is one line of `core/notation.py`.

The lines say the chain, the microbatches, and then what each device does:

    layers 3
    values 0>1 1>2
    microbatches 1
    device 0
    body
      F0-2.m0@0
      B0-2.m0@0/0 recompute
      U0-2@0

`values 0>1,2!` goes from layer 0 to layers 1 and 2 and has no gradient. Optional are `weightless 0`, `constants 3` and
`narrow 1` (layers), `tied 2=0` (layer 2 also uses the weights of layer 0), `epilogue_steps`, `budgets`, and lines with
`#`.
"""

import re
import textwrap
from collections.abc import Set

from counterpoint.core.edges import unrolled
from counterpoint.core.errors import ProgramError
from counterpoint.core.notation import dump_numbers, dump_task, parse_numbers, parse_task
from counterpoint.core.outline import LayerOutline, Outline, Value
from counterpoint.core.program import DeviceProgram, Program
from counterpoint.core.slots import settle
from counterpoint.core.task import Backward, Forward, Task, Update

SECTIONS = ("prologue", "body", "epilogue")
Place = tuple[int, str, int]
"""A task of a program: device, section and index in it."""

_NUMBER = re.compile(r"\d+")
_HEADER = {
    "layers": (_NUMBER, "layers <number>"),
    "weightless": (_NUMBER, "weightless <layer> <layer> ..."),
    "constants": (_NUMBER, "constants <layer> <layer> ..."),
    "narrow": (_NUMBER, "narrow <layer> <layer> ..."),
    "tied": (re.compile(r"\d+=[\d,-]+"), "tied <layer>=<layer>,<layer> ..."),
    "values": (re.compile(r"\d+>[\d,-]*!?"), "values <producer>><consumer>,<consumer> ..."),
    "microbatches": (_NUMBER, "microbatches <number>"),
    "epilogue_steps": (_NUMBER, "epilogue_steps <number>"),
    "budgets": (_NUMBER, "budgets <bytes> <bytes> ..."),
}


def dump(program: Program) -> str:
    lines = _dump_outline(program.outline)
    lines.append(f"microbatches {program.num_microbatches}")
    if program.epilogue_steps:
        lines.append(f"epilogue_steps {program.epilogue_steps}")
    if program.budgets:
        lines.append("budgets " + " ".join(map(str, program.budgets)))
    for index, device in enumerate(program.devices):
        lines.append(f"device {index}")
        for section in SECTIONS:
            tasks: tuple[Task, ...] = getattr(device, section)
            if tasks:
                lines.append(section)
                lines += [f"  {dump_task(task)}" for task in tasks]
    return "\n".join(lines) + "\n"


def _dump_outline(outline: Outline) -> list[str]:
    layers = list(enumerate(outline.layers))
    items = {
        "layers": [str(len(layers))],
        "weightless": [str(index) for index, layer in layers if not layer.has_weights],
        "constants": [str(index) for index, layer in layers if layer.has_constants],
        "narrow": [str(index) for index, layer in layers if layer.narrows],
        "tied": [f"{index}={dump_numbers(layer.tied)}" for index, layer in layers if layer.tied],
        "values": [f"{v.producer}>{dump_numbers(v.consumers)}{'' if v.has_grad else '!'}" for v in outline.values],
    }
    wrapped = {name: textwrap.wrap(" ".join(words), 100, break_on_hyphens=False) for name, words in items.items()}
    return [f"{name} {line}" for name, lines in wrapped.items() for line in lines]


def parse(text: str) -> Program:
    """The program that `dump` wrote; a ProgramError names the line and what was expected."""
    header: dict[str, list[str]] = {}
    devices: list[dict[str, list[Task]]] = []
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            if words[0][0].isupper():
                _place(devices, section).append(parse_task(line.strip()))
            elif words[0] in SECTIONS:
                section = words[0]
            elif words[0] == "device":
                section = _open_device(devices, words[1:])
            else:
                _add_header(header, words)
        except ValueError as error:
            raise ProgramError(f"line {number}: {error}") from error
    return _assemble(header, devices)


def _place(devices: list[dict[str, list[Task]]], section: str) -> list[Task]:
    if not section or not devices:
        raise ValueError(f"a task needs a device and one of {', '.join(SECTIONS)} above it")
    return devices[-1][section]


def _open_device(devices: list[dict[str, list[Task]]], words: list[str]) -> str:
    if words != [str(len(devices))]:
        raise ValueError(f"expected device {len(devices)}, found device {' '.join(words)}")
    devices.append({section: [] for section in SECTIONS})
    return ""


def _add_header(header: dict[str, list[str]], words: list[str]) -> None:
    if words[0] not in _HEADER:
        raise ValueError(f"unknown word {words[0]!r}; expected a task, device, {', '.join((*SECTIONS, *_HEADER))}")
    pattern, expected = _HEADER[words[0]]
    for word in words[1:]:
        if not pattern.fullmatch(word):
            raise ValueError(f"cannot read {word!r}; expected {expected}")
    header.setdefault(words[0], []).extend(words[1:])


def _assemble(header: dict[str, list[str]], devices: list[dict[str, list[Task]]]) -> Program:
    for name in ("layers", "microbatches"):
        if len(header.get(name, ())) != 1:
            raise ProgramError(f"expected one line {_HEADER[name][1]!r}, found {len(header.get(name, ()))} numbers")
    try:
        outline = _read_outline(header)
    except ValueError as error:
        raise ProgramError(f"the chain is inconsistent: {error}") from error
    return Program(
        outline,
        int(header["microbatches"][0]),
        tuple(DeviceProgram(*(tuple(device[section]) for section in SECTIONS)) for device in devices),
        int(header.get("epilogue_steps", ["0"])[0]),
        tuple(map(int, header.get("budgets", ()))),
    )


def _read_outline(header: dict[str, list[str]]) -> Outline:
    tied = {int(word.partition("=")[0]): parse_numbers(word.partition("=")[2]) for word in header.get("tied", ())}
    weightless, constants, narrow = (
        set(map(int, header.get(name, ()))) for name in ("weightless", "constants", "narrow")
    )
    layers = range(int(header["layers"][0]))
    unknown = sorted({*tied, *weightless, *constants, *narrow} - set(layers))
    if unknown:
        raise ValueError(f"there is no layer {dump_numbers(unknown)}; layers are 0 to {len(layers) - 1}")
    values = []
    for word in header.get("values", ()):
        producer, _, consumers = word.removesuffix("!").partition(">")
        values.append(Value(int(producer), parse_numbers(consumers), not word.endswith("!")))
    outlines = (LayerOutline(i not in weightless, i in constants, tied.get(i, ()), i in narrow) for i in layers)
    return Outline(tuple(outlines), tuple(values))


_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_WIDTH = 100


def grid(program: Program, steps: int = 1, mark: Set[Place] = frozenset(), versions: bool = False) -> str:
    """One row per device, one column per unit of time; `0F2` is the forward of microbatch 2 on the pack from layer 0.

    The layer is left out where every device has one pack. A star follows the computation that an update comes after.
    `versions` adds the weight version. Marked computations are bracketed, other marked tasks are an arrow before
    the next computation; with a mark, a wide grid is cut around the first.
    """
    steps = max(steps, program.epilogue_steps)
    rows = _cells(program, steps, mark, versions)
    length = max((column + 1 for row in rows for column in row), default=0)
    width = max((len(cell) for row in rows for cell in row.values()), default=0)
    begin, end = _window(rows, length, width) if mark else (0, length)
    lines = []
    for device, row in enumerate(rows):
        cells = " ".join(row.get(column, "").ljust(width) for column in range(begin, end))
        cut = "… " * (begin > 0), " …" * (end < length)
        lines.append(f"{device:>{len(str(len(rows) - 1))}} | {cut[0]}{cells}{cut[1]}".rstrip())
    return "\n".join(lines)


def _cells(program: Program, steps: int, mark: Set[Place], versions: bool) -> list[dict[int, str]]:
    """For each device its cells by column; tasks that can never start follow those that can."""
    named = not _single_packs(program)
    run = unrolled(program, steps)
    found = settle(run).slots
    stood = places(program, steps)
    rows: list[dict[int, str]] = [{} for _ in program.devices]
    last: list[int | None] = [None] * len(rows)
    arrow = [False] * len(rows)
    for index, task in enumerate(run.tasks):
        device, (place, body) = run.devices[index], stood[index]
        marked = place in mark and (not body or place[1] == "epilogue")
        row, column = rows[device], last[device]
        if isinstance(task, (Forward, Backward)):
            slot = found[index]
            column = slot if slot is not None else max(row, default=-1) + 1
            cell = f"[{_cell(task, named, versions)}]" if marked else _cell(task, named, versions)
            row[column] = ">" * arrow[device] + cell
            last[device], arrow[device] = column, False
        elif isinstance(task, Update) and column is not None and not row[column].endswith("*"):
            row[column] += "*"
        if marked and not isinstance(task, (Forward, Backward)):
            arrow[device] = True
    for device, row in enumerate(rows):
        if arrow[device]:
            row[max(row, default=-1) + 1] = ">"
    return rows


def _single_packs(program: Program) -> bool:
    for device in program.devices:
        tasks = (t for t in device.prologue + device.body + device.epilogue if isinstance(t, (Forward, Backward)))
        if len({(task.first, task.last) for task in tasks}) > 1:
            return False
    return True


def _cell(task: Forward | Backward, named: bool, versions: bool) -> str:
    op = "F" if isinstance(task, Forward) else "B"
    count = f"-{task.microbatch + task.count - 1}" if task.count > 1 else ""
    version = str(max(task.version, 0)).translate(_SUPERSCRIPTS) if versions else ""
    return f"{task.first if named else ''}{op}{task.microbatch}{count}{version}"


def places(program: Program, steps: int) -> list[tuple[Place, int]]:
    """Where each task of a run stands in the program, and how many bodies came before."""
    found: list[tuple[Place, int]] = []
    bodies = steps - program.epilogue_steps
    for device, part in enumerate(program.devices):
        found += [((device, "prologue", i), 0) for i in range(len(part.prologue))]
        found += [((device, "body", i), body) for body in range(bodies) for i in range(len(part.body))]
        found += [((device, "epilogue", i), bodies) for i in range(len(part.epilogue))]
    return found


def _window(rows: list[dict[int, str]], length: int, width: int) -> tuple[int, int]:
    """The columns to show: as many as fit a line, around the first marked one."""
    marked = [column for row in rows for column, cell in row.items() if ">" in cell or "[" in cell]
    fitting = max(_WIDTH // (width + 1), 1)
    begin = max(min(min(marked, default=0) - fitting // 2, length - fitting), 0)
    return begin, min(begin + fitting, length)
