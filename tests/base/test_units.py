"""Bytes, seconds and counts as text."""

import pytest

from autoshard.base.units import format_bytes, format_count, format_seconds


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1023.7, "1.00 KiB"), (1536, "1.50 KiB"), (1023.999 * 1024, "1.00 MiB")],
)
def test_bytes(size: float, text: str) -> None:
    assert format_bytes(size) == text
    assert format_bytes(-size) == (f"-{text}" if size else text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1e-16, "0 s"),
        (90, "90 s"),
        (0.0123, "12.3 ms"),
        (0.9996, "1 s"),
        (9.996e-4, "1 ms"),
        (9.996e-10, "1 ns"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(999, "999"), (999_400, "999 k"), (999_900, "1 M"), (1.5e12, "1.5 T")])
def test_counts(value: float, text: str) -> None:
    assert format_count(value) == text
    assert format_count(value, "FLOP") == (f"{text}FLOP" if " " in text else f"{text} FLOP")
