"""A question to the planner -> its Decision, found in a process of its own.

Trying plans leaves tens of megabytes behind that a Python process does not give back, and whoever plans under a budget
is about to need every one of them. Question and answer pass as JSON.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from counterpoint.core.errors import BudgetError, ExecutionError
from counterpoint.core.files import from_json, to_json
from counterpoint.core.machine import Machine
from counterpoint.core.plan import Plan
from counterpoint.core.profile import Profile
from counterpoint.planner.decision import Decision, decide
from counterpoint.planner.decision_devices import decide_for_devices, with_flush_steps
from counterpoint.planner.search import Freedom

_LAST_WORDS = 2000


@dataclass(frozen=True, slots=True)
class Question:
    """Which plan is best, if none is given; `replicas` and the first steps by flush are for several devices."""

    profile: Profile
    machine: Machine
    freedom: Freedom
    plan: Plan | None = None
    replicas: int | None = None
    flush_steps: int = 0

    def answer(self) -> Decision:
        if len(self.machine.devices) == 1:
            return decide(self.profile, self.machine, self.freedom, self.plan)
        found = decide_for_devices(self.profile, self.machine, self.freedom, self.plan, self.replicas)
        return with_flush_steps(found, self.flush_steps)


def decide_apart(question: Question) -> Decision:
    """Raises what the answer raises: BudgetError, ValueError."""
    package = str(Path(__file__).parents[2])  # last, and the present folder not at all: nothing may hide a module
    script = f"import sys; sys.path.append({package!r}); from counterpoint.planner.apart import main; main()"
    found = subprocess.run(
        [sys.executable, "-P", "-c", script],
        input=json.dumps(to_json(question)),
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        raise ExecutionError(
            f"the process that plans ended with code {found.returncode}: {found.stderr[-_LAST_WORDS:].strip()}"
        )
    data = json.loads(found.stdout)
    if "budget" in data:
        raise BudgetError(data["budget"], data["smallest_bytes"])
    if "value" in data:
        raise ValueError(data["value"])
    return Decision.from_json(data)


def _answered(data: Any) -> Any:
    try:
        return from_json(Question, data, "the question").answer().to_json()
    except BudgetError as error:
        return {"budget": str(error), "smallest_bytes": error.smallest_bytes}
    except ValueError as error:
        return {"value": str(error)}


def main() -> None:
    """Answer the question on standard input."""
    json.dump(_answered(json.load(sys.stdin)), sys.stdout)
