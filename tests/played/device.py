"""torch.played: what `torch.get_device_module("played")` gives, with the names that torch.cuda has.

Random numbers come from the CPU's generator, whatever the device: one seed gives the same numbers on both.
"""

import os
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from tests.played import native

Stream = torch.Stream
Event = torch.Event
Where = torch.device | str | int | None

_installed_in = os.getpid()


@dataclass(frozen=True)
class Properties:
    """What is known about a device."""

    name: str
    total_memory: int


class device:
    """A context in which another device is the current one."""

    def __init__(self, where: Where) -> None:
        self._index = -1 if where is None else _index(where)

    def __enter__(self) -> None:
        self._previous = torch._C._accelerator_maybeExchangeDevice(self._index)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        torch._C._accelerator_maybeExchangeDevice(self._previous)


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return int(native().device_count())


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(where: Where) -> None:
    torch.accelerator.set_device_index(_index(where))


def synchronize(where: Where = None) -> None:
    torch.accelerator.synchronize(_index(where))


def current_stream(where: Where = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(where))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(wanted: torch.Stream) -> torch.Stream:
    """A context in which a stream is the current one; streams are such contexts themselves."""
    return wanted


def get_device_name(where: Where = None) -> str:
    return f"Played accelerator {_index(where)}"


def get_device_properties(where: Where = None) -> Properties:
    return Properties(get_device_name(where), mem_get_info(where)[1])


def mem_get_info(where: Where = None) -> tuple[int, int]:
    """Free and total bytes."""
    return torch.accelerator.get_memory_info(_index(where))


def memory_allocated(where: Where = None) -> int:
    return torch.accelerator.memory_allocated(_index(where))


def max_memory_allocated(where: Where = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(where))


def memory_reserved(where: Where = None) -> int:
    return torch.accelerator.memory_reserved(_index(where))


def reset_peak_memory_stats(where: Where = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(where))


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def set_capacity(num_bytes: int, device: Where = 0) -> None:
    """How much memory the device has from now on (at the start: PLAYED_MEMORY, or 1 GiB)."""
    native().set_limit(_index(device), num_bytes, None)


def set_per_process_memory_fraction(fraction: float, device: Where = None) -> None:
    native().set_limit(_index(device), None, fraction)


def set_delay(microseconds: int) -> None:
    """How late a queued copy runs from now on (at the start: PLAYED_DELAY_US, or 300)."""
    native().set_delay(microseconds)


class Runtime:
    """The part of CUDA's runtime that pins memory which is there already."""

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        native().pin(address, num_bytes)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        native().unpin(address)
        return 0


def cudart() -> Runtime:
    return Runtime()


def alias(tensor: Tensor) -> Tensor:
    """A CPU tensor on the same memory, which waits for nothing and keeps nothing from being freed."""
    aliased: Tensor = native().alias(tensor)
    return aliased


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    manual_seed(seed)


def initial_seed() -> int:
    return torch.default_generator.initial_seed()


def get_rng_state(device: Where = "played") -> Tensor:
    return torch.default_generator.get_state()


def set_rng_state(new_state: Tensor, device: Where = "played") -> None:
    torch.default_generator.set_state(new_state)


def _is_in_bad_fork() -> bool:
    """A forked child has none of the streams' threads."""
    return os.getpid() != _installed_in


def _index(where: Where) -> int:
    if where is None:
        return current_device()
    if isinstance(where, int):
        return where
    wanted = torch.device(where)
    if wanted.type != "played":
        raise ValueError(f"not a played device: {wanted}")
    return current_device() if wanted.index is None else wanted.index
