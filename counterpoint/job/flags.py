"""Config's fields -> command line flags, and the flags that were given -> a Config."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from counterpoint.job.config import LAST, OPTIONS, Config
from counterpoint.job.config_file import TYPES, read_config
from counterpoint.job.folder import RunFolder, run_of


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One per field; those that are not given leave no trace."""
    for name, option in OPTIONS.items():
        flag, about, choices = f"--{name.replace('_', '-')}", option.metadata["about"], option.metadata["choices"]
        if TYPES[name] is bool:
            action = argparse.BooleanOptionalAction
            parser.add_argument(flag, action=action, default=argparse.SUPPRESS, help=about)
            continue
        metavar = "{" + ",".join(choices) + "}" if choices else name.rpartition("_")[2].upper()
        default = "" if option.default is None else f" (default: {_shown(option.default)})"
        parser.add_argument(flag, metavar=metavar, default=argparse.SUPPRESS, help=(about + default).strip())


def given_flags(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name in OPTIONS}


def chosen_config(file: str | None, flags: Mapping[str, Any]) -> Config:
    """A run that goes on takes its own config where no other is given, wherever its folder lies by then."""
    resumed = flags.get("resume")
    root = None
    if resumed == LAST and "run" in flags:
        root = Path(flags["run"])
    elif resumed not in (None, LAST):
        root = run_of(Path(resumed))
    if file is not None or root is None or not RunFolder(root).config.is_file():
        return read_config(file, flags)
    return read_config(RunFolder(root).config, {"run": str(root), **flags})


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else f"{value}"
