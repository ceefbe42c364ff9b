"""The command of an experiment: rows by name, each saved as soon as it is known, and a page of all of them.

Every script that runs an `Experiment` has these options: `--only`, `--again`, `--table` and `--out`.
"""

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from experiments.lib.saved_results import Results, checked_out


os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing here runs on an accelerator

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "experiments" / "results"

Rows = dict[str, Any]
"""Rows of an experiment by name."""


def own_parser(time_limit: float | None = None) -> argparse.ArgumentParser:
    """Make the parser of the script that runs, with the options of every experiment.

    `time_limit` is the default of `--time-limit`, for scripts that compile.
    """
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="rows whose name contains one of these")
    parser.add_argument("--again", action="store_true", help="also rows that are there")
    parser.add_argument("--table", action="store_true", help="only write the table of what is known")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="for rows and table")
    if time_limit is not None:
        parser.add_argument("--time-limit", type=float, default=time_limit, help="of one compilation, in seconds")
    parser.add_argument("--inside", metavar="ROW", help=argparse.SUPPRESS)
    return parser


@dataclasses.dataclass(kw_only=True)
class Experiment:
    """Rows of one script: their names, the work of each, and the page of all."""

    script: str
    """`__file__` of the script, by which its files in the folder of results are named."""
    names: Iterable[str]
    work: Callable[[str], Any]
    """Computes the row of a name; what it raises ends the run."""
    table: Callable[[Rows], str]
    """Writes the page of the known rows."""
    apart: bool = False
    """True if each row has a process of its own, whose failure the other rows survive."""
    limit_s: float | None = None
    """Seconds after which such a process ends, and its row is an error."""
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Additional variables of such a process."""
    is_wrong: Callable[[Any], bool] = lambda row: False
    """Returns True for a row by which the exit code is 1."""
    is_open: Callable[[Any], bool] = lambda row: False
    """Returns True for a known row that is computed again."""

    def run(self, given: argparse.Namespace | None = None) -> int:
        """Compute the rows that are asked for and missing; return the exit code."""
        given = own_parser().parse_args() if given is None else given
        if given.inside is not None:
            print(json.dumps(self.work(given.inside)))
            return 0
        results = Results(given.out / f"{Path(self.script).stem}.json")
        names, failed = list(self.names), []
        for name in () if given.table else chosen(names, given.only):
            if name in results.rows and not given.again and not self.is_open(results.rows[name]):
                continue
            began = time.monotonic()
            row = self._apart(name) if self.apart else self.work(name)
            if row is None:
                failed.append(name)
                continue
            if isinstance(row, dict):
                row = {"code": checked_out()} | row
            results.keep(name, row)
            print(f"{name}: {brief(row)} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
            self._write(names, results)
        print(self._write(names, results))
        return int(bool(failed) or any(self.is_wrong(results.rows[name]) for name in names if name in results.rows))

    def _write(self, names: list[str], results: Results) -> str:
        """Write the page of the known rows, in the order of their names, and return it."""
        text = self.table({name: results.rows[name] for name in names if name in results.rows})
        results.path.parent.mkdir(parents=True, exist_ok=True)
        results.path.with_suffix(".md").write_text(text)
        return text

    def _apart(self, name: str) -> Any:
        """Compute a row in a process of its own, with the options of this one; return None if it fails."""
        command = [sys.executable, self.script, *sys.argv[1:], "--inside", name]
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, timeout=self.limit_s, env=os.environ | self.environment
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not run within {self.limit_s:g} s"}
        if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            return {"error": "not finished within its limit of processor time"}
        if done.returncode:
            print(f"{name}: failed, exit code {done.returncode}", file=sys.stderr, flush=True)
            return None
        return json.loads(done.stdout.splitlines()[-1])


def chosen(names: Iterable[str], texts: Iterable[str] | None) -> list[str]:
    """Return the names that contain one of the texts, or all of them without texts.

    Ends the process with a sentence if a text is in none.
    """
    names = list(names)
    if texts is None:
        return names
    for text in texts:
        if not any(text in name for name in names):
            raise SystemExit(f"no row {text!r}; there are {', '.join(names)}")
    return [name for name in names if any(text in name for text in texts)]


def brief(row: Any) -> str:
    """Format the figures and short texts of a row for a line of progress."""
    if not isinstance(row, dict):
        return str(row)[:200]
    plain = {key: each for key, each in row.items() if isinstance(each, (bool, int, float, str)) and key != "code"}
    parts = (f"{key} {each:.4g}" if isinstance(each, float) else f"{key} {each}" for key, each in plain.items())
    return ", ".join(part[:80] for part in parts)[:300]


def page(*blocks: str | Iterable[str]) -> str:
    """Return a page of Markdown: blocks with an empty line between them; a list of lines is one block."""
    texts = (block if isinstance(block, str) else "\n".join(block) for block in blocks)
    return "\n\n".join(text.strip("\n") for text in texts if text) + "\n"


def grid(columns: str, rows: Iterable[Iterable[object]]) -> str:
    """Return a table in Markdown.

    - `columns`: heads with ` | ` between them; a head that ends with a colon is that of a column of numbers.
    - `rows`: cells of each row; a cell may have several, with ` | ` between them.
    """
    heads = columns.split(" | ")
    rule = " | ".join("---:" if head.endswith(":") else "---" for head in heads)
    lines = [" | ".join(head.removesuffix(":") for head in heads).lstrip(), rule]
    lines += [" | ".join(map(str, cells)) for cells in rows]
    return "\n".join(f"| {line} |" for line in lines)


def plain(text: object) -> str:
    """Format a text as one cell."""
    return " ".join(str(text).replace("|", "\\|").split("\n"))
