"""The CPU -> eight accelerators named "played", with memory, streams, events and a process group: tests need no GPU.

`install()` is for good and for the whole process: "played" becomes what `torch.accelerator` finds. Tests that share a
process with others therefore use it in a child (`tests.played.child`).
"""

import atexit
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch.utils.backend_registration import rename_privateuse1_backend

SOURCE = Path(__file__).with_name("played.cpp")
CACHE = Path(__file__).parents[2] / "build" / "played"
MODULE = "_played"


def compiler() -> str | None:
    """The C++ compiler that would be used."""
    names = [os.environ.get("CXX"), "g++", "c++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


@functools.cache
def install() -> None:
    """Builds what is not built yet, and makes "played" this process's accelerator; a second call does nothing."""
    from tests.played import device, group

    library = native()
    rename_privateuse1_backend("played")
    library.register_device()
    torch._register_device_module("played", device)  # type: ignore[no-untyped-call]
    group.register()
    # Copies that are still queued when the process ends would use what the end destroys.
    atexit.register(library.settle, 200)


@functools.cache
def native() -> ModuleType:
    """The compiled part."""
    spec = importlib.util.spec_from_file_location(MODULE, _built())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _built() -> Path:
    command = _command()
    words = [torch.__version__, sys.version, *command, SOURCE.read_text()]
    folder = CACHE / hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
    library = folder / f"{MODULE}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if not library.exists():
                _build(command, library)
    return library


def _build(command: list[str], library: Path) -> None:
    unfinished = library.with_suffix(".unfinished")
    done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-8000:]}")
    unfinished.rename(library)


def _command() -> list[str]:
    """How to compile; g++ as such, because building through setuptools or ninja takes longer than the compiler."""
    from torch.utils.cpp_extension import include_paths, library_paths

    program = compiler()
    if program is None:
        raise RuntimeError("the played device needs a C++ compiler")
    includes = [word for path in [*include_paths(), sysconfig.get_paths()["include"]] for word in ("-isystem", path)]
    defines = [f"-DTORCH_EXTENSION_NAME={MODULE}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    libraries = [f"-L{path}" for path in library_paths()] + ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    return [program, "-std=c++20", "-O1", "-fPIC", "-shared", *defines, *includes, str(SOURCE), *libraries]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
