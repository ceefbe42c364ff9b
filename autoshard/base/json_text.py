"""JSON of many megabytes, parsed a piece at a time.

C code that parses a piece returns soon, and Python sees to signals in between; one call for hundreds of megabytes would
let nothing else run for many seconds.
"""

import json
import re
from collections.abc import Callable
from typing import Any


PIECE = 1 << 20
"""Characters that one call of C code parses at most, but for a single string."""
_SHORT = 1 << 14
"""Characters of the shortest piece; further elements are parsed one by one."""
_SPACE = re.compile(r"[ \t\n\r]*")
_OPENED = re.compile(r'[\[{]{1,8}|"')
_CLOSING = {"[": "]", "{": "}", '"': '"'}


def parse_pieces(text: str, loads: Callable[[str], Any] = json.loads) -> Any:
    """Return what JSON says, where `loads` parses its pieces. Raises `ValueError` for what is no JSON."""
    if len(text) <= PIECE:
        return loads(text)
    reader = _Pieces(text, loads)
    value, at = reader.element(reader.skip(0))
    if at != len(text):
        raise json.JSONDecodeError("Extra data", text, at)
    return value


class _Pieces:
    """Methods take a place in the text, and return the place behind what they read and the space after it."""

    def __init__(self, text: str, loads: Callable[[str], Any]) -> None:
        self.text = text
        self.loads = loads
        decoder: Any = json.JSONDecoder()
        self.scan: Callable[[str, int], tuple[Any, int]] = decoder.scan_once

    def skip(self, at: int) -> int:
        match = _SPACE.match(self.text, at)
        return at if match is None else match.end()

    def element(self, at: int) -> tuple[Any, int]:
        if self.text[at : at + 1] in ("[", "{"):
            piece = self.text[at : at + _SHORT]
            try:
                value, length = self.scan(piece, 0)
                return value, self.skip(at + length)
            except (StopIteration, json.JSONDecodeError):  # it is longer, or no JSON
                return self.container(at)
        try:
            value, at = self.scan(self.text, at)
        except StopIteration as stop:
            raise json.JSONDecodeError("Expecting value", self.text, stop.value) from None
        return value, self.skip(at)

    def container(self, at: int) -> tuple[Any, int]:
        """Read an object or a list: pieces of many elements where such can be cut off, else one element after another.

        A piece that parses as a container of its own, and that a comma follows, is a number of whole elements.
        """
        text, start = self.text, self.text[at]
        made: Any = {} if start == "{" else []
        at = self.skip(at + 1)
        if text[at : at + 1] == _CLOSING[start]:
            return made, self.skip(at + 1)
        size, alone = PIECE, at
        while True:
            if at >= alone:
                cut = self.cut(at, min(at + size, len(text)), start == "{")
                try:
                    some = self.loads(f"{start}{text[at:cut]}{_CLOSING[start]}") if cut > at else None
                except ValueError:
                    some = None
                if some:
                    made.update(some) if start == "{" else made.extend(some)
                    at, size = self.skip(cut + 1), min(4 * size, PIECE)
                    continue
                size //= 4
                if size >= _SHORT:
                    continue
                size, alone = _SHORT, at + _SHORT
            if start == "{":
                key, at = self.key(at)
                made[key], at = self.element(at)
            else:
                value, at = self.element(at)
                made.append(value)
            if text[at : at + 1] == _CLOSING[start]:
                return made, self.skip(at + 1)
            if text[at : at + 1] != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
            at = self.skip(at + 1)

    def key(self, at: int) -> tuple[str, int]:
        """Read the name of an object's element, and the colon."""
        if self.text[at : at + 1] != '"':
            raise json.JSONDecodeError("Expecting property name enclosed in double quotes", self.text, at)
        key, at = self.scan(self.text, at)
        at = self.skip(at)
        if self.text[at : at + 1] != ":":
            raise json.JSONDecodeError("Expecting ':' delimiter", self.text, at)
        return key, self.skip(at + 1)

    def cut(self, at: int, limit: int, named: bool) -> int:
        """Return the last comma before `limit` that looks as if an element like the one at `at` began behind it.

        0 if there is none. In a text with indents, elements of one container have the same; in one without, the next
        element begins with the same character, and the one before ends as the first does.
        """
        text, first = self.text, self.text[at : at + 1]
        line = text.rfind("\n", max(0, at - _SHORT), at)
        if first in _CLOSING and line >= 0 and not text[line + 1 : at].strip(" "):
            return max(0, text.rfind(f",{text[line:at]}{first}", at, limit))
        value = self.key(at)[1] if named else at
        opened = _OPENED.match(text, value)
        ends = "".join(_CLOSING[each] for each in reversed(opened[0])) if opened else ""
        if first not in _CLOSING:
            return max(0, text.rfind(",", at, limit))
        places = [text.rfind(f"{ends},{space}{first}", at, limit) for space in ("", " ", "\n")]
        return 0 if max(places) < 0 else max(places) + len(ends)
