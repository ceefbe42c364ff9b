"""Names that a user chose, made safe and short enough to show."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from autoshard.plan import pattern


def clean(name: str, width: int | None = None) -> str:
    """`name` without anything that could move a cursor or turn the text around, and not longer than `width`.

    A name that is too long loses its middle: both its module and its last word tell it from others.
    """
    text = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in name)
    if width is None or len(text) <= width:
        return text
    head = (width - 1) // 3
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


class Printable:
    """What rich shows, whatever names are in it: what could move a cursor or turn the text around is replaced.

    Reports clean the names that they know; this holds for all of them, and for those of plans that others edited.
    """

    def __init__(self, shown: Any) -> None:
        self._shown = shown

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.segment import Segment

        for text, style, control in console.render(self._shown, options):
            whole = control or text.isprintable() or text == "\n"
            yield Segment(text if whole else "\n".join(map(clean, text.split("\n"))), style, control)


def breakable(name: str) -> str:
    """`name` with a place to break the line after dots, slashes and underscores (zero-width spaces)."""
    return re.sub(r"(?<=[./_])(?=[^./_])", "\u200b", name)


_TRACED = re.compile(r"^(transpose|jvp|vmap|jit|pjit|remat|checkpoint|custom_\w+)\((.*)\)$")
_NOISE = {
    "while",
    "body",
    "cond",
    "closed_call",
    "eval_jaxpr",
    "checkpoint",
    "rematted_computation",
    "pjit",
    "scan",
    "",
}


def readable(cause: str) -> str:
    """The name JAX gives an op, for people: `jit(f)/transpose(jvp())/while/body/linear/dot_general` becomes
    `linear/dot_general (backward, in a loop)`. Other names stay as they are."""
    start = cause.find("jit(")
    if start < 0:
        return cause
    path = cause[start:].split("/")
    kept = []
    for index, part in enumerate(path):
        while match := _TRACED.match(part):
            part = "" if index == 0 else match[2]
        if part not in _NOISE:
            kept.append(part)
    facts = []
    if "rematted_computation" in path:
        facts.append("computed again")
    elif any(part.startswith("transpose(") for part in path):
        facts.append("backward")
    elif any(part.startswith("jvp(") for part in path):
        facts.append("forward")
    if "while" in path or "scan" in path:
        facts.append("in a loop")
    name = "/".join(kept) or cause[:start].strip() or cause
    return f"{name} ({', '.join(facts)})" if facts else name


def fold(names: Iterable[str], key: Callable[[str], Any]) -> list[tuple[str, list[str]]]:
    """Names grouped where their patterns and `key` agree, in order of first appearance: (shown name, members)."""
    groups: dict[tuple[str, Any], list[str]] = {}
    for name in names:
        groups.setdefault((pattern(name), key(name)), []).append(name)
    return [(shown if len(members) > 1 else members[0], members) for (shown, _), members in groups.items()]
