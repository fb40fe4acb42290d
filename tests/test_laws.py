"""Laws over random chains, plans, machines and budgets: whatever was decided, the placed program keeps its promises."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.core.check import check
from counterpoint.core.costs import Costs
from counterpoint.core.duties import duties_of
from counterpoint.core.edges import unrolled
from counterpoint.core.homes import Homes, fill_homes
from counterpoint.core.machine import Device, Home, Link, Machine, Tier
from counterpoint.core.memory import peak_bytes
from counterpoint.core.plan import SCHEDULES, Pack, Plan
from counterpoint.core.profile import Curve, LayerCost, Profile, ValueCost
from counterpoint.core.program import Program
from counterpoint.core.text import dump, parse
from counterpoint.core.timeline import Span, Timeline
from counterpoint.passes.residency import place, smallest_budgets
from counterpoint.schedules import write_program
from counterpoint.simulator import simulate

PIPELINES = ("model_parallel", "gpipe", "flush", "2bw")
STEPS = 3


@dataclass(frozen=True)
class Case:
    """A program before the residency pass, what it costs, where it runs, and how to place it."""

    program: Program
    plan: Plan
    costs: Costs
    machine: Machine
    homes: Homes
    budgets: tuple[int, ...]
    policy: str
    ahead: int
    quick: bool
    writes_clean: bool

    def placed(self) -> Program:
        return place(
            self.program,
            self.costs,
            self.budgets,
            self.homes,
            self.policy,
            ahead=self.ahead,
            quick=self.quick,
            writes_clean=self.writes_clean,
        )


@st.composite
def profiles(draw: st.DrawFn, largest: int = 7) -> Profile:
    """Chains with skips, values without gradient, layers without weights, constants, tied and narrowing layers."""
    count = draw(st.integers(1, largest))
    trained = [draw(st.integers(0, 4)) > 0 for _ in range(count)]
    layers = tuple(draw(layer_costs(index, trained)) for index in range(count))
    values = [ValueCost(index, (index + 1,), Curve.constant(draw(st.integers(0, 60)))) for index in range(count - 1)]
    for producer in draw(st.lists(st.integers(0, max(count - 2, 0)), max_size=3)) if count > 1 else []:
        consumers = draw(st.lists(st.integers(producer + 1, count - 1), min_size=1, max_size=3, unique=True))
        size = Curve.proportional(draw(st.integers(0, 60)))
        values.append(ValueCost(producer, tuple(sorted(consumers)), size, draw(st.booleans())))
    return Profile("random", layers, tuple(values))


@st.composite
def layer_costs(draw: st.DrawFn, index: int, trained: Sequence[bool]) -> LayerCost:
    owners = [other for other in range(index) if trained[other]]
    size = draw(st.integers(1, 200)) if trained[index] else 0
    return LayerCost(
        f"layer {index}",
        Curve.proportional(draw(st.integers(0, 300))),
        Curve.proportional(draw(st.integers(0, 600))),
        draw(st.integers(0, 50)),
        draw(st.integers(0, 400)),
        size,
        size,
        size * draw(st.sampled_from((0, 1, 2))),
        draw(st.sampled_from((0, 0, 30))),
        Curve.proportional(draw(st.integers(0, 90))),
        Curve.proportional(draw(st.integers(0, 20))),
        Curve.proportional(draw(st.integers(0, 40))),
        (draw(st.sampled_from(owners)),) if owners and draw(st.integers(0, 5)) == 0 else (),
        size // 2 if draw(st.booleans()) else 0,
    )


def cut(draw: st.DrawFn, count: int, ends: Sequence[int], free: Sequence[int]) -> tuple[Pack, ...]:
    """Packs of `count` layers that end at all of `ends` and some of `free`."""
    if not count:
        return ()
    chosen = {*ends, count - 1, *(end for end in free if draw(st.booleans()))}
    starts = [0, *(end + 1 for end in sorted(chosen) if end < count)]
    return tuple(Pack(first, last - 1) for first, last in pairwise(starts))


@st.composite
def plans(draw: st.DrawFn, count: int, schedules: Sequence[str]) -> Plan:
    schedule = draw(st.sampled_from(schedules))
    stages = cut(draw, count, (), range(count)) if schedule in PIPELINES else ()
    ends = [stage.last for stage in stages]
    backward = cut(draw, count, ends, range(count))
    kept = draw(st.sampled_from(("recompute", "keep", "evict"))) if schedule != "harmony_pp" else "recompute"
    free = range(count) if kept == "recompute" else [pack.last for pack in backward]
    forward = cut(draw, backward[-1].first if draw(st.booleans()) else count, ends, free)
    group = draw(st.integers(1, 2))
    replicas = draw(st.integers(1, 2)) if schedule != "harmony_pp" else 1
    least = max(len(stages) - 1, 1) if schedule == "2bw" else 1
    return Plan(
        schedule,
        draw(st.integers(least, least + 2)) * group,
        draw(st.integers(1, 2)),
        backward,
        forward,
        tuple(draw(st.sampled_from(("recompute", kept))) for _ in backward),
        draw(st.integers(1, 3)) if schedule == "harmony_pp" else max(len(stages), 1) * replicas,
        replicas,
        stages,
        group,
        group,
        tuple(sorted(draw(st.sets(st.integers(0, count - 1))))),
        draw(st.booleans()),
        draw(st.booleans()),
        replicas_apart=draw(st.booleans()),
    )


@st.composite
def machines(draw: st.DrawFn, num_devices: int, home_bytes: int) -> Machine:
    """Devices that share a host link or not; a host that holds all or a part, and a disk behind it."""
    shared = draw(st.booleans())
    names = [f"{way} {0 if shared else index}" for index in range(num_devices) for way in ("down", "up")]
    links = [Link(name, draw(st.integers(1, 4)) * 10**9, draw(st.integers(0, 30))) for name in dict.fromkeys(names)]
    links += [Link(f"{way} peer", draw(st.integers(1, 4)) * 10**9) for way in ("to", "from")]
    links += [Link("read", 10**9, 100), Link("write", 10**8)]
    devices = []
    for index in range(num_devices):
        down, up = names[2 * index : 2 * index + 2]
        homes = (Home("host", (down,), (up,)), Home("disk", ("read", down), (up, "write")))
        speed = draw(st.sampled_from((50, 100, 100)))
        to_peer, from_peer = ("to peer",), ("from peer",)
        devices.append(
            Device(str(index), 10**9, homes, to_peer, from_peer, to_peer, from_peer, index % 2, speed_percent=speed)
        )
    host = draw(st.sampled_from((home_bytes, home_bytes, home_bytes // 2)))
    return Machine("random", tuple(devices), tuple(links), (Tier("host", host), Tier("disk", 10**9)))


@st.composite
def cases(draw: st.DrawFn, schedules: Sequence[str] = SCHEDULES) -> Case:
    profile = draw(profiles())
    plan = draw(plans(len(profile.layers), schedules))
    costs, program = Costs(profile, plan), write_program(plan, profile.outline())
    machine = draw(machines(plan.num_devices, 10**6))
    least, spare = smallest_budgets(program, costs), draw(st.sampled_from((0, 5, 20, 50, 100, 200, 400, 10**6)))
    budgets = tuple(size + size * spare // 100 for size in least)
    policy = draw(st.sampled_from(("planned", "planned", "lru")))
    homes = fill_homes(machine, profile, plan.num_devices)
    ahead, quick, writes_clean = draw(st.integers(0, 2)), draw(st.integers(0, 9)) > 0, draw(st.booleans())
    return Case(program, plan, costs, machine, homes, budgets, policy, ahead, quick, writes_clean)


LAWS = settings(max_examples=300, deadline=None, derandomize=True)


@LAWS
@given(cases())
def test_a_placed_program_keeps_its_promises(case: Case) -> None:
    program = case.placed()
    assert check(program, case.costs) == ()
    assert all(peak_bytes(program, case.costs, d) <= budget for d, budget in enumerate(case.budgets))
    assert parse(dump(program)) == program
    timeline = simulate(program, case.costs, case.machine, STEPS)
    assert timeline == simulate(program, case.costs, case.machine, STEPS)
    respects_edges(program, timeline)
    peaks = timeline.peak_bytes()
    assert all(peaks[f"device {d}"] <= peak_bytes(program, case.costs, d) for d in range(len(case.budgets)))


@LAWS
@given(cases(schedules=("2bw",)))
def test_flush_can_take_the_place_of_2bw(case: Case) -> None:
    """On the same stages devices have the same to do with one another; it needs no more memory, if nothing narrows."""
    layers = tuple(replace(layer, old_bytes=0) for layer in case.costs.profile.layers)
    profile = replace(case.costs.profile, layers=layers)
    plans_of_both = (replace(case.plan, schedule="flush"), case.plan)
    needs = [smallest_budgets(write_program(p, profile.outline()), Costs(profile, p)) for p in plans_of_both]
    assert all(need <= known for need, known in zip(*needs, strict=True))
    flush, delayed = (duties_of(write_program(p, case.program.outline)) for p in plans_of_both)
    assert (flush.two_versions, delayed.two_versions) == (False, any(delayed.writers))
    assert [set(lanes) for lanes in flush.lanes] == [set(lanes) for lanes in delayed.lanes]
    assert replace(flush, lanes=(), two_versions=True) == replace(delayed, lanes=(), two_versions=True)


def respects_edges(program: Program, timeline: Timeline) -> None:
    """Every task starts after all it waits for has ended, lanes are in order, and tasks that meet run together."""
    run = unrolled(program, STEPS)
    lanes: defaultdict[tuple[int, str], list[Span]] = defaultdict(list)
    for span in timeline.spans:
        lanes[span.device, span.lane].append(span)
    assert len(timeline.spans) == len(run.tasks)
    queues = {name: iter(spans) for name, spans in lanes.items()}
    spans = [next(queues[key]) for key in zip(run.devices, run.lanes, strict=True)]
    assert [span.task for span in spans] == run.tasks
    for span, before in zip(spans, run.predecessors, strict=True):
        assert span.start_ns <= span.end_ns
        assert all(spans[other].end_ns <= span.start_ns for other in before)
    for group in run.meetings:
        assert len({(spans[index].start_ns, spans[index].end_ns) for index in group}) == 1
