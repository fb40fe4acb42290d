"""Tasks into the kinds, colours and words of a drawing, in a light and a dark style."""

from typing import assert_never

from counterpoint.core.task import (
    AllReduce,
    Backward,
    Clip,
    Drop,
    Evict,
    Forward,
    Load,
    Norm,
    Receive,
    Send,
    Task,
    Update,
)

KINDS = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "backward with recompute",
    "update": "update",
    "norm": "gradient norm",
    "load": "load",
    "evict": "evict",
    "transfer": "send, receive",
    "reduce": "all-reduce",
}
CAUSES = {
    "load": "a load",
    "evict": "room",
    "peer": "a peer",
    "optimizer": "the optimizer",
    "start": "a computation elsewhere",
}
STYLE = """\
svg { --ground: #ffffff; --ink: #1c2733; --faint: #6b7885; --grid: #e4e9ee; --row: #f6f8fa; --held: #9db8d6;
  --forward: #7fb2ec; --backward: #93d1a0; --recompute: #2f8f5b; --update: #a98ae0; --norm: #d3c4f1; --load: #f2a33a;
  --evict: #d8593f; --transfer: #3fb0bf; --reduce: #d46aa6; --budget: #c0392b; --on: #10202f; --on-dark: #ffffff;
  background: var(--ground); font-family: system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) { svg { --ground: #12181f; --ink: #e3e9ef; --faint: #8f9ba7; --grid: #29323c;
  --row: #19212a; --held: #3f5d80; --forward: #5b9ae0; --backward: #74bd86; --recompute: #23784a; --update: #9270d6;
  --norm: #b7a2e4; --load: #e6962a; --evict: #cf5238; --transfer: #37a3b2; --reduce: #c95c9a; --budget: #f0705f; } }
text { fill: var(--ink); font-size: 11px; }
.title { font-size: 16px; font-weight: 600; } .faint { fill: var(--faint); } .small { font-size: 9px; }
.device { font-size: 13px; font-weight: 600; } .end { text-anchor: end; } .middle { text-anchor: middle; }
.on { fill: var(--on); font-size: 9px; text-anchor: middle; pointer-events: none; }
.on-recompute, .on-update { fill: var(--on-dark); }
.row { fill: var(--row); } .grid { stroke: var(--grid); } .axis { stroke: var(--faint); }
.step { stroke: var(--faint); stroke-dasharray: 2 3; } .budget { stroke: var(--budget); stroke-dasharray: 5 3; }
.over { fill: var(--budget); font-weight: 600; } .held { fill: var(--held); fill-opacity: .55; stroke: var(--held); }
.hatch { stroke-width: 2; opacity: .75; } .idle-start { stroke: var(--faint); } .idle-load { stroke: var(--load); }
.idle-evict { stroke: var(--evict); } .idle-peer { stroke: var(--transfer); } .idle-optimizer { stroke: var(--update); }
""" + "\n".join(f".{kind} {{ fill: var(--{kind}); }}" for kind in KINDS)


def kind_of(task: Task) -> str:
    match task:
        case Forward():
            return "forward"
        case Backward(recompute=recompute):
            return "recompute" if recompute else "backward"
        case Update():
            return "update"
        case Norm():
            return "norm"
        case Load():
            return "load"
        case Evict() | Drop():
            return "evict"
        case Send() | Receive():
            return "transfer"
        case AllReduce() | Clip():
            return "reduce"
        case _:
            assert_never(task)


def labels(task: Task) -> tuple[str, ...]:
    """What may be written on a computation, longest first: layers and microbatch, then the microbatch alone."""
    match task:
        case Forward(first, last, microbatch, count=count) | Backward(first, last, microbatch, count=count):
            short = str(microbatch) if count == 1 else f"{microbatch}-{microbatch + count - 1}"
            op = "F" if isinstance(task, Forward) else "B"
            return f"{op}{_layers(first, last)} m{short}", short
        case Update(first, last):
            return f"U{_layers(first, last)}", "U"
        case _:
            return ()


def _layers(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"
