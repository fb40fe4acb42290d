"""The first choice of what stays: whatever the gaps are, no position may exceed the budget if needs alone do not."""

from hypothesis import given
from hypothesis import strategies as st

from counterpoint.core.task import weight
from counterpoint.passes.body import Body, Gap
from counterpoint.passes.lives import Life
from counterpoint.passes.sweep import sweep

COUNT, NEED = 6, 10


@st.composite
def bodies(draw: st.DrawFn) -> Body:
    gaps = []
    for number in range(draw(st.integers(1, 8))):
        size, group = draw(st.integers(1, 9)), draw(st.integers(0, 2))
        start, length = draw(st.integers(0, COUNT - 1)), draw(st.integers(1, 2 * COUNT))
        head = draw(st.integers(0, length))
        inner = draw(st.integers(0, length - head))
        life = Life(weight(number, 0), size)
        gaps.append(Gap(life, 0, group, draw(st.booleans()), size, start, length, start + head, inner))
    return Body([NEED] * COUNT, gaps)


@given(bodies(), st.integers(NEED, 3 * NEED))
def test_what_needs_leave_is_enough(body: Body, budget: int) -> None:
    sweep(body, budget)
    assert max(body.occupied()) <= budget


def test_gaps_that_share_an_evict_may_all_go() -> None:
    """The second costs less once the first is written out, and is still there to be given up."""
    life = Life(weight(0, 0), 5)
    body = Body([NEED] * 3, [Gap(life, i, 1, True, 5, 0, i + 1, 0, i + 1) for i in range(2)])
    sweep(body, NEED)
    assert [gap.kept for gap in body.gaps] == [False, False]
