"""Sizes and times as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.core.units import format_bytes, format_count, format_ns, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30),
        ("200 MB", 200 * 10**6),
        ("512m", 512 << 20),
        ("7", 7),
        (" 1.5 kib ", 1536),
        ("2GB/s", 2 * 10**9),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "4 parsecs", "-4GiB", "1,5GiB", "1e9", "four"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write for example 4GiB"):
        parse_bytes(text)


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match="a size cannot be negative: -1"):
        parse_bytes(-1)


@given(st.integers(0, 2**62))
def test_printed_sizes_read_back_to_within_a_percent(size: int) -> None:
    again = parse_bytes(format_bytes(size).replace("PiB", "TiB"))
    if "PiB" not in format_bytes(size):
        assert abs(again - size) <= size // 100


@given(st.integers(0, 10**15))
def test_times_are_short(time: int) -> None:
    assert len(format_ns(time)) <= 10
    assert len(format_count(time)) <= 8


@pytest.mark.parametrize(
    ("time", "text"),
    [(0, "0 ns"), (999, "999 ns"), (1_000, "1.00 us"), (12_345_678, "12.3 ms"), (654 * 10**9, "654 s")],
)
def test_times(time: int, text: str) -> None:
    assert format_ns(time) == text
