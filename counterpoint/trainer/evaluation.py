"""A trainer's chain and plan -> the mean loss of a batch, through the same store and executor as the training."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from counterpoint.core.costs import Costs
from counterpoint.core.homes import single_home
from counterpoint.core.plan import Plan
from counterpoint.core.program import Program
from counterpoint.decomposer.evaluation import evaluation_chain
from counterpoint.passes.residency import place
from counterpoint.runtime.compute import Compute, Step
from counterpoint.runtime.executor import Executor
from counterpoint.runtime.frame import frame_of
from counterpoint.runtime.peers import Peers
from counterpoint.schedules import evaluation


class Evaluator:
    """Runs forward programs. Everything is at home before and after; `training` lends its buffers and its seed."""

    def __init__(
        self,
        executor: Executor,
        training: Compute,
        costs: Costs,
        plan: Plan,
        budgets: tuple[int, ...],
        peers: Peers | None = None,
    ) -> None:
        self.executor, self.training, self.costs, self.plan, self.budgets = executor, training, costs, plan, budgets
        self.peers = peers
        self.frame = frame_of(evaluation_chain(training.chain))
        self._programs: dict[int, Program] = {}

    def loss(self, batches: Sequence[Mapping[int, Tensor]], sizes: Sequence[int]) -> float:
        """The mean of the microbatches' losses; `sizes` are their samples, of which the last may have fewer."""
        part = self._program(len(batches)).devices[self.executor.device]
        store, executor, training = self.executor.store, self.executor, self.training
        compute = Compute(
            self.frame, store, None, training.buffers, len(batches), training.seed, training.autocast, None
        )
        compute.steps[0] = step = Step(0, batches)
        num_spans, counted = len(executor.record.spans), store.num_microbatches
        executor.compute, store.num_microbatches = compute, len(batches)
        executor.whole_names = True
        try:
            executor.restart()
            for tasks in (part.prologue, part.epilogue):
                executor.run(tasks, 0)
            executor.drain()
            store.forget_passing()
        finally:
            executor.compute, store.num_microbatches = training, counted
            executor.whole_names = False
            del executor.record.spans[num_spans:]
        losses = self._losses(step)
        if len(set(sizes)) == 1:
            return float(losses.mean())
        return float((losses * torch.tensor(sizes)).sum() / sum(sizes))

    def _losses(self, step: Step) -> Tensor:
        """The losses of all microbatches, wherever they were computed."""
        found = {number: float(loss) for number, loss in step.losses.items()}
        if self.peers is not None:
            for other in self.peers.gather("evaluation", list(found.items())):
                found |= dict(other)
            assert self.executor.transport is not None
            self.executor.transport.forget_forms()
        dtype = self.frame.chain.values[self.frame.chain.loss].dtype
        return torch.tensor([found[number] for number in range(len(found))], dtype=dtype)

    def _program(self, num_microbatches: int) -> Program:
        if num_microbatches not in self._programs:
            order = evaluation.write(self.plan, self.frame.outline, num_microbatches)
            homes = single_home("disk", len(self.budgets), self.frame.num_layers)
            self._programs[num_microbatches] = place(order, self.costs, self.budgets, homes)
        return self._programs[num_microbatches]
