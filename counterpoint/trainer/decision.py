"""A profile and a memory budget -> what the planner decides for this machine; or the smallest budget that would do."""

from counterpoint.core.costs import Costs
from counterpoint.core.errors import BudgetError
from counterpoint.core.plan import Plan
from counterpoint.core.profile import Profile
from counterpoint.core.units import format_bytes
from counterpoint.passes.residency import smallest_budgets
from counterpoint.planner.apart import Question, decide_apart
from counterpoint.planner.decision import Decision
from counterpoint.planner.search import Freedom
from counterpoint.schedules import write_program
from counterpoint.trainer.this_machine import Surroundings, this_machine

_MARGIN_PERCENT, MARGIN_BYTES = 4, 48 << 20  # for what an allocator keeps beyond what is asked of it
_SLACK_BYTES = 32 << 20  # by which the process itself may differ from one start to the next


def margin_bytes(memory_bytes: int) -> int:
    """The part of the memory which is not planned with."""
    return max(MARGIN_BYTES, memory_bytes * _MARGIN_PERCENT // 100)


def usable_bytes(memory_bytes: int, base_bytes: int) -> int:
    """What programs may use of the memory that is given."""
    return max(1, memory_bytes - base_bytes - margin_bytes(memory_bytes))


def memory_with(usable_bytes: int, base_bytes: int) -> int:
    """The memory of which programs may use so much."""
    live = usable_bytes + base_bytes
    return max(live + MARGIN_BYTES, live * 100 // (100 - _MARGIN_PERCENT))


def decide_alone(
    profile: Profile,
    memory_bytes: int,
    base_bytes: int,
    model_bytes: int,
    around: Surroundings,
    freedom: Freedom,
    plan: Plan | None,
) -> Decision:
    """For one device; `model_bytes` of the base are the user's own weights."""
    machine = this_machine(usable_bytes(memory_bytes, base_bytes), around)
    try:
        return decide_apart(Question(profile, machine, freedom, plan))
    except BudgetError as error:
        raise _too_small(profile, memory_bytes, base_bytes, model_bytes, plan, error) from error


def _too_small(
    profile: Profile, memory_bytes: int, base_bytes: int, model_bytes: int, plan: Plan | None, error: BudgetError
) -> BudgetError:
    """The same error in terms of the memory that the user gives."""
    smallest = error.smallest_bytes
    if smallest is None and plan is not None:
        smallest = smallest_budgets(write_program(plan, profile.outline()), Costs(profile, plan))[0]
    if smallest is None:
        return error
    needed = -(-memory_with(smallest, base_bytes + _SLACK_BYTES) // 2**20) * 2**20
    own = (
        f" ({format_bytes(model_bytes)} of it the model's weights: build it on the meta device)" if model_bytes else ""
    )
    return BudgetError(
        f"{format_bytes(memory_bytes)} of memory cannot train this model: the process itself takes "
        f"{format_bytes(base_bytes)}{own}, and no plan fits into the rest; the smallest memory that works is "
        f"{needed >> 20}MiB",
        needed,
    )
