"""A program unrolled for inspection, with the place of each task in it; and what was found wrong there."""

from dataclasses import dataclass, field

from counterpoint.core.edges import Run, unrolled
from counterpoint.core.notation import dump_buffer, dump_task
from counterpoint.core.program import Program
from counterpoint.core.slots import Settled, settle
from counterpoint.core.task import Buffer, Task, shift_buffer
from counterpoint.core.text import Place, places


@dataclass(frozen=True, slots=True)
class Failure:
    """A broken rule; `place` is the task that breaks it, None where something is missing from the whole program.

    Numbers are those of the program's own text. `bodies` came before it first showed, `because` is how it came
    about; repetitions in later bodies are equal to it.
    """

    text: str
    place: Place | None = None
    bodies: int = field(default=0, compare=False)
    because: str = field(default="", compare=False)

    def __str__(self) -> str:
        late = self.place is not None and self.place[1] == "body" and self.bodies
        because = f" ({self.because})" if self.because else ""
        return self.text + because + (f", from step {self.bodies} on" if late else "")


@dataclass(frozen=True, slots=True)
class Examined:
    """`bodies` counts for each task the bodies before it: its numbers are shifted by as many steps."""

    program: Program
    steps: int
    run: Run
    places: list[Place]
    bodies: list[int]
    settled: Settled

    def failure(self, index: int, text: str, because: str = "") -> Failure:
        return Failure(f"{self.where(index)}: {text}", self.places[index], self.bodies[index], because)

    def where(self, index: int) -> str:
        """The task as the program's own text shows it."""
        device, section, position = self.places[index]
        return f"device {device}, {section} {position} ({dump_task(self.task(index))})"

    def task(self, index: int) -> Task:
        """The task with the numbers it has in the program."""
        device, section, position = self.places[index]
        tasks: tuple[Task, ...] = getattr(self.program.devices[device], section)
        return tasks[position]

    def name(self, index: int, buffer: Buffer) -> str:
        """A buffer with the number it has in the part of the program that the task is in."""
        return dump_buffer(shift_buffer(buffer, -self.bodies[index], self.program.num_microbatches))


def examine(program: Program, steps: int) -> Examined:
    run = unrolled(program, steps)
    stood = places(program, steps)
    return Examined(program, steps, run, [p for p, _ in stood], [b for _, b in stood], settle(run))
