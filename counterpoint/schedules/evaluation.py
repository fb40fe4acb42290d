"""Plan -> Program: a forward pass alone, pack by pack on all microbatches; nothing is kept and nothing is updated.

It is all prologue: a run of it leaves everything at home, and the next one begins there.

>>> from counterpoint.core import outline, plan
>>> packs = plan.equal_packs(4, 2)
>>> chosen = plan.Plan("harmony", 2, 1, packs, packs[:-1], ("recompute",) * 2)
>>> [(t.first, t.last, t.microbatch) for t in write(chosen, outline.chain_outline(4), 2).devices[0].prologue]
[(0, 1, 0), (0, 1, 1), (2, 3, 0), (2, 3, 1)]
"""

from counterpoint.core.outline import Outline
from counterpoint.core.plan import Plan
from counterpoint.core.program import DeviceProgram, Program
from counterpoint.core.task import Forward


def write(plan: Plan, outline: Outline, num_microbatches: int) -> Program:
    """One device; the plan's forward packs, and the last backward pack where it is fused."""
    packs = (*plan.forward_packs, plan.backward_packs[-1]) if plan.fused else plan.forward_packs
    tasks = tuple(Forward(pack.first, pack.last, k, 0) for pack in packs for k in range(num_microbatches))
    return Program(outline, num_microbatches, (DeviceProgram(tasks, (), ()),))
