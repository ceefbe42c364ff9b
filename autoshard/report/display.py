"""Names that are safe to display, plots and reports written to files, and progress of long work."""

import io
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from autoshard.base.files import write_whole
from autoshard.errors import UserError
from autoshard.planning import patterns


def clean(name: str, width: int | None = None) -> str:
    """Replace characters in `name` that are not printable, since they could move a cursor or reverse the text.

    The result has at most `width` characters; None does not limit it. A name that is too long loses its middle to `…`,
    since its module and its last word distinguish it from others.
    """
    text = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in name)
    if width is None or len(text) <= width:
        return text
    # The end has twice the letters of the beginning: last words differ more often.
    head = (width - 1) // 3
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


class Printable:
    """Renderable for rich that shows `shown`, with characters replaced that could move a cursor or reverse the text.

    Reports clean the names that they know. This class protects every report, and names in plans that others have
    edited. Line ends and rich's own control codes stay.
    """

    def __init__(self, shown: Any) -> None:
        self._shown = shown

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.segment import Segment

        for text, style, control in console.render(self._shown, options):
            safe = control or text.isprintable() or text == "\n"
            yield Segment(text if safe else "\n".join(map(clean, text.split("\n"))), style, control)


class OneLine:
    """Renderable for rich of a command to paste: one line, also where the screen is narrower."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.segment import Segment

        yield Segment(self._text)
        yield Segment.line()


def breakable(name: str) -> str:
    """Insert a zero-width space after each run of dots, slashes and underscores, where the name may break
    into lines.
    """
    return re.sub(r"(?<=[./_])(?=[^./_])", "\u200b", name)


_TRACED = re.compile(r"^(transpose|jvp|vmap|jit|pjit|remat|checkpoint|custom_\w+)\((.*)\)$")
"""JAX's transforms around a part of an op's name."""
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
"""Parts of an op's name that are of no use to people."""


def readable(cause: str) -> str:
    """Simplify JAX's name of an op for people; names without `jit(` are returned unchanged.

    `jit(f)/transpose(jvp())/while/body/linear/dot_general` becomes `linear/dot_general (backward, in a loop)`. Text
    before `jit(` is dropped, unless no part of the name is left.
    """
    start = cause.find("jit(")
    if start < 0:
        return cause
    path = cause[start:].split("/")
    parts = []
    for index, part in enumerate(path):
        while match := _TRACED.match(part):
            part = "" if index == 0 else match[2]
        if part not in _NOISE:
            parts.append(part)
    facts = []
    if "rematted_computation" in path:
        facts.append("computed again")
    elif any(part.startswith("transpose(") for part in path):
        facts.append("backward")
    elif any(part.startswith("jvp(") for part in path):
        facts.append("forward")
    if "while" in path or "scan" in path:
        facts.append("in a loop")
    name = "/".join(parts) or cause[:start].strip() or cause
    return f"{name} ({', '.join(facts)})" if facts else name


_OPS = {
    "dot_general": "matmul", "dot": "matmul", "conv_general_dilated": "convolution", "convolution": "convolution",
    "reduce_sum": "sum", "reduce_max": "maximum", "add_any": "add", "select_n": "select", "exp": "exponential",
    "exponential": "exponential", "integer_pow": "power", "convert_element_type": "cast", "convert": "cast",
    "dynamic_slice": "slice", "dynamic_update_slice": "update of a slice", "broadcast_in_dim": "broadcast",
    "mul": "multiply", "sub": "subtract", "div": "divide", "neg": "negate", "rsqrt": "inverse root",
    "custom_partitioning": "kernel",
}  # fmt: skip
"""Words for JAX's names of ops."""
_EINSUM = re.compile(r"^[\w.,]*->[\w.]*$")


def op_words(name: str) -> str:
    """Return words for an op: `jit(f)/transpose(jvp(Block))/up/dot_general` becomes `Block up matmul (backward)`."""
    if "jit(" not in name:
        return name  # a tensor, or an op that its framework named
    path, bracket, facts = readable(name).partition(" (")
    parts = [_OPS.get(part, part.replace("_", " ")) for part in path.split("/") if not _EINSUM.match(part)]
    return f"{' '.join(parts) or path}{bracket}{facts}"


def fold(names: Iterable[str], key: Callable[[str], Any] = lambda name: None) -> list[tuple[str, list[str]]]:
    """Group names with equal `patterns` and equal `key`, in order of first appearance: (displayed name, members).

    The displayed name is the pattern, with numbers replaced, or the name itself for a single member.
    """
    keys = {name: key(name) for name in names}
    alike = defaultdict[Any, list[str]](list)
    for name, own in keys.items():
        alike[own].append(name)
    shared = {name: shown for members in alike.values() for name, shown in patterns(members).items()}
    groups: dict[tuple[str, Any], list[str]] = {}
    for name, own in keys.items():
        groups.setdefault((shared[name], own), []).append(name)
    return [(shown if len(members) > 1 else members[0], members) for (shown, _), members in groups.items()]


def save_picture(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a matplotlib figure in the format of the suffix of `path`, atomically, at 150 dots per inch.

    Raises `UserError` for a suffix that matplotlib does not support, and if the file cannot be written.
    """
    kind = Path(path).suffix.lstrip(".").lower()
    kinds = sorted(figure.canvas.get_supported_filetypes())
    if kind not in kinds:
        raise UserError(f"cannot write {path}: a picture ends in one of {', '.join('.' + each for each in kinds)}.")
    picture = io.BytesIO()
    figure.savefig(picture, format=kind, dpi=150)
    try:
        write_whole(path, picture.getvalue())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from error


def write_text(path: Path, text: str) -> None:
    """Write a report as UTF-8, atomically. Raises `UserError` if it cannot be written."""
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from error


class ProgressLine:
    """Progress display: call it with one line at the start of every phase; it prints the previous phase's duration.

    It writes to stderr by default, so that stdout stays free for the answer. Durations are printed on a terminal only;
    a stream that is none gets the lines alone. With `quiet` it prints nothing. As a context manager it ends the last
    phase on exit.
    """

    def __init__(self, quiet: bool = False, stream: TextIO | None = None):
        """Prepare the display on `stream`, or stderr by default; a terminal gets a moving status line."""
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._phase: tuple[str, float] | None = None
        self._status = None
        if not quiet and self._stream.isatty():
            from rich.console import Console

            self._console = Console(file=self._stream)
            self._status = self._console.status("")

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._finish(failed=kind is not None)
        if self._status:
            self._status.stop()

    def __call__(self, line: str) -> None:
        """End the present phase and start the phase `line`."""
        if self._quiet:
            return
        line = clean(line)  # the line may contain names from a plan, which must not hide text
        self._finish()
        self._phase = (line, time.perf_counter())
        if self._status:
            from rich.markup import escape

            self._status.update(escape(line))
            self._status.start()
        else:
            print(line, file=self._stream, flush=True)

    def _finish(self, failed: bool = False) -> None:
        """Print the phase that ends, with its duration or as failed, on a terminal; print nothing without a phase."""
        if self._phase and self._status:
            line, start = self._phase
            mark, style = ("failed", "red") if failed else (f"{time.perf_counter() - start:.1f} s", "dim")
            self._console.print(f"{line} ({mark})", style=style, markup=False, highlight=False)
        self._phase = None
