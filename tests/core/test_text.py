"""The text form of programs: written, read back, and refused with the line and what was expected."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.core.errors import ProgramError
from counterpoint.core.notation import dump_task, parse_task
from counterpoint.core.outline import LayerOutline, Outline, Value, chain_outline
from counterpoint.core.program import DeviceProgram, Program
from counterpoint.core.task import (
    AllReduce,
    Backward,
    Buffer,
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
    activation,
    clip,
    constant,
    norm,
    old,
    state,
    weight,
)
from counterpoint.core.text import dump, grid, parse

natural = st.integers(0, 99)
number = st.integers(-3, 99)
naturals = st.lists(natural, max_size=6).map(tuple)
flag = st.booleans()
tier = st.sampled_from(("host", "disk", "server 0", 'a "quoted" one', "ä\n\u2028")) | st.text(max_size=8)
layers = st.tuples(natural, natural).map(sorted)


def buffers() -> st.SearchStrategy[Buffer]:
    owned = st.sampled_from(("weight", "old", "grad", "state", "activation", "activation_grad", "saved"))
    return st.one_of(
        st.builds(Buffer, owned, natural, number), natural.map(constant), number.map(norm), number.map(clip)
    )


def packed(make: type, *rest: st.SearchStrategy[object]) -> st.SearchStrategy[Task]:
    return st.builds(lambda pack, *others: make(*pack, *others), layers, *rest)


tasks = st.one_of(
    packed(Forward, number, number, naturals, naturals, st.integers(1, 9), flag),
    packed(Backward, number, number, number, flag, st.integers(1, 9), flag),
    packed(Update, number, flag, flag, flag),
    packed(Norm, number),
    packed(AllReduce, number, naturals),
    st.builds(Clip, number, naturals),
    st.builds(Load, buffers(), tier),
    st.builds(Evict, buffers(), tier),
    st.builds(Drop, buffers()),
    st.builds(Send, buffers(), natural),
    st.builds(Receive, buffers(), natural),
)


@st.composite
def outlines(draw: st.DrawFn) -> Outline:
    count = draw(st.integers(1, 12))
    found: list[LayerOutline] = []
    for index in range(count):
        partners = [i for i in range(index) if found[i].has_weights]
        tied = tuple(draw(st.lists(st.sampled_from(partners), max_size=3, unique=True))) if partners else ()
        trained = draw(flag)
        found.append(LayerOutline(trained, draw(flag), tied, trained and draw(flag)))
    values = []
    for producer in draw(st.lists(st.integers(0, count - 1), max_size=30)):
        later = st.lists(st.integers(producer + 1, count - 1), max_size=4).map(tuple)
        values.append(Value(producer, draw(later) if producer + 1 < count else (), draw(flag)))
    return Outline(tuple(found), tuple(values))


sections = st.lists(tasks, max_size=6).map(tuple)
programs = st.builds(
    Program,
    outlines(),
    st.integers(1, 9),
    st.lists(st.builds(DeviceProgram, sections, sections, sections), max_size=3).map(tuple),
    st.integers(0, 2),
    st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
)


@settings(deadline=None)
@given(programs)
def test_parse_undoes_dump(program: Program) -> None:
    assert parse(dump(program)) == program


@settings(deadline=None)
@given(tasks)
def test_a_task_is_one_line(task: Task) -> None:
    line = dump_task(task)
    assert len(line.splitlines()) == 1
    assert parse_task(line) == task


@pytest.mark.parametrize(
    ("task", "line"),
    [
        (Forward(0, 3, 2, 0, (0, 1, 2, 3), (2,), 4), "F0-3.m2+4@0 saves=0-3 stashes=2"),
        (Forward(3, 3, 2, 0), "F3.m2@0"),
        (Forward(3, 3, 2, -1, stashes=(3,), old=True), "F3.m2@-1 stashes=3 old"),
        (Backward(4, 7, 1, -1, 0, True), "B4-7.m1@-1/0 recompute"),
        (Backward(4, 7, 1, -1, 0, True, old=True), "B4-7.m1@-1/0 recompute old"),
        (Update(0, 3, 0, True, True, True), "U0-3@0 host clipped keeps_old"),
        (Norm(0, 3, 0), "N0-3@0"),
        (Clip(0, (0, 1)), "C@0 *0,1"),
        (AllReduce(0, 3, 0, (0, 1)), "A g0-3@0 *0,1"),
        (Load(weight(3, 0), "host"), "L w3@0 host"),
        (Load(old(3, -1), "host"), "L o3@-1 host"),
        (Evict(state(3, 1), "my disk"), 'E k3@1 "my disk"'),
        (Drop(constant(4)), "D c4"),
        (Send(activation(4, 2), 1), "S a4.m2 >1"),
        (Receive(activation(4, -2), 0), "R a4.m-2 <0"),
    ],
)
def test_notation(task: Task, line: str) -> None:
    assert dump_task(task) == line


TEXT = """\
# comments and blank lines are skipped

layers 3
weightless 1
constants 2
tied 2=0
values 0>1,2! 1>2
microbatches 2
epilogue_steps 1
budgets 100
device 0
prologue
  L w0@0 disk
body
  F0-2.m0@0
"""


def test_header() -> None:
    program = parse(TEXT)
    values = (Value(0, (1, 2), False), Value(1, (2,)))
    assert program.outline == Outline((LayerOutline(), LayerOutline(False), LayerOutline(True, True, (0,))), values)
    assert (program.num_microbatches, program.epilogue_steps, program.budgets) == (2, 1, (100,))
    assert program.devices == (DeviceProgram((Load(weight(0, 0), "disk"),), (Forward(0, 2, 0, 0),), ()),)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("F0-2.m0@0", "F0-2@0", r"line 15: cannot read 'F0-2@0'.*expected F<first>-<last>\.m<microbatch>"),
        ("F0-2.m0@0", "F0-2.m0@0 host", r"line 15: .*'host' does not belong here"),
        ("F0-2.m0@0", "F0-2.m0@0 saves=1-x", r"line 15: .*'1-x' is neither a number nor a range"),
        ("F0-2.m0@0", "X7", "line 15: cannot read 'X7'; a task begins with one of F B U"),
        ("F0-2.m0@0", "C@0 0,1", r"line 15: .*'0,1' does not begin with '\*'"),
        ("F0-2.m0@0", "S a0.m0", "line 15: .*expected S <buffer> ><device>"),
        ("L w0@0 disk", "L q0@0 disk", "line 13: .*'q0@0' is no buffer such as"),
        ("L w0@0 disk", "L w0.m0 disk", "line 13: .*'w0.m0' lacks its layer, value, version or microbatch"),
        ("L w0@0 disk", "L w0@0", "line 13: .*expected L <buffer> <tier>"),
        ("L w0@0 disk", "L w0@0 my disk", "line 13: .*'my disk' is no tier"),
        ("device 0", "device 1", "line 11: expected device 0, found device 1"),
        ("device 0\n", "", "line 12: a task needs a device"),
        ("body", "corps", "line 14: unknown word 'corps'"),
        ("values 0>1,2!", "values 0-1", "line 7: cannot read '0-1'; expected values"),
        ("microbatches 2\n", "", "expected one line 'microbatches <number>', found 0 numbers"),
        ("layers 3", "layers 3 4", "expected one line 'layers <number>', found 2 numbers"),
        ("weightless 1", "weightless 7", "there is no layer 7; layers are 0 to 2"),
        ("values 0>1,2!", "values 0>9", "chain is inconsistent: value 0 goes from layer 0 to layer 9"),
        ("tied 2=0", "tied 2=1", "layer 2 is tied to layer 1"),
    ],
)
def test_errors_name_the_line_and_what_was_expected(old: str, new: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        parse(TEXT.replace(old, new))


def pipeline() -> Program:
    """Two stages, one layer each, three microbatches, 1F1B."""
    first = "F0.m0@0 saves=0|S a0.m0 >1|F0.m1@0 saves=0|S a0.m1 >1|R d0.m0 <1|B0.m0@0/0|F0.m2@0 saves=0|S a0.m2 >1"
    first += "|R d0.m1 <1|B0.m1@0/0|R d0.m2 <1|B0.m2@0/0|U0@0"
    second = "|".join(f"R a0.m{k} <0|F1.m{k}@0 saves=1|B1.m{k}@0/0|S d0.m{k} >0" for k in range(3))
    bodies = (tuple(parse_task(line) for line in text.split("|")) for text in (first, second + "|U1@0"))
    return Program(chain_outline(2), 3, tuple(DeviceProgram((), body, ()) for body in bodies))


def test_grid() -> None:
    assert grid(pipeline()).splitlines() == [
        "0 | F0  F1      B0  F2  B1      B2*",
        "1 |     F0  B0  F1  B1  F2  B2*",
    ]


def test_grid_of_two_steps_with_versions() -> None:
    assert grid(pipeline(), steps=2, versions=True).splitlines() == [
        "0 | F0⁰  F1⁰       B0⁰  F2⁰  B1⁰       B2⁰* F3¹  F4¹       B3¹  F5¹  B4¹       B5¹*",
        "1 |      F0⁰  B0⁰  F1⁰  B1⁰  F2⁰  B2⁰*           F3¹  B3¹  F4¹  B4¹  F5¹  B5¹*",
    ]


def test_grid_names_packs_where_a_device_has_several() -> None:
    body = tuple(map(parse_task, ("F0.m0+2@0", "B1.m0@0/0 recompute", "B1.m1@0/0 recompute", "B0.m0+2@0/0 recompute")))
    program = Program(chain_outline(2), 2, (DeviceProgram((), body, ()),))
    assert grid(program) == "0 | 0F0-1 1B0   1B1   0B0-1"


def test_grid_marks_computations_and_what_comes_before_them() -> None:
    marked = grid(pipeline(), mark={(0, "body", 5), (1, "body", 4), (1, "body", 12)}).splitlines()
    assert marked == [
        "0 | F0   F1        [B0] F2   B1        B2*",
        "1 |      F0   B0   >F1  B1   F2   B2*  >",
    ]


def test_wide_grids_are_cut_around_the_mark() -> None:
    program = pipeline()
    lines = grid(program, steps=20, mark={(0, "body", 12)}).splitlines()
    assert all(len(line) < 120 and line.endswith("…") for line in lines)
    assert all(len(line) > 400 for line in grid(program, steps=20).splitlines())


def test_grid_of_a_deadlock_shows_all_tasks() -> None:
    program = pipeline()
    body = program.devices[1].body
    crossed = DeviceProgram((), (body[4], body[0], *body[1:4], *body[5:]), ())
    broken = Program(program.outline, 3, (program.devices[0], crossed))
    assert grid(broken).count("F") == 6
