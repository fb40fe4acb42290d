"""A process that is begun so finds freed memory again; one that is not says so."""

import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from counterpoint.runtime.memory_process import is_glibc
from counterpoint.runtime.tidy_heap import SETTING, VARIABLE, is_tidy, tidy_environment

pytestmark = pytest.mark.skipif(not is_glibc(), reason="the C library is not glibc")

GROWTH = """
import torch
from counterpoint.runtime.memory_process import keep_freed_memory, resident_bytes
torch.set_num_threads(1)
keep_freed_memory()
up, down = torch.nn.Linear(192, 768), torch.nn.Linear(768, 192)
rows = torch.randn(256, 192)
for turn in range(40):
    if turn == 1:
        begin = resident_bytes()
    value = rows
    for _ in range(4):
        wide = up(value)
        wide = 0.5 * wide * (1 + torch.tanh(0.8 * (wide + 0.04 * wide**3)))
        value = value + down(wide)
    value.sum().backward()
    up.weight.grad = down.weight.grad = None
print(resident_bytes() - begin)
"""

BEGIN = """
import sys
from counterpoint.runtime.tidy_heap import begin_tidy, is_tidy
begin_tidy()
print(is_tidy(), sys.argv[1:])
"""


def run(*command: str, environment: dict[str, str]) -> str:
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize(
    ("given", "tidy"),
    [({}, True), ({VARIABLE: "glibc.malloc.perturb=0"}, True), ({VARIABLE: f"{SETTING}=3"}, False)],
    ids=["nothing set", "something else set", "set by hand"],
)
def test_a_process_begins_anew_once_and_keeps_its_arguments(given: dict[str, str], tidy: bool) -> None:
    assert run("-c", BEGIN, "one", "two words", environment=given) == f"{tidy} ['one', 'two words']"


def test_what_counts_is_what_the_process_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = tmp_path / "environ"
    for between in b":\0":  # glibc itself cuts the variable into pieces
        entry = b"GLIBC_TUNABLES=glibc.malloc.perturb=1%cglibc.malloc.tcache_count=0" % between
        begun.write_bytes(b"HOME=/\0" + entry + b"\0")
        assert is_tidy(begun)
    begun.write_bytes(b"GLIBC_TUNABLES=glibc.malloc.tcache_count=07\0HOME=/\0")
    monkeypatch.setenv(VARIABLE, f"{SETTING}=0")
    assert not is_tidy(begun)
    assert not is_tidy(tmp_path / "nowhere")


def test_a_tidy_heap_grows_less() -> None:
    """A block of a transformer, again and again, in a heap that nobody cuts back."""
    kept, tidy = ([int(run("-c", GROWTH, environment=e)) for _ in range(3)] for e in ({}, tidy_environment({})))
    assert median(tidy) < median(kept), (tidy, kept)
