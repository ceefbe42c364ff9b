"""Worked questions with known answers, and our answers by calls of the cost model.

Every row of `questions.json` has a setting and an answer from a book. The function that is registered under the row's
id computes our answer from the setting, and never from the book's answer.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from autoshard.base.files import read_json
from autoshard.errors import UserError
from autoshard.validation import machine_answers, model_answers
from autoshard.validation.answer_register import ANSWERS


_FILE = pathlib.Path(__file__).with_name("questions.json")
_KEYS = {"id", "kind", "setting", "answer", "unit", "tolerance", "trust", "source"}
"""Keys that a row must have."""
_REGISTERED = (machine_answers, model_answers)
"""Modules that register their answers when they are imported."""


@dataclasses.dataclass(frozen=True, slots=True)
class QuestionRow:
    """One worked question, with our answer and the book's."""

    id: str
    kind: str
    """Group of questions, such as `training` or `inference`."""
    question: str
    """The docstring of the function that answers it; empty without one."""
    ours: float | None
    """Our answer; None without one."""
    theirs: float
    """Answer that the book gives."""
    unit: str
    tolerance: float
    """Largest difference of the answers, as a share of the book's."""
    trust: str
    """`use` if the question counts, another word if its answer is unreliable."""
    source: str
    skipped: str = ""
    """Reason why we have no answer; empty otherwise."""

    @property
    def delta_percent(self) -> float | None:
        """Difference of our answer from the book's, in percent of the book's, which is not 0; None without ours."""
        return None if self.ours is None else 100.0 * (self.ours - self.theirs) / self.theirs

    @property
    def within(self) -> bool:
        """True if our answer is within the row's tolerance; a tolerance of zero allows rounding errors.

        It is False without our answer.
        """
        if self.ours is None:
            return False
        return abs(self.ours - self.theirs) <= max(self.tolerance, 1e-9) * abs(self.theirs)


class _UnstatedError(KeyError):
    """Error for a key that a question's setting lacks."""


class _Setting(dict[str, Any]):
    """Setting of a question; it and the objects in it raise `_UnstatedError` for a key that they lack."""

    def __init__(self, stated: Mapping[str, Any]) -> None:
        super().__init__({key: _Setting(each) if isinstance(each, dict) else each for key, each in stated.items()})

    def __missing__(self, key: str) -> Any:
        """Raise `_UnstatedError` for `key`."""
        raise _UnstatedError(key)


def validate_questions(path: str | pathlib.Path | None = None, bad: list[str] | None = None) -> tuple[QuestionRow, ...]:
    """Answer every question of a file (default: the shipped file), and return our answers with the known ones.

    Rows of unknown form are left out if there is a list `bad`, to which their errors are added. Raises: UserError for a
    file that cannot be read, and without `bad` for a row of unknown form.
    """
    file = _FILE if path is None else pathlib.Path(path)
    try:
        document = read_json(file)
    except OSError as error:
        raise UserError(f"question file {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"question file {file} is not JSON: {error}") from error
    rows = document.get("rows") if isinstance(document, dict) else document
    if not isinstance(rows, list):
        raise UserError(f"question file {file} holds no list of rows")
    answered = []
    for number, row in enumerate(rows):
        try:
            answered.append(_answer(row, f"{file}, row {number}"))
        except UserError as error:
            if bad is None:
                raise
            bad.append(str(error))
    return tuple(answered)


def _answer(row: Any, origin: str) -> QuestionRow:
    """Answer the question of a row; `origin` is the file and number for error messages.

    Without a registered function, if the setting lacks a key, or if the function cannot use a value, `skipped` has the
    reason. Raises `UserError` for a row of unknown form, and for an answer of 0.
    """
    missing = sorted(_KEYS - row.keys()) if isinstance(row, dict) else sorted(_KEYS)
    if missing:
        raise UserError(f"{origin} of the worked questions misses {', '.join(missing)}")
    if not isinstance(row["setting"], dict):
        raise UserError(f"{origin} ({row['id']}): setting is {row['setting']!r}, expected an object")
    for key in ("answer", "tolerance"):
        if isinstance(row[key], bool) or not isinstance(row[key], int | float):
            raise UserError(f"{origin} ({row['id']}): {key} is {row[key]!r}, expected a number")
    if row["answer"] == 0:
        raise UserError(f"{origin} ({row['id']}): answer is 0, expected another number: errors are shares of it")
    known = ANSWERS.get(row["id"])
    ours: float | None = None
    question, skipped = "", f"no call is mapped to the id {row['id']}"
    if known is not None:
        question, skipped = (known.__doc__ or "").strip(), ""
        try:
            ours = known(_Setting(row["setting"]))
        except _UnstatedError as error:
            skipped = f"its setting does not say {error.args[0]}"
        except KeyError as error:
            skipped = f"no answer follows from its setting: {type(error).__name__} {error}"
    return QuestionRow(
        row["id"],
        row["kind"],
        question,
        ours,
        row["answer"],
        row["unit"],
        row["tolerance"],
        row["trust"],
        row["source"],
        skipped,
    )
