"""Parser of JSON of many megabytes, a piece at a time.

Python handles signals only between calls of C code. One call for hundreds of megabytes would block them, and all other
threads, for many seconds.
"""

import json
import re
from collections.abc import Callable
from typing import Any


PIECE = 1 << 20
"""Most characters that one call of C code parses, except for a single string, which is parsed in one call."""
_SHORT = 1 << 14
"""Characters of the shortest piece. Below this length, elements are parsed one by one."""
_SPACE = re.compile(r"[ \t\n\r]*")
_OPENED = re.compile(r'[\[{]{1,8}|"')
_CLOSING = {"[": "]", "{": "}", '"': '"'}


def parse_pieces(text: str, loads: Callable[[str], Any] = json.loads) -> Any:
    """Parse JSON text and return its value; a repeated key has its last value. Raises `ValueError` for other text.

    `loads` parses text of up to `PIECE` characters in one call, and longer text in pieces, each a whole list or object.
    Python's own decoder parses short elements between the pieces.
    """
    if len(text) <= PIECE:
        return loads(text)
    reader = _Pieces(text, loads)
    value, at = reader.element(reader.skip(0))
    if at != len(text):
        raise json.JSONDecodeError("Extra data", text, at)
    return value


class _Pieces:
    """Reader of one JSON text; its methods take a position and return the one after the element and white space.

    They raise `json.JSONDecodeError` where the text is not JSON.
    """

    def __init__(self, text: str, loads: Callable[[str], Any]) -> None:
        self.text = text
        self.loads = loads
        decoder: Any = json.JSONDecoder()
        self.scan: Callable[[str, int], tuple[Any, int]] = decoder.scan_once

    def skip(self, at: int) -> int:
        """Skip white space; return the position after it."""
        match = _SPACE.match(self.text, at)
        return at if match is None else match.end()

    def element(self, at: int) -> tuple[Any, int]:
        """Parse one value: in one call if it is short or no container, else by `container`."""
        if self.text[at : at + 1] in ("[", "{"):
            piece = self.text[at : at + _SHORT]
            try:
                value, length = self.scan(piece, 0)
                return value, self.skip(at + length)
            except (StopIteration, json.JSONDecodeError):  # the element is longer than the piece, or is not JSON
                return self.container(at)
        try:
            value, at = self.scan(self.text, at)
        except StopIteration as stop:
            raise json.JSONDecodeError("Expecting value", self.text, stop.value) from None
        return value, self.skip(at)

    def container(self, at: int) -> tuple[Any, int]:
        """Parse an object or a list: in pieces where the text can be cut, else one element after another.

        A piece is a run of whole elements if it parses as a container of its own and a comma follows it.
        """
        text, start = self.text, self.text[at]
        parsed: Any = {} if start == "{" else []
        at = self.skip(at + 1)
        if text[at : at + 1] == _CLOSING[start]:
            return parsed, self.skip(at + 1)
        # The length of the next piece, and the position before which elements are parsed one by one.
        size, alone = PIECE, at
        while True:
            if at >= alone:
                cut = self.cut(at, min(at + size, len(text)), start == "{")
                try:
                    elements = self.loads(f"{start}{text[at:cut]}{_CLOSING[start]}") if cut > at else None
                except ValueError:
                    elements = None
                if elements:
                    parsed.update(elements) if start == "{" else parsed.extend(elements)
                    at, size = self.skip(cut + 1), min(4 * size, PIECE)
                    continue
                size //= 4
                if size >= _SHORT:
                    continue
                size, alone = _SHORT, at + _SHORT
            if start == "{":
                key, at = self.key(at)
                parsed[key], at = self.element(at)
            else:
                value, at = self.element(at)
                parsed.append(value)
            if text[at : at + 1] == _CLOSING[start]:
                return parsed, self.skip(at + 1)
            if text[at : at + 1] != ",":
                raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
            at = self.skip(at + 1)

    def key(self, at: int) -> tuple[str, int]:
        """Parse the key of an object's element and the colon after it."""
        if self.text[at : at + 1] != '"':
            raise json.JSONDecodeError("Expecting property name enclosed in double quotes", self.text, at)
        key, at = self.scan(self.text, at)
        at = self.skip(at)
        if self.text[at : at + 1] != ":":
            raise json.JSONDecodeError("Expecting ':' delimiter", self.text, at)
        return key, self.skip(at + 1)

    def cut(self, at: int, limit: int, named: bool) -> int:
        """Return the position of the last comma before `limit` that seems to separate two elements; 0 if none.

        An indented text indents all elements of one container alike. In a text without indents, the next element begins
        with the same character as the element at `at`. The element before it ends as the one at `at` does.

        - `named`: True for an object, whose elements begin with a key.
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
