"""The words about what a device waited for when it heard of a loss."""

from counterpoint.core.task import Buffer, Forward, Receive
from counterpoint.runtime.awaited import Awaited


def test_the_caller_comes_first_and_each_thing_is_said_once() -> None:
    awaited = Awaited(3)
    receive = Receive(Buffer("activation", 1, 0), 2)
    awaited.by_caller = receive
    awaited.by_lane = {"receive 2": receive, "receive 1": Receive(Buffer("activation", 1, 4), 1)}
    awaited.ask(2, "the losses")
    assert awaited.text() == "; device 3 was waiting for R a1.m0 <2, R a1.m4 <1, the losses"


def test_who_waits_for_nothing_says_how_far_it_came() -> None:
    awaited = Awaited(0)
    assert awaited.text() == ""
    awaited.computed = Forward(0, 2, 1, 2)
    assert awaited.text() == "; device 0 had come to F0-2.m1@2"
