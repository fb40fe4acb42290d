"""Imports flow one way, and everything above the line does without torch: both read off the source."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "counterpoint"
ABOVE = ("core", "schedules", "passes", "simulator", "viewer", "planner")
BELOW = ("decomposer", "runtime", "profiler", "trainer")
ALLOWED = {
    "core": {"core"},
    "schedules": {"core", "passes", "schedules"},
    "passes": {"core", "passes"},
    "simulator": {"core", "simulator"},
    "viewer": {"core", "viewer"},
    "planner": {*ABOVE},
    "decomposer": {"core", "decomposer"},
    "runtime": {"core", "decomposer", "runtime"},
    "profiler": {"core", "decomposer", "runtime", "profiler"},
    "trainer": {*ABOVE, *BELOW},
    "job": {*ABOVE, *BELOW, "job", ""},
    "cli": {*ABOVE, *BELOW, "job", "cli", ""},
    "": {*ABOVE, *BELOW},
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def part(module: str) -> str:
    """The folder or file right under the package; empty for the package itself."""
    return module.split(".")[1] if "." in module else ""


def imports(module: str) -> Iterator[str]:
    """Modules that a module imports, anywhere in its text, by full name."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base


def ours(module: str) -> list[str]:
    return [name for name in imports(module) if name.split(".")[0] == "counterpoint"]


@pytest.mark.parametrize("module", MODULES)
def test_imports_flow_one_way(module: str) -> None:
    assert part(module) in ALLOWED, f"{module} is in no known part; add it to STYLE.md and here"
    wrong = [name for name in ours(module) if part(name) not in ALLOWED[part(module)]]
    assert wrong == []


@pytest.mark.parametrize("module", [name for name in MODULES if part(name) in ("", *ABOVE)])
def test_above_the_line_there_is_only_the_standard_library(module: str) -> None:
    foreign = [name for name in imports(module) if name.split(".")[0] not in {*sys.stdlib_module_names, "counterpoint"}]
    assert foreign == []


def test_no_module_imports_itself_through_others() -> None:
    state: dict[str, str] = {}

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert state.get(module) != "open", " -> ".join((*path, module))
        if module not in state:
            state[module] = "open"
            for name in ours(module):
                if name in MODULES and name != "counterpoint":
                    visit(name, (*path, module))
            state[module] = "done"

    for module in MODULES:
        if module != "counterpoint":
            visit(module, ())


def test_every_import_of_ours_exists() -> None:
    missing = [f"{module}: {name}" for module in MODULES for name in ours(module) if name not in MODULES]
    assert missing == []


def test_no_file_is_a_drawer() -> None:
    drawers = {"util", "utils", "common", "helper", "helpers", "misc"}
    assert [name for name in MODULES if drawers & set(name.split("."))] == []


def test_modules_say_what_they_turn_into_what() -> None:
    silent = [
        name
        for name, path in MODULES.items()
        if path.read_text().strip() and not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


BLOCKED = """
import importlib, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in sys.stdlib_module_names and top != "counterpoint":
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.path.insert(0, sys.argv[1])
sys.meta_path.insert(0, Block())
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-S", "-c", *arguments], capture_output=True, text=True, check=False)


def test_everything_above_the_line_imports_without_torch() -> None:
    names = [name for name in MODULES if part(name) in ("", *ABOVE)]
    found = python(BLOCKED, str(ROOT), *names)
    assert found.returncode == 0, found.stderr


def test_public_names_load_on_first_use() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import counterpoint;"
        "missing = [n for n in getattr(counterpoint, '__all__', ()) if n not in dir(counterpoint)];"
        "loaded = sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'numpy', 'safetensors'});"
        "sys.exit(f'{missing} {loaded}' if missing or loaded else 0)"
    )
    found = python(code, str(ROOT))
    assert found.returncode == 0, found.stderr


def test_public_names_exist() -> None:
    pytest.importorskip("torch")
    import counterpoint

    assert [name for name in getattr(counterpoint, "__all__", ()) if not hasattr(counterpoint, name)] == []


def test_unknown_public_names_are_attribute_errors() -> None:
    import counterpoint

    with pytest.raises(AttributeError, match="no_such_name"):
        counterpoint.no_such_name  # noqa: B018
