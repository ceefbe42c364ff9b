"""Parsers of option values; each raises `argparse.ArgumentTypeError` with a clause that describes the wrong value."""

import argparse
import contextlib
import re
from collections.abc import Callable
from typing import Any

from autoshard.base.units import GIB
from autoshard.errors import UserError


def pair(form: str) -> Callable[[str], tuple[str, str]]:
    """Return a parser of `LEFT=RIGHT`, both not blank; `form` describes it in errors."""

    def parse_pair(text: str) -> tuple[str, str]:
        """Split the text at its first `=`, and strip both sides."""
        left, equals, right = text.partition("=")
        if not (left.strip() and equals and right.strip()):
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form {form}")
        return left.strip(), right.strip()

    return parse_pair


def texts(text: str) -> list[str]:
    """Parse a list `A,B,...` without blank items; strip items and drop duplicates, in the given order."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list A,B,...")
    return list(dict.fromkeys(parts))


def option(text: str) -> tuple[str, str | float | bool]:
    """Parse `KEY=VALUE` into the key and a number, a truth value or a text."""
    key, equals, value = (part.strip() for part in text.partition("="))
    if not (key and equals and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    if value.lower() in ("true", "false"):
        return key, value.lower() == "true"
    for read in (int, float):
        with contextlib.suppress(ValueError):
            return key, read(value)
    return key, value


def numbers(text: str) -> list[int]:
    """Parse a list `8,16,...` of positive whole numbers."""
    return [positive(part) for part in texts(text)]


def _checked(parse: Callable[[str], object], text: str) -> str:
    """Return a text as it is if `parse` reads it; raise argparse's error with the sentence of its `UserError`."""
    try:
        parse(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error).removesuffix(".")) from None
    return text


def remat(text: str) -> str:
    """Check a remat variant with `parse_remat` and return it as it is."""
    from autoshard.program import parse_remat

    return _checked(parse_remat, text)


def experts(text: str) -> str:
    """Check a dispatch of tokens to experts, such as `slots` or `sorted:8`, and return it as it is."""
    from autoshard.program import parse_experts

    return _checked(parse_experts, text)


def lora(text: str) -> str:
    """Check the options of low-rank adapters, such as `r=16,targets=q_proj/v_proj`, and return them as they are."""
    from autoshard.program import parse_lora

    return _checked(parse_lora, text)


def loss_chunks(text: str) -> str:
    """Check numbers of chunks of the loss, such as `8` or `tokens=4,vocabulary=8`, and return them as they are."""
    from autoshard.program import parse_loss_chunks

    return _checked(parse_loss_chunks, text)


def sampling(text: str) -> str:
    """Check a selection of tokens, such as `greedy` or `top_k=50,top_p=0.9`, and return it as it is."""
    from autoshard.program import parse_sampling

    return _checked(parse_sampling, text)


def padding(text: str) -> str:
    """Check numbers of which sizes become multiples, such as `128` or `heads=8`, and return them as they are."""
    from autoshard.program import parse_padding

    return _checked(parse_padding, text)


def schedule(text: str) -> str:
    """Check a pipeline schedule and return its canonical name: `interleaved:2` for `interleaved`."""
    from autoshard.cost import ZERO_BUBBLE, make_schedule
    from autoshard.program import check_schedule

    try:
        if text.partition(":")[0] in ("1f1b", "interleaved", ZERO_BUBBLE):
            return str(make_schedule(text, 2, 2))
        return check_schedule(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error).removesuffix(".")) from None


def xla_flags(text: str) -> tuple[str, ...] | str:
    """Return the name of a set of compiler flags (`FLAG_SETS`) as it is; parse other text into flags `--name=value`."""
    from autoshard.cost import FLAG_SETS, read_flags

    try:
        return text if text in FLAG_SETS else read_flags(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error).removesuffix(".")) from None


def or_auto(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser that also accepts `auto`, which leaves the choice to the planner."""

    def parse_or_auto(text: str) -> Any:
        """Return `auto` as it is, and parse any other text."""
        return text if text == "auto" else parse(text)

    return parse_or_auto


def remats(text: str) -> list[str]:
    """Parse a list of remat variants, and drop duplicates: `none,full,keep=q_proj` is `none` and `full,keep=q_proj`.

    An item `keep=` or `offload=` belongs to the one before it.
    """
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
    """Price of one hour of a chip by its name, and the file that lists them; None if the prices stood in the option."""

    file: str | None = None
    """Path of the JSON file, None without one."""


def prices(text: str) -> Prices:
    """Parse `v5p=4.2,v6e=2.7`, or the name of a JSON file with the same content: `{"v5p": 4.2, "v6e": 2.7}`.

    Prices are positive and finite. Names of chips are not checked here, and a later price of a chip counts.
    """
    if text.endswith(".json"):
        return _priced(text)
    by_chip = Prices()
    for part in texts(text):
        chip, equals, price = (piece.strip() for piece in part.partition("="))
        if not chip or not equals:
            raise argparse.ArgumentTypeError(f"{part!r} is not CHIP=PRICE, such as v5e=1.2, or a file PRICES.json")
        by_chip[chip] = factor(price)
    return by_chip


def _priced(path: str) -> Prices:
    """Read the prices in a JSON file, at least one, each a positive finite number."""
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
    by_chip = Prices({chip: float(price) for chip, price in data.items()})
    by_chip.file = path
    return by_chip


_SCALES = {"k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
"""Suffix of a number of tokens -> its factor."""


def tokens(text: str) -> float:
    """Parse a number of tokens from 1 to 1e21: `15T`, `300B`, `5e9`; the suffixes are k, M, B or G, and T."""
    scale = _SCALES.get(text[-1:], None)
    with contextlib.suppress(ValueError):
        value = float(text[:-1]) * scale if scale else float(text)
        if 1 <= value < 1e21:
            return value
    raise argparse.ArgumentTypeError(f"{_short(text)} is not a number of tokens from 1 on, such as 15T, 300B or 5e9")


MOST = 2**31 - 1
"""Largest count that an option accepts, since frameworks number tokens and rows in 32 bits."""


def positive(text: str) -> int:
    """Parse a positive whole number up to `MOST`."""
    with contextlib.suppress(ValueError):
        if 0 < (value := int(text)) <= MOST:
            return value
        if value > MOST:
            raise argparse.ArgumentTypeError(f"{_short(text)} is more than {MOST}")
    raise argparse.ArgumentTypeError(f"{_short(text)} is not a positive whole number")


def whole(text: str) -> int:
    """Parse a whole number of 64 bits, which may be negative."""
    with contextlib.suppress(ValueError):
        if -(2**63) <= (value := int(text)) < 2**63:
            return value
    raise argparse.ArgumentTypeError(f"{_short(text)} is not a whole number of 64 bits")


def _short(text: str) -> str:
    """Quote the user's text for a message; shorten it if it is longer than 60 characters."""
    return repr(text) if len(text) <= 60 else f"{text[:40]!r}... ({len(text)} characters)"


def _above_zero(text: str, what: str) -> float:
    """Parse a finite positive number; `what` names it in the error."""
    with contextlib.suppress(ValueError):
        if 0 < (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not {what}")


def seconds(text: str) -> float:
    """Parse a positive, finite number of seconds, without a unit."""
    return _above_zero(text, "a positive number of seconds")


_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
"""Unit of a time -> seconds."""


def latency(text: str) -> float:
    """Parse a positive time such as `500us`, `500ms` or `0.5s` into seconds; a number needs a unit."""
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    try:
        value = _above_zero(text.removesuffix(unit), "")
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{_short(text)} is not a time above zero, such as 500ms or 0.5s") from None
    if not unit:
        raise argparse.ArgumentTypeError(f"{_short(text)} has no unit: write {text}ms or {text}s")
    return value * _UNITS[unit]


def seconds_or_none(text: str) -> float:
    """Parse a positive number of seconds; the text `inf` is infinity and stands for no limit."""
    return float("inf") if text == "inf" else seconds(text)


def tolerance(text: str) -> float:
    """Parse a finite number from 0 up."""
    with contextlib.suppress(ValueError):
        if 0 <= (value := float(text)) < float("inf"):
            return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")


def roles(text: str) -> dict[str, str]:
    """Parse roles by argument name: `params=parameter,arg3-arg5=batch`, a span for each argument in it.

    A later role of a name replaces an earlier one. The caller checks that the roles exist.
    """
    by_name: dict[str, str] = {}
    for part in text.split(","):
        names, equals, role = (piece.strip() for piece in part.partition("="))
        if not names or not equals or not role:
            raise argparse.ArgumentTypeError(f"{part!r} is not NAME=ROLE, such as params=parameter")
        span = re.fullmatch(r"(.*?)(\d+)-\1(\d+)", names)
        if span is None:
            by_name[names] = role
            continue
        if max(len(span[2]), len(span[3])) > 6:
            raise argparse.ArgumentTypeError(f"{_short(names)} counts further than there are arguments")
        first, last = int(span[2]), int(span[3])
        if first > last:
            raise argparse.ArgumentTypeError(f"{names!r} ends before it begins")
        by_name |= {f"{span[1]}{number}": role for number in range(first, last + 1)}
    return by_name


def factor(text: str) -> float:
    """Parse a positive, finite number."""
    return _above_zero(text, "a positive number")


def gib(text: str) -> int:
    """Parse a positive number of gibibytes into whole bytes, at least 1 and below 2**63."""
    if (value := _above_zero(text, "a positive number of GiB")) < 2**63 / GIB:
        return max(1, int(value * GIB))
    raise argparse.ArgumentTypeError(f"{text!r} is more GiB than there can be")
