"""A problem into what training leaves of it: by a plain PyTorch loop, and by our runtime under a setting."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from counterpoint.core.check import refuse
from counterpoint.core.costs import Costs
from counterpoint.core.errors import BudgetError
from counterpoint.core.homes import single_home
from counterpoint.core.plan import Pack, Plan, equal_packs
from counterpoint.core.program import Program
from counterpoint.core.task import Evict, Load, Task, shift
from counterpoint.decomposer import Chain, chain_of_modules, decompose
from counterpoint.passes.residency import place, smallest_budgets
from counterpoint.planner.forecast import kept_layers
from counterpoint.profiler.measure import profile_of
from counterpoint.runtime.backend import CPU, backend_of
from counterpoint.runtime.compute import Compute, Step
from counterpoint.runtime.executor import Executor
from counterpoint.runtime.frame import Flat, Frame, frame_of
from counterpoint.runtime.home import home_sizes, unused_sizes
from counterpoint.runtime.home_update import HomeUpdate
from counterpoint.runtime.optimizer import UpdateRule
from counterpoint.runtime.store import Store
from counterpoint.schedules import write_program
from counterpoint.trainer.initial_weights import fill
from counterpoint.trainer.tiered_home import host_folder, open_tiers
from tests import where
from tests.home import read_parameters, read_states
from tests.small_models import Batch

DEVICE = where.device()
NUM_STEPS = 5
ALL_FITS = 1000.0
POOL_SLACK_BYTES = 1 << 20  # blocks: a buffer of a few bytes takes a page

States = dict[str, dict[str, Any]]


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)


def adamw(model: nn.Module) -> Optimizer:
    """Two groups, as everybody does it: no decay of vectors."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-3}], lr=1e-3)


@dataclass(frozen=True)
class Problem:
    """What is trained, apart from how: `loss` takes the model's output and the batch; without one the output has it."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any, Any], Tensor] | None = None
    optimizer: Callable[[nn.Module], Optimizer] = adamw
    schedule: Callable[[Optimizer], LRScheduler] | None = None
    max_grad_norm: float | None = None
    autocast: torch.dtype | None = None
    minibatch: int = 6
    listed: bool = False  # the model is an nn.Sequential that is given as a list of modules

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return self.build().train()

    def batches(self) -> list[Batch]:
        torch.manual_seed(2)
        return [self.batch(self.minibatch) for _ in range(NUM_STEPS)]

    def under_autocast(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.autocast is None else torch.autocast(DEVICE.type, self.autocast)


@dataclass(frozen=True)
class Setting:
    """How it is trained: `budget` is in units of the smallest that works, `pack` in layers.

    Several policies, with spaces between them, take turns; a forward pack joins `joined` backward packs. With `stows`
    what autograd keeps is moved into the pool.
    """

    policy: str = "recompute"
    pack: int = 1
    budget: float = 1.0
    microbatch: int = 2
    schedule: str = "harmony"
    residency: str = "planned"
    seed: int = 0
    host_layers: tuple[int, ...] = ()
    joined: int = 1
    stows: bool = False


@dataclass(frozen=True)
class Outcome:
    """What training leaves."""

    weights: Mapping[str, Tensor]
    states: States
    buffers: Mapping[str, Tensor]
    losses: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class Trained:
    """An outcome of our runtime, and what it moved; `body` holds the numbers of each step after the first."""

    outcome: Outcome
    program: Program
    costs: Costs
    store: Store
    moved: list[tuple[int, int]]


def train_plainly(problem: Problem, microbatch: int) -> Outcome:
    """The loop that everybody writes."""
    model = problem.model().to(DEVICE)
    optimizer = problem.optimizer(model)
    schedule = problem.schedule(optimizer) if problem.schedule else None
    losses = []
    for batch in problem.batches():
        losses.append([])
        for part in split({name: tensor.to(DEVICE) for name, tensor in batch.items()}, microbatch):
            with problem.under_autocast():
                loss = _loss(problem, model, part)
            losses[-1].append(loss.item())
            (loss / (problem.minibatch // microbatch)).backward()
        if problem.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), problem.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if schedule:
            schedule.step()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states = {names[id(parameter)]: dict(state) for parameter, state in optimizer.state.items()}
    return Outcome({n: p.detach() for n, p in model.named_parameters()}, states, dict(model.named_buffers()), losses)


def _loss(problem: Problem, model: nn.Module, part: Batch) -> Tensor:
    if problem.loss is None:
        loss: Tensor = model(**part).loss
        return loss
    inputs = [tensor.clone() for name, tensor in part.items() if problem.listed or name in _arguments(model)]
    return problem.loss(model(*inputs[: 1 if problem.listed else None]), part)


def _arguments(model: nn.Module) -> tuple[str, ...]:
    return model.forward.__code__.co_varnames[: model.forward.__code__.co_argcount]


def split(batch: Batch, size: int) -> Iterator[Batch]:
    total = next(iter(batch.values())).shape[0]
    for start in range(0, total, size):
        yield {name: tensor[start : start + size] for name, tensor in batch.items()}


def train(problem: Problem, setting: Setting, folder: Path) -> Trained:
    """Our runtime, with the budget of the device given by hand: these models are small beside the process itself."""
    model = problem.model()
    optimizer = problem.optimizer(model)
    schedule = problem.schedule(optimizer) if problem.schedule else None
    chain, frame = _decomposed(problem)
    named = model.named_parameters(remove_duplicate=False)
    rule = UpdateRule(optimizer, {id(p): chain.aliases.get(n, n) for n, p in named})
    states = _states(frame, rule)
    plan = plan_of(frame.num_layers, setting, problem)
    backend = backend_of(DEVICE)
    profile = profile_of(frame, states, rule, (setting.microbatch,), "tiny", autocast=problem.autocast, backend=backend)
    costs = Costs(profile, plan)
    program = placed(write_program(plan, frame.outline), costs, plan, setting)
    refuse(program, costs)
    with contextlib.ExitStack() as stack:
        sizes = {**home_sizes(frame, states), **unused_sizes(chain)}
        host_bytes = 0 if backend.is_process else sum(sizes.values()) // 2
        disk = open_tiers(stack, folder, sizes, backend, host_folder(stack, host_bytes), host_bytes)
        pool = backend.pool(max(program.budgets) + POOL_SLACK_BYTES)
        store = Store(frame, states, disk, pool, plan.num_microbatches, backend=backend)
        buffers = fill(store, model, None, setting.seed)
        compute = Compute(
            frame, store, rule, buffers, plan.num_microbatches, setting.seed, problem.autocast, problem.max_grad_norm
        )
        compute.makings = profile.makings(setting.microbatch)
        compute.updates.home = HomeUpdate(store, rule) if plan.host_layers else None
        executor = Executor(store, compute, costs)
        executor.outside.stows = setting.stows
        losses, moved = _run(program, executor, problem, setting, schedule)
        return Trained(_outcome(store, rule, buffers, losses), program, costs, store, moved)


_chains: dict[object, tuple[Chain, Frame]] = {}


def _decomposed(problem: Problem) -> tuple[Chain, Frame]:
    """Once per model: tracing takes seconds."""
    key = (problem.build, problem.batch, problem.loss, problem.autocast, problem.listed)
    if key not in _chains:
        with CPU.autocast(problem.autocast):
            example = next(split(problem.batches()[0], 2))
            model = problem.model()
            if problem.listed:
                chain = chain_of_modules(list(model.children()), example, loss=problem.loss)
            else:
                chain = decompose(model, example, loss=problem.loss, device=DEVICE)
        _chains[key] = chain, frame_of(chain)
    return _chains[key]


def plan_of(num_layers: int, setting: Setting, problem: Problem) -> Plan:
    """Packs of one size; under harmony the last layer is a pack by itself and runs forward and backward in one."""
    fused = setting.schedule == "harmony" and num_layers > 1
    packs = equal_packs(num_layers - fused, setting.pack)
    policies = setting.policy.split()
    return Plan(
        setting.schedule,
        problem.minibatch // setting.microbatch,
        setting.microbatch,
        (*packs, Pack(num_layers - 1, num_layers - 1)) if fused else packs,
        equal_packs(num_layers - fused, setting.pack * setting.joined),
        tuple(policies[index % len(policies)] for index in range(len(packs))) + ("recompute",) * fused,
        host_layers=tuple(layer for layer in setting.host_layers if layer < num_layers),
        clipping=problem.max_grad_norm is not None,
        residency=setting.residency,
    )


def placed(program: Program, costs: Costs, plan: Plan, setting: Setting) -> Program:
    """Kept activations need more than the most demanding task: the budget grows until they fit."""
    homes = single_home("disk", 1, plan.num_layers)
    budget = int(smallest_budgets(program, costs)[0] * setting.budget)
    while True:
        try:
            return place(program, costs, (budget,), homes, plan.residency, kept_layers(plan), quick=True)
        except BudgetError:
            if "keep" not in setting.policy:
                raise
            budget += budget // 8


def _states(frame: Frame, rule: UpdateRule) -> tuple[Flat, ...]:
    return tuple(
        Flat.of(
            (f"{slot.name}\0{tensor.key}", tensor.shape, tensor.dtype)
            for slot in weights.slots
            if slot.name in rule.group_of
            for tensor in rule.state_tensors(slot.name, slot.shape, slot.dtype)
        )
        for weights in frame.weights
    )


def _run(
    program: Program, executor: Executor, problem: Problem, setting: Setting, schedule: LRScheduler | None
) -> tuple[list[list[float]], list[tuple[int, int]]]:
    compute, chain, m = executor.compute, executor.compute.chain, program.num_microbatches
    part = program.devices[0]
    losses, moved = [], []
    try:
        executor.run(part.prologue, 0)
        for number, batch in enumerate(problem.batches()):
            here = {name: tensor.to(DEVICE) for name, tensor in batch.items()}
            compute.steps[number] = Step(number, [chain.bind(piece) for piece in split(here, setting.microbatch)])
            executor.run((shift(task, number, m) for task in part.body), number)
            executor.drain()
            moved.append((executor.store.counters.loaded_bytes, executor.store.counters.evicted_bytes))
            found = compute.steps[number].losses
            losses.append([found[key].item() for key in sorted(found)])
            if schedule:
                schedule.optimizer._opt_called = True  # as the trainer does, for torch to see a step
                schedule.step()
        executor.run((shift(task, NUM_STEPS, m) for task in part.epilogue), NUM_STEPS)
        executor.drain()
    finally:
        executor.close()
    return losses, moved


def _outcome(store: Store, rule: UpdateRule, buffers: dict[str, Tensor], losses: list[list[float]]) -> Outcome:
    states: States = {name: dict(scalars) for name, scalars in rule.scalars.items()}
    for name, tensors in read_states(store).items():
        states.setdefault(name, {}).update(tensors)
    return Outcome(read_parameters(store), states, buffers, losses)


def differences(found: Outcome, expected: Outcome) -> list[str]:
    """What is not the same bit for bit, by name; parameters that no layer uses are not ours to keep."""
    missing = expected.weights.keys() - found.weights.keys()
    problems = [
        f"weight {n}" for n, w in expected.weights.items() if n not in missing and not same(w, found.weights[n])
    ]
    problems += [f"buffer {n}" for n, b in expected.buffers.items() if not same(b, found.buffers[n])]
    for name, state in expected.states.items():
        problems += [
            f"state {key} of {name}" for key, value in state.items() if not same(value, found.states[name].get(key))
        ]
    problems += [f"state of {name}" for name in found.states if name not in expected.states]
    return problems + ["losses"] * (found.losses != expected.losses)


def same(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())
    return type(a) is type(b) and a == b


def largest_difference(found: Outcome, expected: Outcome) -> float:
    return max(
        float((found.weights[name].cpu() - weight.cpu()).abs().max()) for name, weight in expected.weights.items()
    )


def transfers(tasks: tuple[Task, ...]) -> list[Load | Evict]:
    return [task for task in tasks if isinstance(task, Load | Evict)]
