"""Installed packages -> which of those we can use are there, and what each is for."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

_PURPOSES = {
    "torch": "training; simulate does without",
    "numpy": "reading data",
    "safetensors": "checkpoints and export",
    "rich": "progress on a terminal",
    "pyyaml": "config files",
    "transformers": "built-in models and Hugging Face folders",
    "tokenizers": "tokenizers; bytes do without",
    "tensorboard": "tensorboard: true",
    "peft": "LoRA",
}
_NEEDED = ("torch", "numpy", "safetensors", "rich", "pyyaml")


@dataclass(frozen=True, slots=True)
class Package:
    """`version` is empty if it is missing."""

    name: str
    purpose: str
    version: str

    @property
    def missing(self) -> bool:
        return not self.version


def find_packages() -> tuple[Package, ...]:
    return tuple(Package(name, purpose, _version(name)) for name, purpose in _PURPOSES.items())


def refuse_missing() -> None:
    missing = [package.name for package in find_packages() if package.missing and package.name in _NEEDED]
    if missing:
        raise ValueError(f"this needs the packages {', '.join(missing)}: pip install 'counterpoint[train]'")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
