"""The one place that formats bytes and seconds for people, and that sizes element types."""

import re


GIB = 1 << 30
"""Bytes of one gibibyte."""

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")


def format_bytes(size: float) -> str:
    """Format bytes with a binary prefix up to `PiB`: `1536` as `1.50 KiB`; below 1024 as a whole number, `512 B`."""
    value = float(size)
    for unit in _BINARY:
        number = f"{value:.0f}" if unit == "B" else f"{value:.2f}"
        # The rounded number decides: 1023.7 bytes are 1.00 KiB.
        if abs(float(number)) < 1024 or unit == _BINARY[-1]:
            return f"{number} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """Format seconds with three digits and a unit from `s` to `ps`: `0.0123` as `12.3 ms`, `90` as `90 s`."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")):
        number = f"{seconds / scale:.3g}"
        if abs(float(number)) >= 1:
            return f"{number} {unit}"
    return f"{seconds / 1e-12:.3g} ps" if abs(seconds) >= 5e-13 else "0 s"  # less is rounding


def format_count(value: float, unit: str = "") -> str:
    """Format a number with three digits and a decimal prefix up to `E`: `1.5e12, "FLOP"` as `1.5 TFLOP`."""
    scaled = float(value)
    for prefix in _DECIMAL:
        number = f"{scaled:.3g}"
        if abs(float(number)) < 1000 or prefix == _DECIMAL[-1]:
            return f"{number} {prefix}{unit}".rstrip()
        scaled /= 1000
    raise AssertionError("unreachable")


def dtype_bits(dtype: str) -> int:
    """Return the bits of one element: 16 for `bfloat16`, 4 for `int4`, 8 for `bool`, 64 for `key<fry>`.

    These are the first number in the name, and 8 for a name without one. Other kinds of keys have 128 bits.
    """
    if dtype.startswith("key<"):
        return 64 if dtype == "key<fry>" else 128  # threefry has two words, the others four
    digits = re.search(r"\d+", dtype)
    return int(digits.group()) if digits else 8
