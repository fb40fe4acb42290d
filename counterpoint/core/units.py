"""Text such as "4GiB" into whole bytes, and whole bytes and nanoseconds into text."""

import re

_BYTES = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
}  # fmt: skip
_NUMBER = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z/]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Whole bytes of "4GiB", "200 MB", "512m" or a plain number.

    >>> parse_bytes("1.5GiB"), parse_bytes("200MB"), parse_bytes(7)
    (1610612736, 200000000, 7)
    """
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"a size cannot be negative: {text}")
        return text
    match = _NUMBER.fullmatch(text)
    unit = match.group(2).lower().removesuffix("/s") if match else ""
    if match is None or unit not in _BYTES:
        raise ValueError(f"cannot read {text!r} as a size; write for example 4GiB, 200MB or 1048576")
    whole, _, fraction = match.group(1).partition(".")
    scale: int = 10 ** len(fraction)
    return int(whole + fraction) * _BYTES[unit] // scale


def format_bytes(size: int) -> str:
    """Three significant digits in binary units.

    >>> format_bytes(1610612736), format_bytes(0), format_bytes(1023)
    ('1.50 GiB', '0 B', '1023 B')
    """
    if abs(size) < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        value /= 1024
        if abs(value) < 999.5 or unit == "PiB":
            break
    return f"{value:.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f} {unit}"


def format_ns(time_ns: int) -> str:
    """Three significant digits in the unit that suits.

    >>> format_ns(1_500_000), format_ns(42), format_ns(90_000_000_000)
    ('1.50 ms', '42 ns', '90.0 s')
    """
    for unit, size in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if abs(time_ns) >= size:
            value = time_ns / size
            decimals = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
            return f"{value:.{decimals}f} {unit}"
    return f"{time_ns} ns"


def format_count(count: int) -> str:
    """Decimal thousands.

    >>> format_count(1_558_000_000), format_count(950)
    ('1.56B', '950')
    """
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)
