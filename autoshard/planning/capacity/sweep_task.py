"""Task of a sweep: one program to plan on topologies, sent to another process, and the rows that return."""

import dataclasses
import hashlib
import json
import math
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import autoshard
from autoshard.base.units import format_bytes
from autoshard.cost import OWN_FILE, Topology, chosen_flags, fit_record, learned_fit
from autoshard.errors import UserError
from autoshard.planning.capacity.sweep_choice import SweepRow
from autoshard.planning.plan_builder import Running, check_request
from autoshard.planning.recipes.plan_dispatch import NamedSource, plan_any
from autoshard.planning.record.plan_files import plan_to_json
from autoshard.planning.space.plan_options import AUTO, Options, PlanOptions, read_options, settled_options
from autoshard.program import HOSTS, Program, load_rules, open_source


MOST_OPEN = 4
"""Most programs that a process stores from one task to the next; the oldest is dropped."""
_open_programs: dict[str, Program] = {}
"""Programs of earlier tasks of this process, by the key of `SweepTask._open`, oldest first."""
SWEPT = ("batch", "remat")
"""Options of a source that have columns of their own in a row."""


@dataclasses.dataclass(frozen=True, slots=True)
class MadeRow:
    """A row, and its plan as the text of a file; the text is empty without a plan."""

    row: SweepRow
    plan: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class SweepTask:
    """One program, traced once and planned on several topologies. A task can be pickled."""

    source: str
    """Program to plan, as the command accepts it: a file, or `hf:` and a configuration."""
    entry: str
    """Name of the program in a file of Python."""
    options: tuple[tuple[str, Any], ...]
    """Options of the source (`batch`, `train`, ...), sorted by name."""
    topologies: tuple[str, ...]
    planning: tuple[tuple[str, Any], ...]
    """Options of planning (`mesh`, `time_limit`, ...), sorted by name."""
    rules: str | None = None
    """File of sharding rules to load before planning; None for no file."""
    kept: bool = False
    """True if programs and their ops may come from the cache on disk."""
    keys: tuple[str, ...] = ()
    """Key of each topology's row in the process that made the task (see `key`); empty to skip the comparison."""

    def check_same(self) -> None:
        """Raise `UserError` if this process reads another program or other figures than the process that made the task.

        Compares `key` of each topology with `keys`; without `keys` nothing is compared.
        """
        for topology, key in zip(self.topologies, self.keys, strict=False):
            if self.key(topology) != key:
                source, named = self._content(), json.loads(key)[: len(self._content())]
                what = f"{self.source} or a file that is read with it" if source != named else "what was learned"
                raise UserError(
                    f"{what} is not on {platform.node()} what it was where the sweep began, so that rows would not be "
                    "comparable: have the same there, and run it again."
                )

    def run(self) -> list[SweepRow]:
        """Return the rows of `make` without their plans, one for each topology, in order; a row without a plan has the
        reason.
        """
        return [made.row for made in self.make()]

    def make(self) -> Iterator[MadeRow]:
        """Yield a row with its plan for each topology, in order. Options that are `auto` are chosen as `autoshard.plan`
        does.

        A `UserError` while planning one topology becomes the `failed` text of that row; other exceptions propagate.
        """
        named, planning = dict(self.options), self._planning()
        fixed = {name: None if named.get(name) == AUTO else named.get(name) for name in SWEPT}
        for topology in self.topologies:
            blank = SweepRow(topology, fixed["batch"], fixed["remat"])
            refusal = impossible(topology, planning, named)
            if refusal:
                yield MadeRow(dataclasses.replace(blank, failed=refusal))
                continue
            try:
                yield self._planned(blank, named, read_options(topology, planning))
            except UserError as error:
                yield MadeRow(dataclasses.replace(blank, failed=str(error)))

    def _planning(self) -> PlanOptions:
        """Return the planning options as a dict (a copy)."""
        options: Any = dict(self.planning)
        return options

    def _planned(self, blank: SweepRow, named: Mapping[str, Any], options: Options) -> MadeRow:
        """Plan the program on one topology and return the row with its plan; raise `UserError` if there is no plan.

        - `blank`: row with topology, batch and remat policy only.
        - `named`: options of the source.
        - `options`: options of planning.

        Loads the task's rules into this process first.
        """
        if self.rules is not None:
            load_rules(self.rules)

        def opened(settings: Mapping[str, Any], recipe: Mapping[str, Any], *, anew: bool) -> Program:
            """Open the program with settings of the source and a recipe, traced again if `anew`.

            Raises `UserError` as `_check_state` does, unless the recipe may put state on the hosts.
            """
            program = (self._trace if anew else self._open)(settled_options(settings, blank.topology), recipe)
            if named.get("host") != AUTO:  # otherwise the state may be on the hosts
                _check_state(program, options)
            return program

        source = NamedSource(self.source, named, opened, self.entry)
        plan = plan_any(source, options, Running(kept=self.kept)).plan
        chosen = {} if plan.origin.recipe is None else plan.origin.recipe.chosen
        row = dataclasses.replace(
            blank,
            **{name: chosen[name] for name in SWEPT if name in chosen and named.get(name) in (None, AUTO)},
            mesh=",".join(f"{axis}={size}" for axis, size in plan.mesh.items()),
            step_time_s=plan.prediction.step_time_s,
            mfu=plan.prediction.mfu,
            peak_bytes=plan.prediction.peak_bytes,
            memory_limit_bytes=plan.memory_limit_bytes,
            chips=Topology.parse(blank.topology).num_chips,
            tokens=plan.origin.tokens,
            words=plan.words,
            recipe=chosen,
        )
        return MadeRow(row, plan_to_json(plan))

    def _open(self, options: Mapping[str, Any], recipe: Mapping[str, Any]) -> Program:
        """Open the program with these options, or return it from an earlier task of this process.

        At most `MOST_OPEN` programs are stored, by content of the source, entry, rules, options and recipe. The cache
        on disk serves only tasks with `kept` and without own rules.
        """
        key = json.dumps([self._content(), self.entry, self.rules, options, recipe], sort_keys=True, default=str)
        if key not in _open_programs:
            while len(_open_programs) >= MOST_OPEN:
                del _open_programs[next(iter(_open_programs))]
            _open_programs[key] = self._trace(options, recipe, self.kept and self.rules is None)
        return _open_programs[key]

    def _trace(self, options: Mapping[str, Any], recipe: Mapping[str, Any], kept: bool = False) -> Program:
        """Open the program with these options and this recipe; it may come from the cache on disk only if `kept`."""
        return open_source(self.source, entry=self.entry, kept=kept, recipe=recipe, **options)

    def _content(self) -> list[str]:
        """Return the source, then the SHA-256 of its file (or of its folder's `config.json`), of the rules and of the
        user's file of figures. A hash is empty if there is no such file.
        """
        file = Path(self.source.removeprefix("hf:"))
        config = file / "config.json" if file.is_dir() else file
        others = filter(None, (self.rules, os.environ.get(OWN_FILE)))
        return [self.source, _hash(config), *(_hash(Path(each)) for each in others)]

    def key(self, topology: str) -> str:
        """Return all inputs that decide a row, as JSON text: equal keys give equal rows.

        These are `_content`, entry, options, topology, planning options and version. The fit learned from measurements
        for the topology follows if it has observations and `calibration` is on.
        """
        inputs: list[Any] = [*self._content(), self.entry, self.options, topology, self.planning, autoshard.__version__]
        parsed, planning = Topology.parse(topology), dict(self.planning)
        flags, _ = chosen_flags(planning.get("xla_flags"), parsed.chip)
        learned = learned_fit(parsed, flags) if planning.get("calibration", True) else None
        if learned is not None and learned.observations:
            inputs.append(fit_record(learned))
        return json.dumps(inputs, sort_keys=True)


def _hash(file: Path) -> str:
    """Return the SHA-256 of a file's bytes in hex; empty if the path is no file."""
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def _check_state(program: Program, options: Options) -> None:
    """Refuse a program that cannot fit under any sharding: its arguments alone exceed the memory of all devices.

    Raises `UserError` with the bytes of the arguments. The limit of a device is `memory_limit`, or else the topology's
    usable bytes. Programs with state on the hosts pass: the planner decides on them.
    """
    topology = Topology.parse(options.topology)
    limit = topology.usable_bytes if options.memory_limit is None else options.memory_limit
    if program.on_host != HOSTS[0]:
        return
    argument_bytes = sum(math.prod(each.shape) * np.dtype(each.dtype).itemsize for each in program.arguments)
    if argument_bytes > limit * topology.num_devices:
        raise UserError(
            f"it does not fit: parameters, state and batch alone are {format_bytes(argument_bytes)}, and the "
            f"{topology.num_devices} devices of {topology.name} hold {format_bytes(limit * topology.num_devices)}."
        )


def impossible(topology: str, planning: PlanOptions, program: Mapping[str, Any] | None = None) -> str:
    """Return the reason for which no program can be planned with these options; empty if one can.

    - `topology`: name of the topology.
    - `planning`: options of planning; see `check_request` for its checks.
    - `program`: options of the source, such as the attention kernel; None if unknown.
    """
    try:
        check_request(read_options(topology, planning))
        settled_options(program or {}, topology)
    except UserError as error:
        return str(error)
    return ""


def run_task(task: SweepTask) -> list[MadeRow]:
    """Check a task with `check_same`, and return the rows of its `make`, as a function that a worker process can
    import. JAX uses CPUs unless `JAX_PLATFORMS` is set. Raises `UserError` as `check_same` does.
    """
    task.check_same()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    return list(task.make())
