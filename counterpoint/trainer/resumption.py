"""A checkpoint's facts and a new run -> whether and how it goes on from there."""

from counterpoint.core.errors import ExecutionError
from counterpoint.runtime.checkpoint import Facts
from counterpoint.runtime.optimizer import UpdateRule


def refuse_other_optimizer(facts: Facts, rule: UpdateRule) -> None:
    name, count = rule.name, len(rule.optimizer.param_groups)
    if (facts.optimizer, len(facts.groups)) != (name, count):
        raise ExecutionError(
            f"the checkpoint is of {facts.optimizer} with {len(facts.groups)} parameter groups, "
            f"this run has {name} with {count}; build the same optimizer"
        )


def kept_microbatch(facts: Facts, minibatch_size: int) -> int | None:
    """The checkpoint's microbatch size, for the run to go on bit for bit; None if the minibatch has changed."""
    return facts.microbatch_size if minibatch_size % facts.microbatch_size == 0 else None
