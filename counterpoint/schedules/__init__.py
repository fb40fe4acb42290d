"""Plan -> Program: one file per algorithm; `write_program` picks it and adds the transfers between devices."""

from counterpoint.core.costs import Costs
from counterpoint.core.outline import Outline
from counterpoint.core.plan import Plan
from counterpoint.core.program import Program
from counterpoint.passes.ranks import equal_layers
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


def write_program(plan: Plan, outline: Outline, costs: Costs | None = None) -> Program:
    """The compute order of every device with its sends and receives; loads, evicts and drops are yet to come.

    With costs, receives are placed by how long computations really take.
    """
    duration = equal_layers if costs is None else costs.duration_ns
    return transfers(_WRITERS[plan.schedule](plan, outline), duration)
