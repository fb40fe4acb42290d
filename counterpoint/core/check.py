"""A program into everything that is wrong with it; nothing for a legal one."""

from collections.abc import Iterator
from itertools import chain

from counterpoint.core.check_gradients import gradient_failures
from counterpoint.core.check_meetings import meeting_failures
from counterpoint.core.check_order import order_failures
from counterpoint.core.check_residency import budget_failures, residency_failures
from counterpoint.core.check_shape import shape_failures
from counterpoint.core.costs import Costs
from counterpoint.core.errors import ProgramError
from counterpoint.core.examined import Examined, Failure, examine
from counterpoint.core.program import Program
from counterpoint.core.text import grid

__all__ = ["Failure", "check", "refuse"]

_SHOWN = 10


def check(program: Program, costs: Costs | None = None, steps: int = 3) -> tuple[Failure, ...]:
    """Every broken rule, each once, over a run of `steps` steps; budgets are checked where costs are given."""
    shape = tuple(shape_failures(program))
    if shape:
        return shape
    examined = examine(program, max(steps, program.epilogue_steps + 1))
    return tuple(dict.fromkeys(_rules(examined, costs)))


def _rules(examined: Examined, costs: Costs | None) -> Iterator[Failure]:
    yield from chain(order_failures(examined), residency_failures(examined), meeting_failures(examined))
    if None not in examined.settled.slots:
        yield from gradient_failures(examined)
    if costs is not None:
        yield from budget_failures(examined, costs)


def refuse(program: Program, costs: Costs | None = None, steps: int = 3) -> None:
    """Raise a ProgramError that lists the failures and shows where they are, if there are any."""
    failures = check(program, costs, steps)
    if not failures:
        return
    lines = [f"the program breaks {len(failures)} rule{'s' * (len(failures) > 1)}:"]
    lines += [f"  {failure}" for failure in failures[:_SHOWN]]
    if len(failures) > _SHOWN:
        lines.append(f"  and {len(failures) - _SHOWN} more")
    if not list(shape_failures(program)):
        mark = frozenset(failure.place for failure in failures[:_SHOWN] if failure.place)
        lines += ["", grid(program, program.epilogue_steps + 1, mark)]
    raise ProgramError("\n".join(lines))
