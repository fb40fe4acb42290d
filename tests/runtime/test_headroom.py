"""When free pages go back: before the limit would be passed, or when the process has outgrown what was foreseen."""

import pytest

from counterpoint.core.task import saved
from counterpoint.runtime import headroom as subject
from counterpoint.runtime.headroom import Headroom
from counterpoint.runtime.memory import Pool

BASE, LIVE = 100, 200


class Process:
    """So much is resident, and so much would be left by a cut of the heap."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, resident: int) -> None:
        self.resident, self.cuts = resident, 0
        monkeypatch.setattr(subject, "resident_bytes", lambda: self.resident)
        monkeypatch.setattr(subject, "trim", self.trim)

    def trim(self) -> bool:
        self.resident, self.cuts = BASE + LIVE, self.cuts + 1
        return True


@pytest.mark.parametrize(("limit", "cuts"), [(1000, 0), (999, 1)])
def test_near_its_limit_all_of_a_computation_counts_as_new(
    limit: int, cuts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(monkeypatch, 700)
    Headroom(Pool(0), BASE, limit, lambda task: 0).compute(300, 0, 0, LIVE)  # 400 bytes of the heap are free
    assert process.cuts == cuts


@pytest.mark.parametrize(("target", "cuts"), [(700, 0), (699, 1)])
def test_far_below_it_only_what_has_outgrown_its_target_is_cut_back(
    target: int, cuts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(monkeypatch, 700)
    headroom = Headroom(Pool(0), BASE, 10_000, lambda task: 0, target)
    headroom.compute(300, 0, 0, LIVE)
    assert process.cuts == cuts
    headroom.load(saved(0, 0), 300)  # beside a computation only the limit counts
    assert process.cuts == cuts


def test_what_outgrows_its_target_within_a_computation_is_cut_back_between_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Process(monkeypatch, 500)
    headroom = Headroom(Pool(0), BASE, 10_000, lambda task: 0, 700)
    headroom.compute(200, 0, 0, LIVE)
    process.resident = 700
    headroom.relieve()
    assert process.cuts == 0
    process.resident = 701
    headroom.relieve()
    assert process.cuts == 1


def test_what_does_not_come_from_free_pages_counts_against_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, 700)
    headroom = Headroom(Pool(0), BASE, 10_000, lambda task: 0, 800)
    headroom.compute(500, 0, 0, LIVE)
    assert process.cuts == 0
    headroom.compute(501, 0, 0, LIVE)
    assert process.cuts == 1


def test_what_is_under_way_counts_though_it_is_not_resident_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, 700)
    headroom = Headroom(Pool(0), BASE, 850, lambda task: 0)
    headroom.load(saved(0, 0), 100)
    headroom.compute(51, 0, 0, LIVE)
    assert process.cuts == 1
    headroom.landed(saved(0, 0))
    process.resident, process.cuts = 800, 0
    headroom.compute(50, 0, 0, LIVE)
    assert process.cuts == 0


def test_a_value_from_a_peer_comes_into_free_pages_that_nobody_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    process = Process(monkeypatch, 700)
    headroom = Headroom(Pool(0), BASE, 1000, lambda task: 0)
    headroom.compute(300, 0, 0, LIVE)  # 400 bytes of the heap are free, the computation takes 300 of them
    headroom.receive(saved(0, 0), 100)
    assert process.cuts == 0
    headroom.receive(saved(0, 1), 1)  # which pass the limit with what the computation may need anew
    assert process.cuts == 1
