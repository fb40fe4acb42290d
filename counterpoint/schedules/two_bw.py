"""Plan -> Program: PipeDream-2BW, 1F1B without flushes on two weight versions (ICML 2021, section 3.1).

Minibatch t runs on the weights of t - 1 updates and updates the newest: W(t+1) = W(t) - Opt(grad at W(t-1)). Stage s
runs q = d - 1 - s forwards ahead, then pairs: the forward of microbatch k + q and the backward of microbatch k.

W(t+1) is first needed by minibatch t + 2, that is m - q pairs after a stage has finished minibatch t. Whatever an
update waits for (clipping, replicas, tied layers on other stages) fits into that slack: the body then begins m - q
pairs into a minibatch, and the update of t stands at its end, after m - q pairs of t + 1.

>>> from counterpoint.core import outline, plan, text
>>> from counterpoint.schedules import write_program
>>> stages = plan.equal_packs(4, 1)
>>> chosen = plan.Plan("2bw", 4, 1, stages, stages, ("recompute",) * 4, num_devices=4, stages=stages)
>>> print(text.grid(write_program(chosen, outline.chain_outline(4)), steps=2))
0 | F0  F1  F2  F3              B0  F4  B1  F5  B2  F6  B3* F7  B4      B5      B6      B7*
1 |     F0  F1  F2          B0  F3  B1  F4  B2  F5  B3* F6  B4  F7  B5      B6      B7*
2 |         F0  F1      B0  F2  B1  F3  B2  F4  B3* F5  B4  F6  B5  F7  B6      B7*
3 |             F0  B0  F1  B1  F2  B2  F3  B3* F4  B4  F5  B5  F6  B6  F7  B7*
"""

from counterpoint.core.outline import Outline
from counterpoint.core.plan import Plan
from counterpoint.core.program import DeviceProgram, Program
from counterpoint.core.task import Task
from counterpoint.schedules.finish import norm_all, reduce_packs, reduce_shared, settle, update_all
from counterpoint.schedules.pieces import backwards, common_units, forwards
from counterpoint.schedules.places import Place, stage_places


def write(plan: Plan, outline: Outline) -> Program:
    units = common_units(plan)
    places = stage_places(plan, outline, delay=1)
    _refuse_bubbles(plan, units)
    waits = plan.clipping or plan.num_replicas > 1 or any(place.shared for place in places)
    devices = []
    for place in places:
        ahead = len(plan.stages) - 1 - place.position
        devices.append(_delayed(place, units, ahead, place.position) if waits else _at_once(place, units, ahead))
    return Program(outline, plan.num_microbatches * plan.num_replicas, tuple(devices), epilogue_steps=1)


def _refuse_bubbles(plan: Plan, units: int) -> None:
    depth = len(plan.stages)
    if units < depth - 1:
        groups = f"groups of {plan.forward_group} " if plan.forward_group > 1 else ""
        raise ValueError(
            f"m = {units} {groups}microbatches cannot feed {depth} stages without bubbles: "
            f"2bw needs at least {depth - 1}; use flush or more microbatches"
        )


def _at_once(place: Place, units: int, ahead: int) -> DeviceProgram:
    """The update of a pack follows its last backward."""
    fill = tuple(task for unit in range(ahead) for task in forwards(place, unit))
    pairs, last = range(units - 1), units - 1
    body = _pairs(place, pairs, ahead) + forwards(place, last + ahead) + backwards(place, last, settle)
    drain = [task for unit in pairs for task in _pair(place, unit, ahead, units)]
    drain += (forwards(place, last) if not ahead else []) + backwards(place, last, settle)
    return DeviceProgram(fill, tuple(body), tuple(drain))


def _delayed(place: Place, units: int, ahead: int, stage: int) -> DeviceProgram:
    """The update of a step comes as late as its weights allow, `units - ahead` pairs after the last gradient.

    Tied layers are reduced `stage` pairs after it: that is when stage 0 has its last gradient too, or later.
    """
    offset = units - ahead
    reduced, shared = reduce_packs(place, 0), reduce_shared(place, 0)
    exchanged = units + (stage if shared else 0)
    normed = max(exchanged, units + (offset // 2 if reduced or shared else 0))
    norms, finish = norm_all(place, 0), update_all(place, 0)
    fill = [task for unit in range(ahead) for task in forwards(place, unit)] + _pairs(place, range(offset), ahead)
    body = _pairs(place, range(offset, units), ahead) + reduced
    body += _pairs(place, range(units, exchanged), ahead) + shared
    body += _pairs(place, range(exchanged, normed), ahead) + norms
    body += _pairs(place, range(normed, units + offset), ahead) + finish
    drain = [task for unit in range(offset, units) for task in backwards(place, unit)]
    return DeviceProgram(tuple(fill), tuple(body), (*drain, *reduced, *shared, *norms, *finish))


def _pairs(place: Place, backward_units: range, ahead: int) -> list[Task]:
    return [task for unit in backward_units for task in forwards(place, unit + ahead) + backwards(place, unit)]


def _pair(place: Place, unit: int, ahead: int, units: int) -> list[Task]:
    """A pair of the last step: there is no minibatch to look ahead to."""
    return (forwards(place, unit + ahead) if unit + ahead < units else []) + backwards(place, unit)
