"""Partitions: exact, against brute force, and complete."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.core.plan import Pack
from counterpoint.planner.partition import balanced, packs_within

COSTS = st.lists(st.integers(0, 20), min_size=1, max_size=9)


def brute_force(costs: list[int], parts: int) -> int:
    return min(
        max(sum(costs[a:b]) for a, b in zip((0, *cuts), (*cuts, len(costs)), strict=True))
        for cuts in combinations(range(1, len(costs)), parts - 1)
    )


@given(COSTS, st.data())
def test_the_largest_part_is_smallest(costs: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    packs = balanced(costs, parts)
    assert len(packs) == parts
    assert [layer for pack in packs for layer in range(pack.first, pack.last + 1)] == list(range(len(costs)))
    assert max(sum(costs[pack.first : pack.last + 1]) for pack in packs) == brute_force(costs, parts)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=30), st.integers(1, 60))
def test_packs_keep_to_the_limit_or_are_single_layers(sizes: list[int], limit: int) -> None:
    def size(first: int, last: int) -> int:
        return sum(sizes[first : last + 1])

    packs = packs_within(Pack(0, len(sizes) - 1), limit, size)
    assert [layer for pack in packs for layer in range(pack.first, pack.last + 1)] == list(range(len(sizes)))
    for pack, following in pairwise(packs):
        assert size(pack.first, pack.last) <= limit or pack.first == pack.last
        assert size(pack.first, following.first) > limit


def test_packs_stay_inside_their_stage() -> None:
    assert packs_within(Pack(3, 6), 2, lambda first, last: last - first + 1) == (Pack(3, 4), Pack(5, 6))


@pytest.mark.parametrize("parts", [0, 9])
def test_more_stages_than_layers_are_refused(parts: int) -> None:
    with pytest.raises(ValueError, match=f"{parts} stages for 8 layers; ask for 1 to 8"):
        balanced((1,) * 8, parts)


def test_a_thousand_layers_take_no_time() -> None:
    assert len(balanced([(i * 7919) % 97 + 1 for i in range(1000)], 64)) == 64
