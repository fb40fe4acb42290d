"""Plan -> Program: one file per algorithm; `write_program` picks it and adds the transfers between devices."""

from counterpoint.core.outline import Outline
from counterpoint.core.plan import Plan
from counterpoint.core.program import Program
from counterpoint.passes.transfers import transfers
from counterpoint.schedules import flush, gpipe, harmony, harmony_pp, model_parallel, plain, two_bw

_WRITERS = {
    "plain": plain.write,
    "model_parallel": model_parallel.write,
    "harmony": harmony.write,
    "harmony_pp": harmony_pp.write,
    "gpipe": gpipe.write,
    "flush": flush.write,
    "2bw": two_bw.write,
}


def write_program(plan: Plan, outline: Outline) -> Program:
    """The compute order of every device with its sends and receives; loads, evicts and drops are yet to come."""
    return transfers(_WRITERS[plan.schedule](plan, outline))
