"""Sweeps: plans of one program for several topologies, batches and remat policies."""

import concurrent.futures
import dataclasses
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict, Unpack

import msgspec

from autoshard.base.files import read_json, write_whole
from autoshard.base.worker_pool import as_ended
from autoshard.cost import find_topologies
from autoshard.errors import UserError
from autoshard.planning.capacity.sweep_choice import SweepRow
from autoshard.planning.capacity.sweep_task import MadeRow, SweepTask, impossible, run_task
from autoshard.planning.space.plan_options import PlanOptions
from autoshard.program import read_config


FORMAT = "autoshard-sweep"
ROWS = "sweep.json"
"""Name of the file of rows in a sweep's folder."""


class Assumptions(TypedDict, total=False):
    """Assumptions of a sweep's user, with which its rows become days and costs."""

    tokens: float
    """Tokens of a whole run."""
    prices: dict[str, float]
    """Price of a chip's hour by name of the chip."""


class _SweepFile(TypedDict):
    """Content of a sweep's file: rows by key."""

    format: Annotated[str, msgspec.Meta(pattern=f"^{FORMAT}$")]
    rows: dict[str, SweepRow]
    assumptions: NotRequired[Assumptions]


def sweep(
    source: str,
    *,
    topologies: Sequence[str],
    batches: Sequence[int] = (),
    remats: Sequence[str] = (),
    program_options: Mapping[str, Any] | None = None,
    executor: concurrent.futures.Executor | None = None,
    path: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] | None = None,
    **options: Unpack[PlanOptions],
) -> list[SweepRow]:
    """Plan `source` (as the command accepts it) for every topology, batch and remat policy; return the rows in that
    order, the topology outermost.

    - `topologies`: names or patterns (`v5e:*`, see `autoshard.cost.find_topologies`); repeated names count once.
    - `batches`, `remats`: values to try; empty leaves them to `program_options`.
    - `program_options`: options of the source (`train`, `seq`, ..., `entry` and `roles` of a file). `batch`, `remat`
      and the other options that `autoshard.plan` may choose may be `"auto"`. `rules` names a file of rules. `kept` lets
      traced programs and their ops come from the cache on disk.
    - `executor`: any executor with the interface of `concurrent.futures`, also of a cluster; each row is one task.
      Without an executor the rows are planned here, one after the other.
    - `path`: file that stores the rows as they are made. A later run of the same sweep, or of a larger one, reads them
      from it, failed rows included. A folder, or a path without a suffix, also stores the plan of each row, next to
      `sweep.json`.
    - `progress`: receives a line for each row as it is finished, after one line for all rows that `path` already has.
    - `options`: further options of `autoshard.plan` (`mesh`, `memory_limit`, `time_limit`, ...).

    Raises `UserError` for an unknown topology or configuration, and for a file of another kind. Raises it also for
    options, such as `mesh`, that suit no topology of the list, and if `path` cannot be read or written. It is raised
    for workers that die repeatedly, or that read another program or other figures than this process. Failures of one
    row are reported in that row.
    """
    store = _Store(path)
    say = progress or (lambda line: None)
    names = list(dict.fromkeys(each.name for pattern in topologies for each in find_topologies(pattern)))
    refusals = [impossible(name, options) for name in names]
    if refusals and all(refusals):
        raise UserError(refusals[0])
    base = {key: value for key, value in (program_options or {}).items() if value is not None}
    entry, rules, kept = base.pop("entry", "program"), base.pop("rules", None), bool(base.pop("kept", False))
    if source.startswith("hf:"):
        read_config(source.removeprefix("hf:"))  # reject an unknown configuration once for all rows
    rows: dict[tuple[str, int, int], SweepRow] = {}
    tasks: list[tuple[SweepTask, int, int]] = []
    for (b, batch), (r, remat) in itertools.product(enumerate(batches or (None,)), enumerate(remats or (None,))):
        swept = {k: v for k, v in (("batch", batch), ("remat", remat)) if v is not None}
        arguments = tuple(sorted({**base, **swept}.items()))
        for name in names:
            task = SweepTask(source, entry, arguments, (name,), tuple(sorted(options.items())), rules, kept)
            key = task.key(name)
            row = store.row(key)
            if row is None:
                tasks.append((dataclasses.replace(task, keys=(key,)), b, r))
            else:
                rows[name, b, r] = row
    if rows:
        say(f"{len(rows)} of {len(rows) + len(tasks)} rows are in {path} already")
    done, total = len(rows), len(rows) + len(tasks)
    for task, b, r, made in _results(tasks, executor):
        done += 1
        (name,) = task.topologies
        row = rows[name, b, r] = store.keep(task.keys[0], made)
        outcome = row.failed or f"{row.step_time_s:.4g} s"
        say(f"{done}/{total} {name}{'' if row.batch is None else f', batch {row.batch}'}: {outcome}")
    count = (range(max(1, len(batches))), range(max(1, len(remats))))
    return [rows[name, b, r] for name in names for b in count[0] for r in count[1]]


def _results(
    tasks: Sequence[tuple[SweepTask, int, int]], executor: concurrent.futures.Executor | None
) -> Iterator[tuple[SweepTask, int, int, MadeRow]]:
    """Yield each task with its indices of batch and remat policy, and its row.

    Rows come in the order in which the executor's workers finish them; without an executor they are made here in order.
    Raises `UserError` if workers die repeatedly, and as `run_task` does for an executor.
    """
    if executor is None:
        for task, b, r in tasks:
            (made,) = task.make()
            yield task, b, r, made
        return
    try:
        for number, (made,) in as_ended(executor, run_task, [task for task, _, _ in tasks]):
            yield *tasks[number], made
    except concurrent.futures.BrokenExecutor as error:
        raise UserError(
            f"a worker of the sweep died ({error}): run it again with fewer --jobs; finished rows are saved."
        ) from error


class _Store:
    """Store of rows by key in a file, and of their plans in a folder; without a path it stores nothing."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        """Read the rows that `path` already has; raise `UserError` as `read_sweep` does.

        A path that is a folder or has no suffix is the folder of plans, with the rows in its `sweep.json`.
        """
        self.path = None if path is None else Path(path)
        self.folder: Path | None = None
        if self.path is not None and (self.path.is_dir() or not self.path.suffix):
            self.folder, self.path = self.path, self.path / ROWS
        self.rows, self.assumptions = ({}, Assumptions()) if self.path is None else _read(self.path)

    def row(self, key: str) -> SweepRow | None:
        """Return the stored row, also one that failed. Return None if the row is missing, or if the folder lacks the
        plan of a row that did not fail.
        """
        row = self.rows.get(key)
        if row is None or self.folder is None or row.failed:
            return row
        return row if row.plan and (self.folder / row.plan).is_file() else None

    def keep(self, key: str, made: MadeRow) -> SweepRow:
        """Store a row after its plan, so that every stored row has its plan on disk; return the row with the plan's
        file name.

        The plan is written only if the store has a folder, and the file of rows is rewritten each time. Without a path,
        return the row unchanged. Raises `UserError` if the files cannot be written.
        """
        row = made.row
        if self.path is None:
            return row
        try:
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
                if made.plan:
                    row = dataclasses.replace(row, plan=self._name(row, key))
                    write_whole(self.folder / row.plan, made.plan.encode())
            self.rows[key] = row
            self.write()
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}.") from error
        return row

    def write(self) -> None:
        """Write rows, sorted by key, and assumptions as JSON to a temporary file and rename it; equal rows give equal
        bytes.
        """
        assert self.path is not None
        body = {key: dataclasses.asdict(self.rows[key]) for key in sorted(self.rows)}
        text: dict[str, Any] = {"format": FORMAT, "rows": body}
        if self.assumptions:
            text["assumptions"] = self.assumptions
        write_whole(self.path, (json.dumps(text, indent=1) + "\n").encode())

    def _name(self, row: SweepRow, key: str) -> str:
        """Return a file name from topology, batch and remat policy, such as `v5e-4x4-batch-8.plan.json`. A number from
        2 is added if the row of another key has that name.
        """
        parts = [row.topology, row.batch and f"batch {row.batch}", row.remat and f"remat {row.remat}"]
        stem = re.sub(r"[^0-9A-Za-z_.-]+", "-", "-".join(str(part) for part in parts if part))[:100]
        used = {each.plan for other, each in self.rows.items() if other != key}
        numbers = itertools.chain([""], (f".{n}" for n in itertools.count(2)))
        return next(name for number in numbers if (name := f"{stem}{number}.plan.json") not in used)


def _read(path: Path) -> tuple[dict[str, SweepRow], Assumptions]:
    """Return the rows and the assumptions of a sweep's file as `read_sweep` does; none if there is no file."""
    if not path.exists():
        return {}, Assumptions()
    return read_sweep(path), read_assumptions(path)


def read_sweep(path: str | os.PathLike[str]) -> dict[str, SweepRow]:
    """Return the rows of a sweep's file or folder by key, in the order of the file.

    Raises `UserError` for a file that is missing or cannot be read. Raises it also for one that no sweep wrote, or with
    fields that a row does not have.
    """
    return _file(path)["rows"]


def read_assumptions(path: str | os.PathLike[str]) -> Assumptions:
    """Return the assumptions in a sweep's file or folder, empty without any; raise `UserError` as `read_sweep` does."""
    return _file(path).get("assumptions", Assumptions())


def keep_assumptions(path: str | os.PathLike[str], assumptions: Assumptions) -> None:
    """Add assumptions to the file or folder of a sweep, over those that it has; without any, nothing is written.

    Raises `UserError` as `read_sweep` does, and if the file cannot be written.
    """
    if not assumptions:
        return
    store = _Store(path)
    store.assumptions |= assumptions
    try:
        store.write()
    except OSError as error:
        raise UserError(f"cannot write {store.path}: {error.strerror}.") from error


def _file(path: str | os.PathLike[str]) -> _SweepFile:
    """Return the content of a sweep's file or folder. Raises `UserError` as `read_sweep` does."""
    if Path(path).is_dir():
        path = Path(path) / ROWS
    foreign = f"{path} is not a file that `autoshard sweep --out` wrote; name another one, or remove it."
    try:
        text = read_json(path)
        content = msgspec.convert(text, _SweepFile)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(foreign) from error
    known = {field.name for field in dataclasses.fields(SweepRow)}
    # msgspec ignores unknown keys of a dataclass, and the next run would write the file without them.
    if any(row.keys() - known for row in text["rows"].values()):
        raise UserError(foreign)
    return content


def is_sweep(path: str | os.PathLike[str]) -> bool:
    """Return True if a path is the folder of a sweep (it has `sweep.json`), or a file that `sweep` wrote.

    A file counts by the `format` entry in its first 64 bytes; its rows are not checked. Return False for a path that
    cannot be read.
    """
    file = Path(path)
    if file.is_dir():
        return (file / ROWS).is_file()
    try:
        with open(file, "rb") as opened:
            return f'"format": "{FORMAT}"'.encode() in opened.read(64)
    except OSError:
        return False
