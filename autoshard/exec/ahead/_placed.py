"""What the TPU compiler has decided once every value has its place, long before its machine code is written."""

import re
from pathlib import Path

from autoshard.exec.ahead._compiled import Compiled
from autoshard.exec.hlo._hlo import HOST_SPACE


_PLACED = ".after_optimizations_after_buffer_assignment.txt"
"""Ends the name of a dump that is written when the program fits; it begins with that of the module."""
_ON_CHIP = 1
"""The number of the memory that is on the chip, as dumps have it."""
_SPACE = re.compile(r"Memory Space: \w+ \(color=(\d+)\)\s+Total bytes: (\d+)")


def placed(directory: Path) -> str | None:
    """What the dumps' names begin with, of a program that fits; None as long as that is not known."""
    dump = directory / "dump"
    for path in dump.glob(f"*.jit_*{_PLACED}"):
        stem = path.name.removesuffix(_PLACED)
        if (dump / f"{stem}.debug_options").exists():  # written after all of them
            return stem
    return None


def read_placed(directory: Path, stem: str, argument_bytes: int, compile_s: float, log: str) -> Compiled:
    """The scheduled program and its memory, from the dumps: `argument_bytes` of a device are its arguments."""
    dump = directory / "dump"
    text = (dump / f"{stem}.after_optimizations.txt").read_text()
    said = (dump / f"{stem}.after_optimizations-memory-usage-report.txt").read_text()
    live = dump / f"{stem}.after_optimizations-live-range.txt"
    spaces = {int(color): int(size) for color, size in _SPACE.findall(said)}
    memory = {
        "arguments": argument_bytes,
        "temporaries": max(0, spaces.get(0, 0) - argument_bytes),
        "on_chip": spaces.get(_ON_CHIP, 0),
        "host": spaces.get(HOST_SPACE, 0),
    }
    ranges = live.read_text() if live.exists() else ""
    return Compiled(text, memory, compile_s, None, None, log, ranges, coded=False)
