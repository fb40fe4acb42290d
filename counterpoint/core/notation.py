"""One task as a line of text, and a line of text as a task.

    F0-3.m2+4@0 saves=0-3 stashes=2   forward of layers 0 to 3, microbatches 2 to 5, on weight version 0
    B4-7.m1@-1/0 recompute old        backward on version -1, into the gradients of step 0; the update of -1 is done
    U0-3@0 host clipped keeps_old     update: version 0 becomes 1
    N0-3@0                            norms of finished gradients
    C@0 *0,1                          clipping factor, gathered from devices 0 and 1
    A g0-3@0 *0,1                     all-reduce of gradients among devices 0 and 1
    L w3@0 host   E k3@1 disk         load and evict, and the tier they use
    D a4.m2                           drop
    S a4.m2 >1    R a4.m2 <0          send to device 1, receive from device 0

Buffers are w(eight), o(ld weight), c(onstant), g(rad), k (optimizer state), a(ctivation), d (activation gradient),
s(aved), n(orm) and x (clip).
"""

import json
import re
from collections.abc import Sequence
from typing import assert_never, get_args

from counterpoint.core.task import (
    PER_MICROBATCH,
    AllReduce,
    Backward,
    Buffer,
    BufferKind,
    Clip,
    Drop,
    Evict,
    Forward,
    Load,
    Norm,
    Receive,
    Send,
    Task,
    Update,
)

_KINDS: dict[str, BufferKind] = dict(zip("wocgkadsnx", get_args(BufferKind), strict=True))
_LETTERS = {kind: letter for letter, kind in _KINDS.items()}
_EXPECTED = {
    "F": "F<first>-<last>.m<microbatch>[+<count>]@<version> [saves=<layers>] [stashes=<layers>] [old]",
    "B": "B<first>-<last>.m<microbatch>[+<count>]@<version>/<step> [recompute] [old]",
    "U": "U<first>-<last>@<step> [host] [clipped] [keeps_old]",
    "N": "N<first>-<last>@<step>",
    "C": "C@<step> *<device>,<device>",
    "A": "A g<first>-<last>@<step> *<device>,<device>",
    "L": "L <buffer> <tier>",
    "E": "E <buffer> <tier>",
    "D": "D <buffer>",
    "S": "S <buffer> ><device>",
    "R": "R <buffer> <<device>",
}
_LAYERS = r"(?P<first>\d+)(?:-(?P<last>\d+))?"
_BATCH = r"\.m(?P<microbatch>-?\d+)(?:\+(?P<count>\d+))?@(?P<version>-?\d+)"
_STEP = r"(?P<step>-?\d+)"
_HEADS = {
    "F": re.compile(f"F{_LAYERS}{_BATCH}"),
    "B": re.compile(f"B{_LAYERS}{_BATCH}/{_STEP}"),
    "U": re.compile(f"U{_LAYERS}@{_STEP}"),
    "N": re.compile(f"N{_LAYERS}@{_STEP}"),
    "C": re.compile(f"C@{_STEP}"),
    "A": re.compile(f"g{_LAYERS}@{_STEP}"),
}
_BUFFER = re.compile(r"([wocgkadsnx])(\d*)(?:(@|\.m)(-?\d+))?")
_PLAIN_TIER = re.compile(r"[\w.:/-]+", re.ASCII)


def dump_task(task: Task) -> str:
    match task:
        case Forward(first, last, microbatch, version, saves, stashes, count, old):
            head = f"F{dump_layers(first, last)}.m{microbatch}{_count(count)}@{version}"
            return head + _option("saves", saves) + _option("stashes", stashes) + " old" * old
        case Backward(first, last, microbatch, version, step, recompute, count, old):
            head = f"B{dump_layers(first, last)}.m{microbatch}{_count(count)}@{version}/{step}"
            return head + " recompute" * recompute + " old" * old
        case Update(first, last, step, host, clipped, keeps_old):
            head = f"U{dump_layers(first, last)}@{step}"
            return head + " host" * host + " clipped" * clipped + " keeps_old" * keeps_old
        case Norm(first, last, step):
            return f"N{dump_layers(first, last)}@{step}"
        case Clip(step, peers):
            return f"C@{step} *{dump_numbers(peers)}"
        case AllReduce(first, last, step, peers):
            return f"A g{dump_layers(first, last)}@{step} *{dump_numbers(peers)}"
        case Load(buffer, tier):
            return f"L {dump_buffer(buffer)} {_tier(tier)}"
        case Evict(buffer, tier):
            return f"E {dump_buffer(buffer)} {_tier(tier)}"
        case Drop(buffer):
            return f"D {dump_buffer(buffer)}"
        case Send(buffer, peer):
            return f"S {dump_buffer(buffer)} >{peer}"
        case Receive(buffer, peer):
            return f"R {dump_buffer(buffer)} <{peer}"
        case _:
            assert_never(task)


def dump_buffer(buffer: Buffer) -> str:
    """
    >>> dump_buffer(Buffer("weight", 3, -1)), dump_buffer(Buffer("activation", 4, 2)), dump_buffer(Buffer("norm", 0, 1))
    ('w3@-1', 'a4.m2', 'n@1')
    """
    kind, owner, number = buffer
    shared = kind in ("norm", "clip") and not owner
    name = _LETTERS[kind] + ("" if shared else str(owner))
    if kind == "constant" and not number:
        return name
    return f"{name}{'.m' if kind in PER_MICROBATCH else '@'}{number}"


def dump_layers(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def dump_numbers(numbers: Sequence[int]) -> str:
    """Numbers with commas, longer runs as ranges.

    >>> dump_numbers((0, 1, 2, 3, 7)), dump_numbers((0, 1)), parse_numbers("0-3,7")
    ('0-3,7', '0,1', (0, 1, 2, 3, 7))
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)


def _count(count: int) -> str:
    return "" if count == 1 else f"+{count}"


def _option(name: str, layers: Sequence[int]) -> str:
    return f" {name}={dump_numbers(layers)}" if layers else ""


def _tier(tier: str) -> str:
    return tier if _PLAIN_TIER.fullmatch(tier) else json.dumps(tier)


def parse_task(line: str) -> Task:
    """The task of one line; a ValueError says what was expected."""
    op = line[:1]
    if op not in _EXPECTED:
        raise ValueError(f"cannot read {line!r}; a task begins with one of {' '.join(_EXPECTED)}")
    try:
        return _parse_compute(op, line.split()) if op in "FBUNC" else _parse_transfer(op, line)
    except ValueError as error:
        raise ValueError(f"cannot read {line!r}: {error}; expected {_EXPECTED[op]}") from error


def _parse_compute(op: str, words: list[str]) -> Task:
    n = _head(op, words[0])
    options = words[1:]
    match op:
        case "F":
            saves, stashes = _take_list(options, "saves"), _take_list(options, "stashes")
            old = _take(options, "old")
            task: Task = Forward(n["first"], n["last"], n["microbatch"], n["version"], saves, stashes, n["count"], old)
        case "B":
            recompute, old = _take(options, "recompute"), _take(options, "old")
            task = Backward(n["first"], n["last"], n["microbatch"], n["version"], n["step"], recompute, n["count"], old)
        case "U":
            host, clipped, keeps_old = (_take(options, name) for name in ("host", "clipped", "keeps_old"))
            task = Update(n["first"], n["last"], n["step"], host, clipped, keeps_old)
        case "N":
            task = Norm(n["first"], n["last"], n["step"])
        case _:
            task = Clip(n["step"], parse_numbers(_after("*", options.pop(0) if options else "")))
    if options:
        raise ValueError(f"{' '.join(options)!r} does not belong here")
    return task


def _parse_transfer(op: str, line: str) -> Task:
    letter, *words = line.split(maxsplit=2)
    if letter != op or len(words) != (1 if op == "D" else 2):
        raise ValueError(f"{len(words)} items after {letter!r}")
    match op:
        case "A":
            n = _head(op, words[0])
            return AllReduce(n["first"], n["last"], n["step"], parse_numbers(_after("*", words[1])))
        case "L":
            return Load(parse_buffer(words[0]), _parse_tier(words[1]))
        case "E":
            return Evict(parse_buffer(words[0]), _parse_tier(words[1]))
        case "S":
            return Send(parse_buffer(words[0]), int(_after(">", words[1])))
        case "R":
            return Receive(parse_buffer(words[0]), int(_after("<", words[1])))
        case _:
            return Drop(parse_buffer(words[0]))


def parse_buffer(text: str) -> Buffer:
    found = _BUFFER.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no buffer such as w3@0, c3, g3@0, k3@0, a4.m2, d4.m2, s4.m2, n@0 or x@0")
    kind, (owner, separator, number) = _KINDS[found[1]], found.groups()[1:]
    numbered = number is not None and separator == (".m" if kind in PER_MICROBATCH else "@")
    if not (owner or kind in ("norm", "clip")) or not (numbered or (kind == "constant" and number is None)):
        raise ValueError(f"{text!r} lacks its layer, value, version or microbatch")
    return Buffer(kind, int(owner or 0), int(number or 0))


def parse_numbers(text: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in text.split(",") if text else ():
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part!r} is neither a number nor a range such as 0-3")
        numbers += range(int(first), int(last or first) + 1)
    return tuple(numbers)


def _head(op: str, text: str) -> dict[str, int]:
    found = _HEADS[op].fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} does not fit")
    numbers = {name: int(number) for name, number in found.groupdict().items() if number is not None}
    return {"count": 1, "last": numbers.get("first", 0), **numbers}


def _take(options: list[str], name: str) -> bool:
    present = name in options
    if present:
        options.remove(name)
    return present


def _take_list(options: list[str], name: str) -> tuple[int, ...]:
    for option in options:
        if option.startswith(f"{name}="):
            options.remove(option)
            return parse_numbers(option.removeprefix(f"{name}="))
    return ()


def _after(sign: str, text: str) -> str:
    if not text.startswith(sign):
        raise ValueError(f"{text!r} does not begin with {sign!r}")
    return text.removeprefix(sign)


def _parse_tier(text: str) -> str:
    if not text.startswith('"'):
        if not _PLAIN_TIER.fullmatch(text):
            raise ValueError(f"{text!r} is no tier")
        return text
    return str(json.loads(text))
