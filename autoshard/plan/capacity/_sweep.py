"""What if: one program on several topologies, with several batches and remat variants, each planned."""

import concurrent.futures
import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

import autoshard
from autoshard.base.files import write_whole
from autoshard.base.reading import read_json
from autoshard.cost import Topology, chosen_flags, learned_fit, said_of_fit
from autoshard.errors import UserError
from autoshard.plan._make import check_request, make_plan
from autoshard.plan.model._choices import settled_options
from autoshard.plan.model._options import PlanOptions, read_options
from autoshard.program import Program, load_rules, open_source


FORMAT = "autoshard-sweep"


@dataclasses.dataclass(frozen=True, slots=True)
class SweepRow:
    """One plan of a sweep. Times in seconds, sizes in bytes of one device."""

    topology: str
    batch: int | None
    """The batch that was asked for; None where the program says it itself."""
    remat: str | None
    failed: str = ""
    """Why there is no plan; empty if there is one."""
    mesh: str = ""
    step_time_s: float | None = None
    mfu: float | None = None
    peak_bytes: int | None = None
    memory_limit_bytes: int | None = None
    chips: int | None = None
    tokens: int | None = None
    """Tokens of one step; None where the program does not say."""
    words: tuple[str, ...] = ()

    @property
    def headroom_bytes(self) -> int | None:
        """What is left of one device's memory."""
        if self.peak_bytes is None or self.memory_limit_bytes is None:
            return None
        return self.memory_limit_bytes - self.peak_bytes

    @property
    def seconds_per_token(self) -> float | None:
        """Step time over the tokens of a step."""
        return None if not self.tokens or self.step_time_s is None else self.step_time_s / self.tokens

    def price_per_token(self, prices: Mapping[str, float]) -> float | None:
        """In the currency of `prices`, which are per chip and hour by the name of the chip."""
        chip = self.topology.partition(":")[0]
        seconds = self.seconds_per_token
        if seconds is None or self.chips is None or chip not in prices:
            return None
        return prices[chip] * self.chips * seconds / 3600


@dataclasses.dataclass(frozen=True, slots=True)
class SweepTask:
    """One program, to be planned on several topologies: what is traced once. It can be pickled."""

    source: str
    entry: str
    options: tuple[tuple[str, Any], ...]
    topologies: tuple[str, ...]
    planning: tuple[tuple[str, Any], ...]
    rules: str | None = None
    kept: bool = False
    """Whether programs and their ops come from the cache on disk where they are there."""

    def run(self) -> list[SweepRow]:
        """A row for each topology; one that cannot be planned says why."""
        named, planning = dict(self.options), self._planning()
        blank = SweepRow("", named.get("batch"), named.get("remat"))
        why = {each: _impossible(each, planning, named) for each in self.topologies}
        if all(why.values()):
            return [dataclasses.replace(blank, topology=each, failed=text) for each, text in why.items()]
        try:
            if self.rules is not None:
                load_rules(self.rules)
            settled = {each: settled_options(named, each) for each in self.topologies if not why[each]}
            programs = {repr(own): self._open(own) for own in settled.values()}
        except UserError as error:
            return [dataclasses.replace(blank, topology=each, failed=str(error)) for each in self.topologies]
        return [
            dataclasses.replace(blank, topology=each, failed=why[each])
            if why[each]
            else self._row(programs[repr(settled[each])], dataclasses.replace(blank, topology=each))
            for each in self.topologies
        ]

    def _open(self, options: Mapping[str, Any]) -> Program:
        return open_source(self.source, entry=self.entry, kept=self.kept and self.rules is None, **options)

    def _planning(self) -> PlanOptions:
        said: Any = dict(self.planning)
        return said

    def _row(self, program: Program, blank: SweepRow) -> SweepRow:
        try:
            plan = make_plan(program, read_options(blank.topology, self._planning()), kept=self.kept).plan
        except UserError as error:
            return dataclasses.replace(blank, failed=str(error))
        return dataclasses.replace(
            blank,
            mesh=",".join(f"{axis}={size}" for axis, size in plan.mesh.items()),
            step_time_s=plan.prediction.step_time_s,
            mfu=plan.prediction.mfu,
            peak_bytes=plan.prediction.peak_bytes,
            memory_limit_bytes=plan.memory_limit_bytes,
            chips=Topology.parse(blank.topology).num_chips,
            tokens=program.tokens,
            words=plan.words,
        )

    def key(self, topology: str) -> str:
        """What decides a row, as text: equal keys have equal rows."""
        file = Path(self.source)
        content = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
        said = [self.source, content, self.entry, self.options, topology, self.planning, autoshard.__version__]
        parsed, planning = Topology.parse(topology), dict(self.planning)
        flags, _ = chosen_flags(planning.get("xla_flags"), parsed.chip)
        learned = learned_fit(parsed, flags) if planning.get("calibration", True) else None
        if learned is not None and learned.observations:
            said.append(said_of_fit(learned))
        return json.dumps(said, sort_keys=True)


def _impossible(topology: str, planning: PlanOptions, program: Mapping[str, Any] | None = None) -> str:
    """Why no program, or none with the options `program`, can be planned for a topology so; empty if one may."""
    try:
        check_request(read_options(topology, planning))
        settled_options(program or {}, topology)
    except UserError as error:
        return str(error)
    return ""


def run_task(task: SweepTask) -> list[SweepRow]:
    """`task.run`, as a function that a worker process can import."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    return task.run()


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
    """Plan `source` (as the command takes it) for every topology, batch and remat variant; rows in that order.

    `program_options` are those of the source (`train`, `seq`, ..., `entry` and `roles` of a file), with `rules` for a
    file of rules, and `kept` where traced programs and their ops may come from the cache on disk; the further options
    are those of `autoshard.plan` (`mesh`, `memory_limit`, `time_limit`, ...). Each program is a task of `executor`, any
    of `concurrent.futures`' interface (one of a cluster too); without one they run here, one after the other. Rows are
    kept in the file `path` as they are made, and taken from it when the same sweep, or a larger one, is run again.

    Raises `UserError` for a topology that does not exist, a mesh that no topology of the list has, or a file of another
    kind; what fails in one row is said in that row.
    """
    known = _read(path)
    say = progress or (lambda line: None)
    names = [Topology.parse(topology).name for topology in topologies]
    why = [_impossible(name, options) for name in names]
    if why and all(why):
        raise UserError(why[0])
    base = {key: value for key, value in (program_options or {}).items() if value is not None}
    entry, rules, kept = base.pop("entry", "program"), base.pop("rules", None), bool(base.pop("kept", False))
    rows: dict[tuple[str, int, int], SweepRow] = {}
    tasks: list[tuple[SweepTask, int, int]] = []
    for (b, batch), (r, remat) in itertools.product(enumerate(batches or (None,)), enumerate(remats or (None,))):
        own = {k: v for k, v in (("batch", batch), ("remat", remat)) if v is not None}
        arguments = tuple(sorted({**base, **own}.items()))
        task = SweepTask(source, entry, arguments, tuple(names), tuple(sorted(options.items())), rules, kept)
        left = []
        for name in names:
            row = known.get(task.key(name))
            if row is None:
                left.append(name)
            else:
                rows[name, b, r] = row
        if left:
            tasks.append((dataclasses.replace(task, topologies=tuple(left)), b, r))
    if rows:
        say(f"{len(rows)} of {len(rows) + sum(len(t.topologies) for t, _, _ in tasks)} rows are in {path} already")
    for task, b, r, made in _results(tasks, executor):
        for row in made:
            rows[row.topology, b, r] = row
            known[task.key(row.topology)] = row
            said = row.failed or f"{row.step_time_s:.4g} s"
            say(f"{row.topology}{'' if row.batch is None else f', batch {row.batch}'}: {said}")
        _write(path, known)
    count = (range(max(1, len(batches))), range(max(1, len(remats))))
    return [rows[name, b, r] for name in names for b in count[0] for r in count[1]]


def _results(
    tasks: Sequence[tuple[SweepTask, int, int]], executor: concurrent.futures.Executor | None
) -> Iterator[tuple[SweepTask, int, int, list[SweepRow]]]:
    if executor is None:
        for task, b, r in tasks:
            yield task, b, r, task.run()
        return
    running = {executor.submit(run_task, task): (task, b, r) for task, b, r in tasks}
    for done in concurrent.futures.as_completed(running):
        task, b, r = running[done]
        try:
            made = done.result()
        except concurrent.futures.BrokenExecutor as error:
            raise UserError(
                f"a worker of the sweep died ({error}): run it again with fewer --jobs; what is done is kept."
            ) from error
        yield task, b, r, made


def _read(path: str | os.PathLike[str] | None) -> dict[str, SweepRow]:
    if path is None or not Path(path).exists():
        return {}
    try:
        data = read_json(path)
        if data["format"] != FORMAT:
            raise KeyError(FORMAT)
        return {key: SweepRow(**{**row, "words": tuple(row["words"])}) for key, row in data["rows"].items()}
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is not a file that `autoshard sweep --out` wrote; name another one, or remove it."
        ) from error


def _write(path: str | os.PathLike[str] | None, rows: Mapping[str, SweepRow]) -> None:
    if path is None:
        return
    body = {key: dataclasses.asdict(rows[key]) for key in sorted(rows)}
    try:
        write_whole(path, (json.dumps({"format": FORMAT, "rows": body}, indent=1) + "\n").encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}.") from error
