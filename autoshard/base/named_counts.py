"""Options that are numbers by name, such as `tokens=4,vocabulary=8`."""

import re
from collections.abc import Sequence

from autoshard.errors import UserError


def read_counts(option: str, text: str, names: Sequence[str], form: str) -> dict[str, int]:
    """Return the numbers of an option's text by name; a number alone is that of the vocabulary.

    Raises `UserError` for unknown and repeated names, and for numbers below 1.

    - `option`: the option as users type it, such as `--pad`.
    - `form`: examples that the message shows.
    """
    numbers: dict[str, int] = {}
    for part in (f"vocabulary={text}" if re.fullmatch(r"\d+", text) else text).split(","):
        match = re.fullmatch(rf"({'|'.join(names)})=([1-9]\d*)", part.strip())
        if match is None or match[1] in numbers:
            raise UserError(f"{option} `{text}` is not of the form {form}.")
        numbers[match[1]] = int(match[2])
    return numbers
