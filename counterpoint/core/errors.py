"""What a caller may catch: every error Counterpoint raises on purpose, apart from ValueError for bad arguments."""


class CounterpointError(Exception):
    """Base of all errors below; the command line prints its text and nothing else."""


class ModelError(CounterpointError):
    """The model or its example batch cannot be turned into a chain of layers."""


class BudgetError(CounterpointError):
    """No placement fits the memory that was given; the text names the smallest budget that would do.

    `smallest_bytes` is that budget where it is known.
    """

    def __init__(self, text: str, smallest_bytes: int | None = None) -> None:
        super().__init__(text)
        self.smallest_bytes = smallest_bytes


class ProgramError(CounterpointError):
    """A program breaks a rule of `core/check.py`, or its text cannot be read."""


class ExecutionError(CounterpointError):
    """A run failed: a full disk, a torn file, a lost peer."""


class LossError(ExecutionError):
    """The loss of a step is not finite. The step left no trace: the next one may be tried."""
