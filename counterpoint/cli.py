"""Arguments into commands: one function per command, listed in COMMANDS."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from counterpoint import viewer
from counterpoint.core.errors import BudgetError, CounterpointError
from counterpoint.core.files import to_json
from counterpoint.core.plan import POLICIES, SCHEDULES
from counterpoint.core.program import Program
from counterpoint.core.text import dump, grid
from counterpoint.core.timeline import Timeline
from counterpoint.core.units import parse_bytes
from counterpoint.planner import catalog
from counterpoint.planner.defaults import Wishes, default_plan
from counterpoint.planner.forecast import Forecast, forecast, run
from counterpoint.planner.forecast_text import describe, plan_text
from counterpoint.planner.machines import MACHINES, usual_precision, with_budget


@dataclass(frozen=True, slots=True)
class Command:
    """`add_arguments` declares what `run` reads; `run` returns the exit code."""

    name: str
    about: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, 2 for anything the caller can fix (one line on stderr), 130 when interrupted."""
    try:
        options = _parser().parse_args(arguments)
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except BudgetError as error:
        return _refuse("; ".join(str(error).splitlines()))
    except (CounterpointError, ValueError) as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse_io(error)
    except KeyboardInterrupt:
        return 130


def _refuse(text: str) -> int:
    print(f"counterpoint: error: {text}", file=sys.stderr)
    return 2


def _refuse_io(error: OSError) -> int:
    if isinstance(error, BrokenPipeError):
        # Python flushes stdout again at exit; a closed reader must not turn that into a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return _refuse(f"{error.filename or 'input or output'}: {error.strerror or error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="counterpoint", description="Train models bigger than memory: forecast first, then exactly that."
    )
    commands = parser.add_subparsers(metavar="command", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.about, description=command.about)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser


def _simulate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--list", action="store_true", help="list built-in models, machines and schedules")
    add("--model", default="gpt2-10b", help="a built-in model or a profile's JSON file (default: %(default)s)")
    add("--machine", default="1080ti", help="a built-in machine or a machine's JSON file (default: %(default)s)")
    add("--devices", type=_positive, metavar="N", help="number of devices (default: 4, a laptop 1)")
    add("--memory", type=_size, metavar="SIZE", help="budget per device, for example 8GiB (default: all it has)")
    add("--precision", choices=("fp32", "bf16"), help="of a built-in model (default: the machine's usual one)")
    add("--schedule", help=f"{', '.join(SCHEDULES)} (default: harmony_pp, on one device harmony)")
    add("--minibatch", type=_positive, default=64, metavar="N", help="samples per step (default: %(default)s)")
    add("--microbatch", type=_positive, metavar="N", help="samples per microbatch (default: what fits)")
    add("--replicas", type=_positive, metavar="W", help="copies of the model (default: the schedule's usual)")
    add("--residency", choices=("planned", "lru", "none"), default="planned", help="(default: %(default)s)")
    add("--activations", choices=POLICIES, help="for backward (default: keep if they fit, else recompute)")
    add("--pack", type=_positive, metavar="N", help="layers per pack (default: what leaves room for prefetch)")
    add("--host-update", action="store_true", help="run the optimizer on the host")
    add("--clip", action="store_true", help="clip gradients by their global norm")
    add("--steps", type=_positive, default=3, metavar="N", help="steps to simulate (default: %(default)s)")
    add("--grid", action="store_true", help="print the compute order as a grid")
    add("--json", action="store_true", help="print the forecast as JSON")
    add("--svg", type=Path, metavar="FILE", help="draw the timeline")
    add("--html", type=Path, metavar="FILE", help="write a page with the timeline")
    add("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto or chrome://tracing")
    add("--text", type=Path, metavar="FILE", help="write the program in its text form")


def _simulate(options: argparse.Namespace) -> int:
    """Needs neither torch nor a device."""
    if options.list:
        print(_listing())
        return 0
    precision = options.precision or usual_precision(options.machine)
    machine = catalog.machine(options.machine, options.devices, precision)
    if options.memory:
        machine = with_budget(machine, options.memory)
    profile = catalog.profile(options.model, machine, precision=precision)
    plan = default_plan(profile, machine, _wishes(options, len(machine.devices)))
    program, timeline = run(profile, machine, plan, options.steps)
    found = forecast(profile, machine, plan, program, timeline)
    print(json.dumps(to_json(found), indent=1) if options.json else describe(found))
    _write_views(options, found, program, timeline)
    return 0


def _wishes(options: argparse.Namespace, num_devices: int) -> Wishes:
    return Wishes(
        schedule=options.schedule or ("harmony_pp" if num_devices > 1 else "harmony"),
        minibatch=options.minibatch,
        microbatch=options.microbatch,
        replicas=options.replicas,
        activations=options.activations,
        layers_per_pack=options.pack,
        host_update=options.host_update,
        clipping=options.clip,
        residency=options.residency,
    )


def _listing() -> str:
    sections = (("models", catalog.models()), ("machines", MACHINES), ("schedules", _SCHEDULE_TEXTS))
    return "\n\n".join(
        "\n".join((f"{title}:", *(f"  {name:<16}{text}" for name, text in items.items()))) for title, items in sections
    )


_SCHEDULE_TEXTS = {
    "plain": "one microbatch after the other; with replicas, plain data parallelism",
    "model_parallel": "layers spread over devices, one device at work at a time",
    "harmony": "Harmony on one device, or data parallel: all microbatches pack by pack",
    "harmony_pp": "Harmony's wrap-around pipeline: packs go round the devices",
    "gpipe": "all forwards, all backwards, flush",
    "flush": "1F1B with a flush every step (PipeDream-Flush)",
    "2bw": "1F1B without flushes on two weight versions (PipeDream-2BW)",
}


def _write_views(options: argparse.Namespace, found: Forecast, program: Program, timeline: Timeline) -> None:
    title, budgets = f"{found.model} on {found.machine}, {found.plan.schedule}", program.budgets
    if options.grid:
        print("\n" + grid(program))
    if options.text:
        options.text.write_text(dump(program))
    if options.svg:
        options.svg.write_text(viewer.draw(timeline, title, budgets))
    if options.html:
        options.html.write_text(viewer.page(timeline, title, budgets, plan_text(found.plan)))
    if options.trace:
        options.trace.write_text(viewer.trace(timeline))


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, not {text!r}")
    return int(text)


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


COMMANDS = (Command("simulate", "forecast a training run on a machine you name", _simulate_arguments, _simulate),)


if __name__ == "__main__":
    sys.exit(main())
