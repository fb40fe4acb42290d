"""Who waits for whom in a run."""

from counterpoint.core.edges import unrolled
from counterpoint.core.notation import dump_task
from counterpoint.core.slots import settle
from counterpoint.core.text import parse


def waits(text: str, steps: int = 1) -> dict[str, list[str]]:
    """For each task (of a run without repetitions) those it waits for."""
    run = unrolled(parse(text), steps)
    names = [dump_task(task) for task in run.tasks]
    return {names[i]: [names[p] for p in before] for i, before in enumerate(run.predecessors)}


SMALL = """\
layers 1
microbatches 1
budgets 99
device 0
body
  L w0@0 disk
  L k0@0 disk
  B0.m0@0/0 recompute
  E w0@0 disk
  U0@0
  E w0@1 disk
  D g0@0
  D w0@1
  L w0@1 disk
"""


def test_a_computation_waits_for_its_loads() -> None:
    assert "L w0@0 disk" in waits(SMALL)["B0.m0@0/0 recompute"]
    assert "L k0@0 disk" in waits(SMALL)["U0@0"]


def test_an_update_in_place_waits_for_those_that_still_read_the_old_weights() -> None:
    assert "E w0@0 disk" in waits(SMALL)["U0@0"]


def test_a_load_waits_for_its_home_copy_and_for_drops_before_it() -> None:
    assert {"E w0@1 disk", "D w0@1"} <= set(waits(SMALL)["L w0@1 disk"])


def test_a_drop_waits_for_readers() -> None:
    assert "E w0@1 disk" in waits(SMALL)["D w0@1"]
    assert "U0@0" in waits(SMALL)["D g0@0"]


def test_a_load_of_what_the_run_began_with_waits_for_nobody() -> None:
    assert waits(SMALL)["L w0@0 disk"] == []


def test_settled_order_respects_every_edge() -> None:
    run = unrolled(parse(SMALL), 1)
    settled = settle(run)
    position = {task: place for place, task in enumerate(settled.order)}
    assert sorted(settled.order) == list(range(len(run.tasks)))
    assert all(position[p] < position[task] for task, before in enumerate(run.predecessors) for p in before)


def test_an_update_on_the_host_waits_for_gradients_that_nobody_evicts() -> None:
    text = "layers 1\nmicrobatches 1\ndevice 0\nbody\n  B0.m0@0/0 recompute\n  U0@0 host\n"
    assert waits(text)["U0@0 host"] == ["B0.m0@0/0 recompute"]
    planned = text.replace("  U0", "  E g0@0 disk\n  U0")
    assert waits(planned)["U0@0 host"] == ["E g0@0 disk"]


def test_a_value_that_leaves_does_not_queue_behind_weights() -> None:
    leaving = """\
layers 2
values 0>1
microbatches 2
budgets 99
device 0
body
  E w0@0 disk
  F0.m0@0
  E a0.m0 disk
  F0.m1@0
  E a0.m1 disk
"""
    found = waits(leaving)
    assert "E w0@0 disk" not in found["E a0.m0 disk"]
    assert "E a0.m0 disk" in found["E a0.m1 disk"]
