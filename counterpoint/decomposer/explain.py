"""An exception from a trace -> a ModelError that names the user's line and says what to do."""

import inspect
import traceback
from pathlib import Path
from types import FrameType

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv

from counterpoint.core.errors import ModelError

_OURS = str(Path(__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_HINTS = {  # for models of transformers
    "expert": "call model.set_experts_implementation('grouped_mm')",
    "layerdrop": "set layerdrop to 0 in the model's config",
}
_INSTEAD = "give the model as a list of modules (chain_of_modules)"


class LocatedShapes(ShapeEnv):
    """Remembers, with every condition on the batch size, the user's line that made it."""

    def _get_user_frame(self) -> FrameType | None:
        frame = inspect.currentframe()
        while frame is not None and not _is_users(frame.f_code.co_filename):
            frame = frame.f_back
        return frame


class CustomBackward(ModelError):
    """The model calls an autograd.Function, whose backward a trace would lose."""


def explain(error: Exception, shapes: LocatedShapes) -> ModelError:
    if isinstance(error, ModelError) and not isinstance(error, CustomBackward):
        return error
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if "Constraints violated" in reason:
        return ModelError(
            f"cannot trace {_condition(shapes)}: it fixes the batch size; "
            f"write it for any number of samples, or {_INSTEAD}"
        )
    advice = "correct this line"
    if isinstance(error, GuardOnDataDependentSymNode):
        reason = "what it does next depends on the values in a tensor"
        advice = "rewrite this line with tensor operations (torch.where, masks)"
        advice = next((hint for word, hint in _HINTS.items() if word in _place(error)), advice)
    elif isinstance(error, CustomBackward):
        advice = "make it a torch.library.custom_op with register_autograd"
    return ModelError(f"cannot trace {_place(error)}: {reason}; {advice}, or {_INSTEAD}")


def explain_module(error: Exception, module: nn.Module, batch_size: int) -> ModelError:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return ModelError(
        f"cannot run module {type(module).__name__} at batch size {batch_size}, {_place(error)}: {reason}; "
        f"a module of a chain takes the output of the one before it, at any batch size"
    )


def _place(error: Exception) -> str:
    """The innermost line that is neither torch's nor ours."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    called = [f for f in frames if f.name != "<module>"]
    if not called or not _inside_trace(error):
        return "the model"
    return f"{called[-1].filename}:{called[-1].lineno} ({called[-1].line})"


def _inside_trace(error: Exception) -> bool:
    """Whether the model was running when it happened; otherwise every user's line is only the caller of decompose."""
    return any(f.name == "forward" for f in traceback.extract_tb(error.__traceback__))


def _condition(shapes: LocatedShapes) -> str:
    """The first line that made the batch size a constant, or asked something of it."""
    places = [*shapes.replacements_slocs.values(), *(guard.sloc for guard in shapes.guards)]
    for place in places:
        frame = place.framework_loc
        if isinstance(frame, traceback.FrameSummary):
            return f"{frame.filename}:{frame.lineno} ({frame.line})"
    return "the model"


def _is_users(filename: str) -> bool:
    return not filename.startswith((_OURS, _TORCH, "<"))
