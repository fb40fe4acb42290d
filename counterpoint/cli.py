"""Arguments into commands: one function per command, listed in COMMANDS."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from counterpoint import viewer
from counterpoint.core.errors import BudgetError, CounterpointError
from counterpoint.core.files import to_json
from counterpoint.core.plan import POLICIES, SCHEDULES
from counterpoint.core.program import Program
from counterpoint.core.text import dump, grid
from counterpoint.core.timeline import Timeline
from counterpoint.core.units import parse_bytes
from counterpoint.job.flags import add_flags, chosen_config, given_flags
from counterpoint.job.packages import refuse_missing
from counterpoint.planner import catalog
from counterpoint.planner.defaults import PlanWishes, default_plan
from counterpoint.planner.forecast import Forecast, forecast, run
from counterpoint.planner.forecast_text import describe, plan_text
from counterpoint.planner.machines import MACHINES, usual_precision, with_budget
from counterpoint.planner.names import nearest
from counterpoint.planner.servers import arrangements, num_servers


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
        options, unknown = _parser().parse_known_args(arguments)
        options.given, options.is_process = list(sys.argv[1:] if arguments is None else arguments), arguments is None
        if unknown:
            options.parser.refuse_unknown(unknown[0])
        code: int = options.handler(options)
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
    device = f"device {os.environ.get('RANK')}: " if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    print(f"counterpoint: error: {device}{text}", file=sys.stderr)
    return 2


def _refuse_io(error: OSError) -> int:
    if isinstance(error, BrokenPipeError):
        # Python flushes stdout again at exit; a closed reader must not turn that into a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return _refuse(f"{error.filename or 'input or output'}: {error.strerror or error}")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and the nearest option that is known."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"counterpoint: error: {message}; see {self.prog} --help\n")

    def refuse_unknown(self, argument: str) -> NoReturn:
        flag = argument.partition("=")[0]
        known = [name for name in self._option_string_actions if name.startswith("--")]
        self.error(f"unknown argument {flag!r}{nearest(flag, known)}")


def _parser() -> _Parser:
    parser = _Parser(
        prog="counterpoint", description="Train models bigger than memory: forecast first, then exactly that."
    )
    commands = parser.add_subparsers(metavar="command", required=True)
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.about, description=command.about, allow_abbrev=False)
        command.add_arguments(sub)
        sub.set_defaults(handler=command.run, parser=sub)
    return parser


def _simulate_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--list", action="store_true", help="list built-in models, machines and schedules")
    add("--model", default="gpt2-10b", help="a built-in model or a profile's JSON file (default: %(default)s)")
    add("--machine", default="1080ti", help="a built-in machine or a machine's JSON file (default: %(default)s)")
    add("--devices", type=_positive, metavar="N", help="number of devices (default: 4, a laptop 1)")
    add("--servers", type=_positive, metavar="S", help="servers to spread them over (default: as few as hold them)")
    add("--network", type=_size, metavar="SIZE", help="bytes per second between servers (default: the machine's)")
    add("--memory", type=_size, metavar="SIZE", help="budget per device, for example 8GiB (default: all it has)")
    add("--precision", choices=("fp32", "bf16"), help="of a built-in model (default: the machine's usual one)")
    add("--schedule", help=f"{', '.join(SCHEDULES)} (default: harmony_pp, on one device harmony, on servers flush)")
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
    machine = catalog.machine(options.machine, options.devices, precision, options.servers, options.network)
    if options.memory:
        machine = with_budget(machine, options.memory)
    profile = catalog.profile(options.model, machine, precision=precision)
    wished = default_plan(profile, machine, _wishes(options, num_servers(machine), len(machine.devices)))
    runs = [(plan, *run(profile, machine, plan, options.steps)) for plan in arrangements(wished, machine)]
    plan, program, timeline = min(runs, key=lambda found: found[2].step_ns)
    found = forecast(profile, machine, plan, program, timeline)
    print(json.dumps(to_json(found), indent=1) if options.json else describe(found))
    _write_views(options, found, program, timeline)
    return 0


def _wishes(options: argparse.Namespace, servers: int, num_devices: int) -> PlanWishes:
    usual = "flush" if servers > 1 else "harmony_pp" if num_devices > 1 else "harmony"
    return PlanWishes(
        schedule=options.schedule or usual,
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


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", help="YAML file with any of the options below; flags stand over it")
    parser.add_argument("--list", action="store_true", help="list built-in models")
    parser.add_argument("--quiet", action="store_true", help="plain lines instead of a live panel")
    add_flags(parser)


def _train(options: argparse.Namespace) -> int:
    return _run_job(options, forecast_only=False)


def _plan(options: argparse.Namespace) -> int:
    return _run_job(options, forecast_only=True)


def _run_job(options: argparse.Namespace, forecast_only: bool) -> int:
    refuse_missing()
    if options.list:
        from counterpoint.job.models import builtin_models

        print("\n".join(f"{name:<16}{text}" for name, text in builtin_models().items()))
        return 0
    if options.is_process:
        from counterpoint.runtime.tidy_heap import begin_tidy

        begin_tidy()
    from counterpoint.job.run import train
    from counterpoint.job.several import is_started, start

    config = chosen_config(options.config, given_flags(options))
    if config.devices > 1 and not is_started():
        from counterpoint.job.folder import open_folder

        root = open_folder(config)[0].root
        return start([*options.given, "--run", str(root)], config.devices, config.restarts)
    return train(config, quiet=options.quiet, forecast_only=forecast_only)


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="a run folder")


def _report(options: argparse.Namespace) -> int:
    refuse_missing()
    from counterpoint.job.report import report

    print(report(options.run))
    return 0


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="a run folder (its newest checkpoint counts) or a checkpoint")
    parser.add_argument("target", type=Path, help="folder to write, which must not be there yet")


def _export(options: argparse.Namespace) -> int:
    refuse_missing()
    from counterpoint.job.exporting import export

    print(export(options.source, options.target))
    return 0


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--disk", type=Path, default=Path(), metavar="FOLDER", help="where to try the disk (default: here)")


def _doctor(options: argparse.Namespace) -> int:
    refuse_missing()
    from counterpoint.job.doctor import examine
    from counterpoint.job.packages import find_packages
    from counterpoint.runtime.probe import probe_machine

    if not options.disk.is_dir():
        raise ValueError(f"no folder {options.disk}: give one that is there")
    print(examine(probe_machine(options.disk), find_packages(), options.disk.resolve()))
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, not {text!r}")
    return int(text)


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


COMMANDS = (
    Command("train", "train a model within a memory budget", _train_arguments, _train),
    Command("plan", "forecast what train would do on this machine, then stop", _train_arguments, _plan),
    Command("simulate", "forecast a training run on a machine you name", _simulate_arguments, _simulate),
    Command("report", "what a run did, beside what was forecast", _report_arguments, _report),
    Command("export", "write a run's weights as a Hugging Face folder", _export_arguments, _export),
    Command("doctor", "what this machine can do, and what is missing", _doctor_arguments, _doctor),
)


if __name__ == "__main__":
    sys.exit(main())
