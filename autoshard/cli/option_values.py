"""What the command line takes as values: each function reads one, or says what it is not."""

import argparse
import contextlib
import re
from collections.abc import Callable
from typing import Any

from autoshard.base.units import GIB
from autoshard.errors import UserError


def pair(form: str) -> Callable[[str], tuple[str, str]]:
    def parse_pair(text: str) -> tuple[str, str]:
        left, equals, right = text.partition("=")
        if not (left.strip() and equals and right.strip()):
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form {form}")
        return left.strip(), right.strip()

    return parse_pair


def texts(text: str) -> list[str]:
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list A,B,...")
    return list(dict.fromkeys(found))


def numbers(text: str) -> list[int]:
    return [positive(part) for part in texts(text)]


def remat(text: str) -> str:
    from autoshard.program import parse_remat

    try:
        parse_remat(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def experts(text: str) -> str:
    from autoshard.program import parse_experts

    try:
        parse_experts(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error).removesuffix(".")) from None
    return text


def schedule(text: str) -> str:
    from autoshard.cost import make_schedule
    from autoshard.program import check_schedule

    try:
        if text.partition(":")[0] in ("1f1b", "interleaved"):
            return str(make_schedule(text, 2, 2))
        return check_schedule(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error).removesuffix(".")) from None


def xla_flags(text: str) -> tuple[str, ...] | str:
    from autoshard.cost import FLAG_SETS, read_flags

    try:
        return text if text in FLAG_SETS else read_flags(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error).removesuffix(".")) from None


def or_auto(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """The same, or `auto`, which leaves the choice to the planner."""

    def parse_or_auto(text: str) -> Any:
        return text if text == "auto" else parse(text)

    return parse_or_auto


def remats(text: str) -> list[str]:
    """`none,full,keep=q_proj`: what keeps or offloads belongs to the one before."""
    joined: list[str] = []
    for part in text.split(","):
        if joined and part.strip().startswith(("keep=", "offload=")):
            joined[-1] += f",{part.strip()}"
        else:
            joined.append(part.strip())
    if not all(joined):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list A,B,...")
    return [remat(part) for part in dict.fromkeys(joined)]


class Prices(dict[str, float]):
    """Prices by chip, and the file that says them."""

    file: str | None = None


def prices(text: str) -> Prices:
    """`v5p=4.2,v6e=2.7`, or a file of JSON with the same: `{"v5p": 4.2, "v6e": 2.7}`."""
    if text.endswith(".json"):
        return _priced(text)
    found = Prices()
    for part in texts(text):
        chip, equals, price = (piece.strip() for piece in part.partition("="))
        if not chip or not equals:
            raise argparse.ArgumentTypeError(f"{part!r} is not CHIP=PRICE, such as v5e=1.2, or a file PRICES.json")
        found[chip] = factor(price)
    return found


def _priced(path: str) -> Prices:
    from autoshard.base.files import read_json

    try:
        data = read_json(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict) or not data:
        raise argparse.ArgumentTypeError(f'{path} is no object of prices, such as {{"v5e": 1.2}}')
    for chip, price in data.items():
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 < price < float("inf"):
            raise argparse.ArgumentTypeError(f"{path}: the price of {chip} is {price!r}, expected a positive number")
    found = Prices({chip: float(price) for chip, price in data.items()})
    found.file = path
    return found


_SCALES = {"k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def tokens(text: str) -> float:
    """A number of tokens: `15T`, `300B`, `5e9`."""
    scale = _SCALES.get(text[-1:], None)
    with contextlib.suppress(ValueError):
        value = float(text[:-1]) * scale if scale else float(text)
        if 1 <= value < 1e21:
            return value
    raise argparse.ArgumentTypeError(f"{_short(text)} is not a number of tokens from 1 on, such as 15T, 300B or 5e9")


MOST = 2**31 - 1
"""Of what is counted: frameworks number tokens and rows in 32 bits."""


def positive(text: str) -> int:
    with contextlib.suppress(ValueError):
        if 0 < (value := int(text)) <= MOST:
            return value
        if value > MOST:
            raise argparse.ArgumentTypeError(f"{_short(text)} is more than {MOST}")
    raise argparse.ArgumentTypeError(f"{_short(text)} is not a positive whole number")


def whole(text: str) -> int:
    """Any whole number of 64 bits."""
    with contextlib.suppress(ValueError):
        if -(2**63) <= (value := int(text)) < 2**63:
            return value
    raise argparse.ArgumentTypeError(f"{_short(text)} is not a whole number of 64 bits")


def _short(text: str) -> str:
    """What the user wrote, in quotes; of thousands of digits the first ones."""
    return repr(text) if len(text) <= 60 else f"{text[:40]!r}... ({len(text)} characters)"


def _above_zero(text: str, what: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not {what}")


def seconds(text: str) -> float:
    return _above_zero(text, "a positive number of seconds")


_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def latency(text: str) -> float:
    """`500ms`, `0.5s`; a bare number is of seconds."""
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    with contextlib.suppress(argparse.ArgumentTypeError):
        return _above_zero(text.removesuffix(unit), "") * _UNITS.get(unit, 1.0)
    raise argparse.ArgumentTypeError(f"{_short(text)} is not a time above zero, such as 500ms or 0.5s")


def seconds_or_none(text: str) -> float:
    return float("inf") if text == "inf" else seconds(text)


def tolerance(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")


def roles(text: str) -> dict[str, str]:
    """`params=parameter,arg3-arg5=batch` by name; what the roles are called is checked where they are used."""
    found: dict[str, str] = {}
    for part in text.split(","):
        names, equals, role = (piece.strip() for piece in part.partition("="))
        if not names or not equals or not role:
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=ROLE, such as params=parameter")
        span = re.fullmatch(r"(.*?)(\d+)-\1(\d+)", names)
        if span is None:
            found[names] = role
            continue
        if max(len(span[2]), len(span[3])) > 6:
            raise argparse.ArgumentTypeError(f"{_short(names)} counts further than there are arguments")
        first, last = int(span[2]), int(span[3])
        if first > last:
            raise argparse.ArgumentTypeError(f"{names!r} ends before it begins")
        found |= {f"{span[1]}{number}": role for number in range(first, last + 1)}
    return found


def factor(text: str) -> float:
    return _above_zero(text, "a positive number")


def gib(text: str) -> int:
    if (value := _above_zero(text, "a positive number of GiB")) < 2**63 / GIB:
        return max(1, int(value * GIB))
    raise argparse.ArgumentTypeError(f"{text!r} is more GiB than there can be")
