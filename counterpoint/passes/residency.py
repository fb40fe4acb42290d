"""Program -> Program: what is in device memory when, for any schedule, within a budget per device."""

from collections import defaultdict
from collections.abc import Sequence

from counterpoint.core.collector import collector_paused
from counterpoint.core.costs import Costs
from counterpoint.core.errors import BudgetError
from counterpoint.core.homes import Homes
from counterpoint.core.program import DeviceProgram, Program, renames, unroll
from counterpoint.core.task import Backward, Buffer, Forward, Task, shift, shift_buffer
from counterpoint.core.units import format_bytes
from counterpoint.passes.emit import Emitter, Placed
from counterpoint.passes.gaps import body_of
from counterpoint.passes.ladder import choose
from counterpoint.passes.lives import Life, canonical, collect, device_reads, device_writes, mark_shared
from counterpoint.passes.walk import Walk

RESIDENCIES = ("planned", "lru")


def place(
    program: Program,
    costs: Costs,
    budgets: Sequence[int],
    homes: Homes,
    policy: str = "planned",
    pinned: frozenset[int] = frozenset(),
    ahead: int = 0,
    quick: bool = False,
    writes_clean: bool = False,
) -> Program:
    """Insert loads, evicts and drops so that every device keeps to its budget.

    `planned` looks ahead over the cyclic body and keeps what fits across steps; `lru` loads on demand and evicts the
    least recently used, the virtualized-memory baseline (`writes_clean`: also when it is clean). `pinned` layers keep
    their saved tensors on the device. With `ahead` 0, least is moved, and loads come early where there is room. With
    more, each load and evict has room beside so many computations, at the price of what could have stayed there: only
    a simulation can tell which is faster. `quick` chooses with less care. Raises BudgetError with the smallest budget
    that would do.
    """
    if policy not in RESIDENCIES:
        raise ValueError(f"unknown residency policy {policy!r}; known are {', '.join(RESIDENCIES)}")
    if len(budgets) != len(program.devices):
        raise ValueError(f"{len(program.devices)} devices need as many budgets, not {len(budgets)}")
    refuse_small_budgets(program, costs, budgets, pinned if policy == "planned" else frozenset())
    with collector_paused():
        lives = _lives(program, costs)
        placers = [_DevicePlacer(program, d, costs, budgets[d], homes, lives[d]) for d in range(len(lives))]
        if policy == "planned":
            parts = [placer.planned(pinned, ahead, quick) for placer in placers]
        else:
            parts = [placer.on_demand(writes_clean) for placer in placers]
    return Program(program.outline, program.num_microbatches, tuple(parts), program.epilogue_steps, tuple(budgets))


def smallest_budgets(program: Program, costs: Costs, pinned: frozenset[int] = frozenset()) -> tuple[int, ...]:
    """The least memory of each device with which any placement exists: its most demanding task, and what is pinned."""
    needs = _Needs(program, costs)
    parts = ((*part.prologue, *part.body, *part.epilogue) for part in program.devices)
    found = [max(map(needs.of, tasks), default=0) for tasks in parts]
    if not pinned:
        return tuple(found)
    bodies = [body_of(program, d, costs, lives, pinned, 0) for d, lives in enumerate(_lives(program, costs))]
    return tuple(max(need, *body.needs, 0) for need, body in zip(found, bodies, strict=True))


def task_needs(program: Program, costs: Costs, device: int) -> tuple[tuple[Task, int], ...]:
    """The memory that each computation of a step needs at once, whatever else is there."""
    needs = _Needs(program, costs)
    return tuple((task, needs.of(task)) for task in program.devices[device].body)


def refuse_small_budgets(
    program: Program, costs: Costs, budgets: Sequence[int], pinned: frozenset[int] = frozenset()
) -> None:
    least = smallest_budgets(program, costs, pinned)
    advice = "; let activations be evicted or recomputed instead of kept" if pinned else ""
    short = [
        f"no plan fits device {device} (need {format_bytes(need)}, budget {format_bytes(budget)}); "
        f"smallest budget that fits: {need} bytes ({format_bytes(need)}){advice}"
        for device, (need, budget) in enumerate(zip(least, budgets, strict=True))
        if need > budget
    ]
    if short:
        raise BudgetError("\n".join(short), max(least))


def _lives(program: Program, costs: Costs) -> list[dict[Buffer, Life]]:
    lives = [collect(program, device, costs) for device in range(len(program.devices))]
    mark_shared(program, lives)
    return lives


class _Needs:
    """Memory that tasks need at once, remembered per pack: it does not depend on the microbatch."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.outline, self.costs = program.outline, costs
        self.known: dict[tuple[object, ...], int] = {}

    def of(self, task: Task) -> int:
        match task:
            case Forward(first, last, _, _, saves, stashes, count, old):
                key: tuple[object, ...] = (first, last, saves, stashes, count, old)
            case Backward(first, last, _, _, _, recompute, count, old):
                key = (first, last, recompute, count, old)
            case _:
                return self._count(task)
        if key not in self.known:
            self.known[key] = self._count(task)
        return self.known[key]

    def _count(self, task: Task) -> int:
        touched = dict.fromkeys((*device_reads(task, self.outline), *device_writes(task, self.outline)))
        for _, new in renames(task, self.outline):
            touched.pop(new, None)
        return sum(map(self.costs.buffer_bytes, touched)) + self.costs.workspace_bytes(task)


class _DevicePlacer:
    """Places one device's list."""

    def __init__(
        self, program: Program, device: int, costs: Costs, budget: int, homes: Homes, lives: dict[Buffer, Life]
    ) -> None:
        self.program, self.device, self.costs, self.budget = program, device, costs, budget
        self.homes, self.lives = homes, lives
        self.part = program.devices[device]
        self.m = program.num_microbatches

    def planned(self, pinned: frozenset[int], ahead: int, quick: bool) -> DeviceProgram:
        placed = self._planned_body(pinned, ahead, quick)
        return self._with_ends(placed, look_ahead=True)

    def _planned_body(self, pinned: frozenset[int], ahead: int, quick: bool) -> Placed:
        if not self.part.body:
            return Placed((), {})
        body = body_of(self.program, self.device, self.costs, self.lives, pinned, ahead)
        choose(body, self.budget, quick)
        return Emitter(self.program, self.device, self.costs, self.lives, body).place(self.budget, self.homes)

    def on_demand(self, writes_clean: bool) -> DeviceProgram:
        """Walk body after body until what is resident at its end repeats; force it if it never does."""
        steps = 6
        tasks = list(unroll(self.program, self.device, steps + self.program.epilogue_steps))
        walk = self._walk(tasks, steps + self.program.epilogue_steps, False, writes_clean)
        position = len(self.part.prologue)
        for index in range(position):
            walk.run(index, tasks[index])
        before = self._state(walk, 0)
        for step in range(steps):
            mark = len(walk.out)
            for index in range(position, position + len(self.part.body)):
                walk.run(index, tasks[index])
            position += len(self.part.body)
            if step == steps - 1:
                walk.settle({self._shifted(b, 1 + step): not dirty for b, dirty in before.items()})
            after = self._state(walk, step + 1)
            if list(after.items()) == list(before.items()) or step == steps - 1:
                break
            before = after
        body = tuple(shift(task, -step, self.m) for task in walk.out[mark:])
        placed = Placed(body, {buffer: not dirty for buffer, dirty in before.items()})
        return self._with_ends(placed, look_ahead=False, writes_clean=writes_clean)

    def _state(self, walk: Walk, step: int) -> dict[Buffer, bool]:
        return {self._shifted(buffer, -step): dirty for buffer, dirty in walk.resident.items()}

    def _shifted(self, buffer: Buffer, steps: int) -> Buffer:
        return shift_buffer(buffer, steps, self.m)

    def _walk(self, tasks: list[Task], num_steps: int, look_ahead: bool, writes_clean: bool) -> Walk:
        """A walk that knows from `tasks` when buffers are used last; the last weights are never forgotten."""
        uses: defaultdict[Buffer, list[int]] = defaultdict(list)
        for index, task in enumerate(tasks):
            for buffer in (*device_reads(task, self.program.outline), *device_writes(task, self.program.outline)):
                uses[buffer].append(index)
        last_use = {
            buffer: len(tasks) if _persists(buffer, num_steps) else indices[-1] for buffer, indices in uses.items()
        }
        for indices in uses.values():
            indices.reverse()
        return Walk(
            self.program.outline,
            self.costs,
            self.budget,
            tier_of=lambda buffer: self.homes.of(self.device, buffer),
            is_shared=self._is_shared,
            last_use=last_use,
            next_uses=uses if look_ahead else None,
            writes_clean=writes_clean,
        )

    def _left_at_home(self, start: dict[Buffer, bool]) -> list[Buffer]:
        """What the epilogue touches of an earlier body's making that is not on the device when it begins."""
        touched = dict.fromkeys(
            buffer for task in self.part.epilogue for buffer in device_writes(task, self.program.outline)
        )
        return [buffer for buffer in touched if buffer not in start and self._born_before(buffer)]

    def _born_before(self, buffer: Buffer) -> bool:
        """Whether bodies before the epilogue make a buffer and do not drop it themselves."""
        base, ahead = canonical(buffer, self.m)
        life = self.lives.get(base)
        before = [touch for touch in life.touches if touch.time + ahead * len(self.part.body) < 0] if life else []
        return bool(before) and not before[-1].drops

    def _is_shared(self, buffer: Buffer) -> bool:
        life = self.lives.get(canonical(buffer, self.m)[0])
        return life is not None and life.shared

    def _with_ends(self, placed: Placed, look_ahead: bool, writes_clean: bool = False) -> DeviceProgram:
        """The prologue ends with what the body begins with; the epilogue begins so and leaves everything at home."""
        last = self.program.epilogue_steps
        tasks = list(unroll(self.program, self.device, last + 2)) if self.part.prologue else []
        walk = self._walk(tasks, last + 2, look_ahead, writes_clean)
        for index, task in enumerate(self.part.prologue):
            walk.run(index, task)
        walk.settle(placed.start)
        prologue = tuple(walk.out)
        walk = self._walk(list(self.part.epilogue), last, look_ahead, writes_clean)
        walk.enter((buffer, not at_home) for buffer, at_home in placed.start.items())
        walk.away.update(self._left_at_home(placed.start))
        for index, task in enumerate(self.part.epilogue):
            walk.run(index, task)
        walk.finish(lambda buffer: _persists(buffer, last))
        return DeviceProgram(prologue, placed.tasks, tuple(walk.out))


def _persists(buffer: Buffer, num_steps: int) -> bool:
    """Whether a buffer outlives a run of so many steps: constants, states and the two newest weight versions."""
    return buffer.kind == "constant" or (buffer.kind in ("weight", "old", "state") and buffer.number >= num_steps - 1)
