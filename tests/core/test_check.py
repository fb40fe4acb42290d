"""Every rule of the checker: legal programs pass, and each way of breaking one is reported where it is broken."""

import re
from dataclasses import replace

import pytest

from counterpoint.core.check import check, refuse
from counterpoint.core.costs import Costs
from counterpoint.core.errors import ProgramError
from counterpoint.core.memory import peak_bytes, peaks_apart
from counterpoint.core.plan import Pack, Plan
from counterpoint.core.profile import Curve, LayerCost, Profile, ValueCost
from counterpoint.core.text import parse

# One device, everything goes home between uses; the last layer runs forward and backward in one task.
SWAPPED = """\
layers 2
values 0>1
microbatches 2
budgets 1000
device 0
body
  L w0@0 host
  F0.m0@0
  F0.m1@0
  L w1@0 host
  B1.m0@0/0 recompute
  D a0.m0
  B1.m1@0/0 recompute
  D a0.m1
  L k1@0 host
  U1@0
  D g1@0
  E w1@1 host
  D w1@1
  E k1@1 host
  D k1@1
  B0.m0@0/0 recompute
  D d0.m0
  B0.m1@0/0 recompute
  D d0.m1
  L k0@0 host
  U0@0
  D g0@0
  E w0@1 host
  D w0@1
  E k0@1 host
  D k0@1
"""

# Two replicas of two layers, before the residency pass, with clipping over all gradients.
REPLICAS = """\
layers 2
values 0>1
microbatches 2
device 0
body
  F0-1.m0@0 saves=0,1
  B0-1.m0@0/0
  A g0-1@0 *0,1
  N0-1@0
  C@0 *0,1
  U0-1@0 clipped
device 1
body
  F0-1.m1@0 saves=0,1
  B0-1.m1@0/0
  A g0-1@0 *0,1
  N0-1@0
  C@0 *0,1
  U0-1@0 clipped
"""

# Two stages, layer 2 also uses the weights of layer 0, two weight versions, no flush.
TWO_VERSIONS = """\
layers 3
tied 2=0
values 0>1 1>2
microbatches 2
epilogue_steps 1
device 0
prologue
  F0-1.m0@-1 saves=0,1
  S a1.m0 >1
body
  F0-1.m1@-1 saves=0,1
  S a1.m1 >1
  R d1.m0 <1
  B0-1.m0@-1/0
  F0-1.m2@0 saves=0,1
  S a1.m2 >1
  R d1.m1 <1
  B0-1.m1@-1/0
  A g0@0 *0,1
  U0-1@0 keeps_old
epilogue
  F0-1.m1@-1 saves=0,1
  S a1.m1 >1
  R d1.m0 <1
  B0-1.m0@-1/0
  R d1.m1 <1
  B0-1.m1@-1/0
  A g0@0 *0,1
  U0-1@0 keeps_old
device 1
body
  R a1.m0 <0
  F2.m0@-1 saves=2
  B2.m0@-1/0
  S d1.m0 >0
  R a1.m1 <0
  F2.m1@-1 saves=2
  B2.m1@-1/0
  S d1.m1 >0
  A g0@0 *0,1
  U0@0 keeps_old
  U2@0 keeps_old
epilogue
  R a1.m0 <0
  F2.m0@-1 saves=2
  B2.m0@-1/0
  S d1.m0 >0
  R a1.m1 <0
  F2.m1@-1 saves=2
  B2.m1@-1/0
  S d1.m1 >0
  A g0@0 *0,1
  U0@0 keeps_old
  U2@0 keeps_old
"""

# The same, with layers whose old version is a copy of its own.
NARROW = re.sub(r"(?m)@-1(.*)$", r"@-1\1 old", TWO_VERSIONS).replace("microbatches", "narrow 0 2\nmicrobatches")

# The optimizer runs on the host: gradients go home, weights come back.
HOST_UPDATE = """\
layers 1
microbatches 1
budgets 1000
device 0
body
  L w0@0 host
  B0.m0@0/0 recompute
  E g0@0 host
  U0@0 host
  D g0@0
  D w0@0
"""

# A value with two consumers on another device than its producer, and a constant.
FORK = """\
layers 3
constants 1
values 0>1,2 1>2
microbatches 1
device 0
body
  F0.m0@0 saves=0
  S a0.m0 >1
  R d0.m0 <1
  B0.m0@0/0
  U0@0
device 1
body
  R a0.m0 <0
  F1.m0@0 saves=1
  B2.m0@0/0 recompute
  B1.m0@0/0
  S d0.m0 >0
  U1-2@0
"""

# Device 0 wants the gradient of microbatch 0 before it goes on to microbatch 1, device 1 the other way round.
CROSSED = """\
layers 2
values 0>1
microbatches 2
device 0
body
  F0.m0@0 saves=0
  S a0.m0 >1
  R d0.m0 <1
  B0.m0@0/0
  F0.m1@0 saves=0
  S a0.m1 >1
  R d0.m1 <1
  B0.m1@0/0
  U0@0
device 1
body
  R a0.m0 <0
  F1.m0@0 saves=1
  R a0.m1 <0
  F1.m1@0 saves=1
  B1.m0@0/0
  S d0.m0 >0
  B1.m1@0/0
  S d0.m1 >0
  U1@0
"""


def messages(text: str, costs: Costs | None = None) -> list[str]:
    return [str(failure) for failure in check(parse(text), costs)]


@pytest.mark.parametrize("text", [SWAPPED, REPLICAS, TWO_VERSIONS, NARROW, HOST_UPDATE, FORK])
def test_legal_programs_pass(text: str) -> None:
    assert messages(text) == []
    refuse(parse(text))


@pytest.mark.parametrize(
    ("text", "old", "new", "message"),
    [
        # shape
        (SWAPPED, "F0.m0@0", "F0-2.m0@0", r"device 0, body 1 \(F0-2.m0@0\): layers must lie within 0 to 1"),
        (SWAPPED, "D a0.m0", "D a1.m0", "there is no value 1; the chain has 1"),
        (SWAPPED, "L k1@0", "L k7@0", "there is no layer 7; the chain has 2"),
        (SWAPPED, "F0.m0@0", "F0.m0@0 saves=1", "it saves or stashes layer 1, which it does not run"),
        (SWAPPED, "budgets 1000", "budgets 1 2", "2 budgets are given for 1 devices"),
        (FORK, "S a0.m0 >1", "S a0.m0 >0", "device 0 is no other device; there are 2"),
        (REPLICAS, "C@0 *0,1\n  U", "C@0 *1,2\n  U", "peers must be different devices below 2, this one among them"),
        # residency
        (SWAPPED, "  L w0@0 host\n", "", r"body 0 \(F0.m0@0\): w0@0 is not on the device$"),
        (SWAPPED, "  L k1@0 host\n", "", r"\(U1@0\): k1@0 is not on the device$"),
        (SWAPPED, "L w1@0", "D a0.m0\n  L w1@0",
         r"a0.m0 is not on the device \(dropped at device 0, body 3 \(D a0.m0\)"),
        (SWAPPED, "D a0.m1", "L w1@0 host", "w1@0 is on the device already"),
        (SWAPPED, "D a0.m1", "D g0@0", r"\(D g0@0\): g0@0 is not on the device"),
        (SWAPPED, "D a0.m1", "E w0@1 host", r"\(E w0@1 host\): w0@1 is not on the device"),
        (SWAPPED, "E w1@1 host", "E w0@0 host", r"w1@0 has no home copy.*, from step 1 on"),
        (SWAPPED, "  E k0@1 host\n", "", r"U0@0\): k0@1 is dropped later and was never evicted"),
        (SWAPPED, "D g1@0", "E w1@0 host", r"w1@0 is not on the device \(overwritten at device 0, body 9 \(U1@0\)\)"),
        (SWAPPED, "F0.m1@0", "F0.m0@0", "a0.m0 is on the device already and would be written again"),
        (SWAPPED, "  D d0.m1\n", "", "the body is not cyclic, it leaves behind d0.m-1 for the next step"),
        (HOST_UPDATE, "  E g0@0 host\n", "", r"U0@0 host\): g0@0 has no home copy"),
        (FORK, "R a0.m0 <0", "R a0.m0 <0\n  R a0.m0 <0", "a0.m0 is on the device already"),
        (TWO_VERSIONS, "B0-1.m1@-1/0\n  A g0@0 *0,1\n  U0-1@0 keeps_old",
         "A g0@0 *0,1\n  U0-1@0 keeps_old\n  B0-1.m1@-1/0",
         "w0@1 would be the third version of its layer, beside w0@-1 and w0@0"),
        (NARROW, "B2.m1@-1/0 old", "B2.m1@-1/0",
         r"w2@-1 is not on the device \(overwritten at device 1, body 10 \(U2@0 keeps_old\)\), from step 1 on"),
        (NARROW, "F0-1.m2@0 saves=0,1", "F0-1.m2@0 saves=0,1 old",
         r"U0-1@0 keeps_old\): o0@0 is on the device already and would be written again"),
        (NARROW, "U2@0 keeps_old", "U2@0", "o2@-1 is not on the device, from step 1 on"),
        # order, versions and updates
        (REPLICAS, "  F0-1.m1@0 saves=0,1\n", "",
         "layer 0-1 must run forward once.*it runs never for microbatch 1,3,5"),
        (SWAPPED, "B0.m1@0/0", "B0.m0@0/0", "runs never for microbatch 1,3,5 and 2 times for microbatch 0,2,4"),
        (SWAPPED, "F0.m0@0", "F0.m0@-1", "step 0 runs on weight version -1, not on the newest, 0"),
        (SWAPPED, "B1.m0@0/0", "B1.m0@0/1", "microbatch 0 is of step 0, its gradient goes to step 1"),
        (SWAPPED, "  U0@0\n", "", "layer 0 is never updated in step 0-2"),
        (SWAPPED, "U0@0", "U0@0\n  U0@0", r"layer 0 is updated twice in one step, first at device 0, body 20 \(U0@0\)"),
        (SWAPPED, "  F0.m1@0\n", "  F0.m1+2@0\n", "microbatch 6 runs forward, but 3 steps of 2 have 0 to 5"),
        (TWO_VERSIONS, "B2.m1@-1/0", "B2.m1@0/0", "microbatch 1 runs on version 0, but on -1 at device 0, body 0"),
        (TWO_VERSIONS, "B2.m1@-1/0", "B2.m1@-2/0", "version -2, not on the newest or the one before, 0 or -1"),
        (TWO_VERSIONS, "U2@0 keeps_old\n", "U2@1 keeps_old\n", "layer 2 is never updated in step 0"),
        # gradients
        (SWAPPED, "  B1.m1@0/0 recompute\n", "", r"U1@0\): g1@0 is used before it is whole: 1 of 2 parts are missing"),
        (REPLICAS, "A g0-1@0 *0,1", "A g0@0 *0,1", "g1@0 is used before it is whole: 1 of 2 parts .* microbatch 1"),
        (REPLICAS, "B0-1.m1@0/0", "B0-1.m0@0/0", "g0@0 counts layer 0 of microbatch 0 on two devices"),
        (FORK, "B2.m0@0/0 recompute\n  B1.m0@0/0\n  S d0.m0 >0", "B2.m0@0/0 recompute\n  S d0.m0 >0\n  B1.m0@0/0",
         r"B0.m0@0/0\): d0.m0 lacks the part of layer 1"),
        (FORK, "B2.m0@0/0 recompute\n  B1.m0@0/0\n  S d0.m0 >0", "B2.m0@0/0 recompute\n  S d0.m0 >0\n  B1.m0@0/0",
         r"B1.m0@0/0\): d0.m0 is added to after it was sent"),
        (TWO_VERSIONS, "  A g0@0 *0,1\n", "", "g0@0 is used before it is whole: 2 of 4 parts"),
        # meetings
        (FORK, "  R a0.m0 <0\n", "", r"device 0, body 1 \(S a0.m0 >1\): device 1 never receives it"),
        (FORK, "  S d0.m0 >0\n", "", r"device 0, body 2 \(R d0.m0 <1\): device 1 never sends it"),
        (FORK, "U0@0\ndevice", "R d0.m0 <1\n  U0@0\ndevice", "device 1 never sends it"),
        (CROSSED, "", "",
         r"device 0, body 2 \(R d0.m0 <1\): deadlock, it waits for ever for device 1, body 5 \(S d0.m0 >0\)"),
        (CROSSED, "", "",
         r"device 1, body 2 \(R a0.m1 <0\): deadlock, it waits for ever for device 0, body 5 \(S a0.m1 >1\)"),
        (TWO_VERSIONS, "S d1.m0 >0\n  R a1.m1 <0\n  F2.m1@-1 saves=2\n  B2.m1@-1/0\n  S d1.m1 >0\n  A",
         "R a1.m1 <0\n  F2.m1@-1 saves=2\n  B2.m1@-1/0\n  S d1.m1 >0\n  S d1.m0 >0\n  A",
         "device 0 expects another buffer next"),
    ],
)  # fmt: skip
def test_broken_programs_are_reported(text: str, old: str, new: str, message: str) -> None:
    assert text.count(old)
    found = "\n".join(messages(text.replace(old, new)))
    with pytest.raises(ValueError, match=f"(?m){message}"):
        raise ValueError(found)


def test_a_collective_without_a_peer() -> None:
    lines = REPLICAS.splitlines()
    del lines[15]
    assert any(text.endswith("device 1 does not take part") for text in messages("\n".join(lines)))


def small_costs() -> Costs:
    time = Curve.proportional(10)
    layer = LayerCost("layer", time, time, 1, 1, 100, 100, 200, backward_workspace_bytes=Curve.proportional(30))
    profile = Profile("two", (layer, layer), (ValueCost(0, (1,), Curve.proportional(7)),))
    packs = (Pack(0, 0), Pack(1, 1))
    return Costs(profile, Plan("harmony", 2, 1, packs, packs[:1], ("recompute", "recompute")))


def test_peak_is_that_of_a_walk_through_the_list() -> None:
    """Largest at U1: both weights, gradient and state of layer 1, two activation gradients."""
    assert peak_bytes(parse(SWAPPED), small_costs(), 0) == 100 + 100 + 100 + 200 + 2 * 7


def test_peaks_apart_need_not_be_at_the_same_time() -> None:
    """Weights, gradient and state at U1; three values beside a backward's workspace at B1."""
    parts = peaks_apart(parse(SWAPPED), small_costs(), 0, {"weight", "grad", "state"})
    assert parts == (100 + 100 + 100 + 200, 3 * 7 + 30)
    assert sum(parts) > peak_bytes(parse(SWAPPED), small_costs(), 0)


def test_budget() -> None:
    costs = small_costs()
    program = parse(SWAPPED)
    assert check(replace(program, budgets=(514,)), costs) == ()
    (failure,) = check(replace(program, budgets=(513,)), costs)
    assert failure.text == "device 0, body 8 (L k1@0 host): 514 B are held here, the budget is 513 B"
    assert check(replace(program, budgets=(513,))) == ()


def test_the_error_lists_failures_and_shows_the_grid() -> None:
    with pytest.raises(ProgramError) as caught:
        refuse(parse(FORK.replace("  F0.m0@0 saves=0\n", "")))
    assert str(caught.value).splitlines() == [
        "the program breaks 3 rules:",
        "  layer 0 must run forward once for each microbatch; it runs never for microbatch 0-2",
        "  device 0, body 0 (S a0.m0 >1): a0.m0 is not on the device",
        "  device 0, body 2 (B0.m0@0/0): s0.m0 is not on the device",
        "",
        "0 |                         >[0B0]*",
        "1 | 1F0     2B0     1B0*",
    ]


def test_a_long_list_of_failures_is_cut() -> None:
    broken = "\n".join(line for line in SWAPPED.splitlines() if line[2:3] not in ("F", "B", "L"))
    with pytest.raises(ProgramError, match=r"(?s)breaks \d+ rules:.*\n  and \d+ more\n"):
        refuse(parse(broken))


def test_repeated_failures_of_a_body_are_one() -> None:
    found = check(parse(SWAPPED.replace("  L w0@0 host\n", "")), steps=5)
    assert len([failure for failure in found if "w0@0 is not on the device" in failure.text]) == 1
