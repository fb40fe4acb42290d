"""Parts and wishes -> the profile of the layers, timed here at the microbatch sizes that are wished for."""

from counterpoint.core.profile import Profile
from counterpoint.decomposer.chain import Batch
from counterpoint.profiler.measure import profile_of
from counterpoint.trainer.parts import Parts, tokens_per_sample
from counterpoint.trainer.wishes import Wishes


def measured(parts: Parts, wishes: Wishes, example: Batch) -> Profile:
    """Within half of the memory that is left."""
    sizes = [wishes.plan.microbatch_size] if wishes.plan else wishes.freedom.microbatch_sizes
    limit = max(0, wishes.memory_bytes - parts.backend.used_bytes()) // 2
    tokens = tokens_per_sample(parts.chain, example)
    name = type(parts.module).__name__
    return profile_of(parts.frame, parts.states, parts.rule, sizes, name, tokens, wishes.autocast, limit, parts.backend)
