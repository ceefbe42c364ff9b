"""Conversion of parsed arguments into programs, devices, planning options, and checked input and output files."""

import argparse
import contextlib
import dataclasses
import os
import stat
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.base import files
from autoshard.base.files import is_replaced
from autoshard.cli.session import configure_imports
from autoshard.errors import UserError


if TYPE_CHECKING:
    from autoshard.base.workers import WorkerCrew
    from autoshard.cost import Topology
    from autoshard.planning import Options, Plan, PlanOptions, PlanResult
    from autoshard.program import Program
    from autoshard.report import ProgressLine

PROGRAM_OPTIONS = ("train", "batch", "seq", "image", "dtype", "param_dtype", "state_dtype", "remat", "optimizer")
PROGRAM_OPTIONS += ("serve", "cache", "experts", "capacity_factor", "imbalance", "attention", "exchange")
PROGRAM_OPTIONS += ("microbatches", "host", "stages", "schedule", "gradient_groups", "lora", "pad", "loss_chunks")
PROGRAM_OPTIONS += ("quantize", "sample")
"""Options that a program `hf:CONFIG` accepts."""


def need_no_accelerator() -> None:
    """Set `JAX_PLATFORMS` and `PJRT_DEVICE` to the CPU, unless the user has set them.

    JAX, and PyTorch/XLA if tracing imports it, then search for no accelerator.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("PJRT_DEVICE", "CPU")


def take_plan_alone(arguments: argparse.Namespace) -> None:
    """Set `--plan` and `PROGRAM` from a `PLAN.json` in the place of the program, if neither plan nor topology is given.

    Raises `UserError` for a file that is no plan, and for a plan that does not name its program.
    """
    given = arguments.plan is not None or getattr(arguments, "topology", None) is not None
    if given or not arguments.program.endswith(".json") or arguments.program.startswith("hf:"):
        return
    from autoshard.planning import load_plan

    path = Path(arguments.program)
    source = load_plan(path).source
    if source is None or not source.program:
        raise UserError(f"{path} does not say where its program is: give it too, as in `PROGRAM --plan {path}`.")
    arguments.plan, arguments.program = path, source.program
    if arguments.entry == "program":
        arguments.entry = source.entry


def open_program(
    arguments: argparse.Namespace,
    progress: "ProgressLine",
    topology: str | None = None,
    kept: bool = False,
    recipe: Mapping[str, Any] | None = None,
    plan: "Plan | None" = None,
    chosen: str = "",
    by_stage: bool = False,
) -> "Program":
    """Trace the program that the arguments name, and return it; `--rules` are loaded before, for custom calls.

    - `progress`: printer of progress lines.
    - `chosen`: words for the progress line on choices that the arguments leave open.
    - `topology`: if given, a Python file that makes a mesh gets as many CPU devices as the topology has. Options that
      depend on the topology are settled for it.
    - `kept`: use the disk cache of traced programs.
    - `recipe`: values for the choices that the program declares.
    - `by_stage`: True to open the whole step of a JAX plan with a program for each stage.
    - `plan`: plan of this program. Its source supplies the recipe, and the options that no flag sets.

    With `--ignore-constraints` the program has no sharding constraints. Raises `UserError` for a program that cannot be
    traced, and for an output over a file that the program imports.
    """
    if plan is not None and not (by_stage and not plan.origin.form):
        plan.check_one_step()
    from autoshard.planning.record.program_place import is_same_program
    from autoshard.program import lift_constraints, load_rules, open_source, read_config

    if arguments.program.startswith("hf:"):
        read_config(arguments.program.removeprefix("hf:"))  # a name that is none is refused first
    progress(f"Tracing {arguments.program}{f' with {chosen}' if chosen else ''}")

    configure_imports()
    if topology is not None:
        stand_in_devices(arguments.program, topology)

    options = {name: getattr(arguments, name) for name in PROGRAM_OPTIONS if getattr(arguments, name) is not None}
    source = plan.source if plan is not None else None
    if source is not None and is_same_program(source.program, arguments.program):
        options = {name: value for name, value in source.options.items() if name in PROGRAM_OPTIONS} | options
        recipe = source.recipe
    if plan is not None and plan.by_stage:
        from autoshard.planning import PARTS

        options = {name: value for name, value in options.items() if name not in PARTS}
    if topology is not None:
        from autoshard.planning import settled_options

        options = settled_options(options, topology)
    if arguments.rules is not None:
        load_rules(arguments.rules)
    program = open_source(
        arguments.program, entry=arguments.entry, roles=arguments.roles, kept=kept, recipe=recipe, **options
    )
    # The program may have imported modules from its folder. An output must not replace them either.
    check_unread(arguments, [file for each in list(sys.modules.values()) if (file := _file_of(each))])
    return lift_constraints(program) if getattr(arguments, "ignore_constraints", False) else program


def _file_of(module: object) -> str | None:
    """Return the file of a module, None if it has none; its dict is read, as attribute access may import more."""
    return getattr(module, "__dict__", {}).get("__file__")


def stand_in_devices(source: str, topology: str) -> None:
    """Start as many CPU devices as the topology has, if `source` is a Python file, which may make a mesh.

    If JAX runs already with fewer devices, nothing changes and nothing is raised.
    """
    if source.endswith(".py"):
        from autoshard.cost import Topology
        from autoshard.exec import ensure_devices

        with contextlib.suppress(UserError):  # JAX may run already with fewer devices, which suffices for most programs
            ensure_devices(Topology.parse(topology).num_devices)


def start_devices(topology: "Topology") -> None:
    """Start CPU devices for a `cpu` topology before anything imports jax.

    For another topology raise `UserError` if JAX finds only CPU devices, too few devices, or those of another chip. A
    kind of device that no chip's file names passes.
    """
    from autoshard.base.device_files import accelerator_files
    from autoshard.cost import chip_of_kind
    from autoshard.exec import ensure_devices

    if topology.traits.shares_machine:
        need_no_accelerator()
        ensure_devices(topology.num_devices)
        return
    if not accelerator_files():  # then no plugin of JAX's need search for accelerators, and log that it failed
        need_no_accelerator()
    import jax

    if jax.default_backend() == "cpu":
        raise UserError(
            f"the plan is for {topology.name}, but only CPU devices are here; "
            f"plan for cpu:{topology.num_devices} to rehearse it."
        )
    ensure_devices(topology.num_devices)
    kind = jax.devices()[0].device_kind
    chip = chip_of_kind(kind)
    if chip is not None and chip.name != topology.chip.name:
        raise UserError(f"the plan is for {topology.name}, but the devices here are {kind}; plan for {chip.name}.")


@dataclasses.dataclass(slots=True)
class PlannedSource:
    """The result of planning what the arguments name, of the best recipe where they leave it open."""

    result: "PlanResult"
    traced_s: float
    """Seconds of all tracing."""
    last: "Program"
    """The program that was opened last; it may be from the disk cache."""

    def program(self, arguments: argparse.Namespace, progress: "ProgressLine") -> "Program":
        """Return the plan's program, to be run or compiled: the last one, or else trace it with the plan's options."""
        plan = self.result.plan
        if self.last.fingerprint == plan.program_fingerprint and not getattr(arguments, "cached", False):
            return self.last
        open_options = argparse.Namespace(**{**vars(arguments), **dict.fromkeys(PROGRAM_OPTIONS)})
        return open_program(open_options, progress, arguments.topology, plan=plan)


def plan_source(
    arguments: argparse.Namespace, progress: "ProgressLine", crew: "WorkerCrew | None" = None
) -> PlannedSource:
    """Plan the program that the arguments name. The options that are open are chosen, as `plan_any` does.

    The disk cache is used unless `--no-cache` or `--rules` forbids it. Raises `UserError` for options that no program
    satisfies, and if no plan fits.

    - `progress`: printer of progress lines.
    - `crew`: processes that help; None starts none.
    """
    from autoshard.planning import NamedSource, Running, plan_any

    traced_s, last = 0.0, []
    cached = getattr(arguments, "cached", False)

    def opened(options: Mapping[str, Any], recipe: Mapping[str, Any], *, anew: bool) -> "Program":
        """Trace the program with the options in place of the flags, and with the recipe; add the seconds."""
        nonlocal traced_s
        began = time.perf_counter()
        choices = {name: value for name, value in options.items() if value not in (None, getattr(arguments, name))}
        program = open_program(
            argparse.Namespace(**{**vars(arguments), **options}),
            progress,
            arguments.topology,
            kept=cached and arguments.rules is None and not anew,
            recipe=recipe,
            chosen=", ".join(f"{name.replace('_', ' ')} {value}" for name, value in {**choices, **recipe}.items()),
        )
        traced_s += time.perf_counter() - began
        last[:] = [program]
        return program

    options = plan_options(arguments)
    source_options = {name: getattr(arguments, name) for name in PROGRAM_OPTIONS}
    source = NamedSource(arguments.program, source_options, opened, arguments.entry)
    running = Running(progress=progress, kept=cached, save_problem=arguments.save_problem)
    if crew is not None:
        running = dataclasses.replace(running, crew=crew)
    result = plan_any(source, options, running)
    return PlannedSource(result, traced_s, last[0])


PLANNING = (
    "mesh",
    "memory_limit",
    "time_limit",
    "seed",
    "refine_axes",
    "calibration",
    "xla_flags",
    "form",
    "candidates",
)
"""Options of `autoshard.plan` that flags of the same names set."""


def plan_options(arguments: argparse.Namespace) -> "Options":
    """Return the planning options. Raises `UserError`, before tracing, for options that no program satisfies."""
    from autoshard.planning import check_request, read_options

    options = read_options(arguments.topology, flag_options(arguments))
    check_request(options)
    return options


def flag_options(arguments: argparse.Namespace) -> "PlanOptions":
    """Return the planning options of the flags, as keyword arguments of `autoshard.plan`.

    The constraints of the user (`--pin`, `--replicate`, ...) stand under `asked`. Raises `UserError` for pins that
    contradict one another.
    """
    from autoshard.planning import parameter_specs, read_asked

    pairs = {flag: _merged(flag, getattr(arguments, flag)) for flag in ("pin", "forbid", "axis_only")}
    other_specs = parameter_specs(arguments.pin_from) if arguments.pin_from is not None else None
    constraints = read_asked(pairs["pin"], arguments.replicate, pairs["forbid"], pairs["axis_only"], other_specs)
    return {**planning_flags(arguments), "asked": constraints}


def planning_flags(arguments: argparse.Namespace) -> "PlanOptions":
    """Return the values of the flags in `PLANNING` by name, without those that are None or that the command lacks."""
    given: Any = {name: value for name in PLANNING if (value := getattr(arguments, name, None)) is not None}
    return given


def _merged(flag: str, pairs: list[tuple[str, str]]) -> dict[str, str]:
    """Merge pairs by name: values of a repeated name are joined by commas, in order.

    Repeated pins are not joined: they must be equal, else `UserError` is raised.
    """
    merged: dict[str, str] = {}
    for name, value in pairs:
        if name in merged and flag == "pin" and merged[name] != value:
            raise UserError(f"--pin {name}={value} contradicts --pin {name}={merged[name]}: leave one of them out.")
        merged[name] = value if name not in merged or flag == "pin" else f"{merged[name]},{value}"
    return merged


def out_files(out: Path | None, count: int) -> list[Path]:
    """Return `count` files: `plan.json` for the plan, then `plan.2.json` and so on; none if `out` is None."""
    if out is None:
        return []
    return [out, *(out.with_name(f"{out.stem}.{number}{out.suffix}") for number in range(2, count + 1))]


def check_outputs(arguments: argparse.Namespace) -> None:
    """Raise `UserError`, before minutes of work, for an output that cannot be written.

    Two outputs that are one file, and an output that is also an input (`check_unread`), are refused too.
    """
    for flag, name in arguments.writes.items():
        (_check_place if name in arguments.places else check_writable)(flag, getattr(arguments, name))
    outputs = _outputs(arguments)
    for number, (flag, path) in enumerate(outputs):
        for other, before in outputs[:number]:
            if is_replaced(path) and os.path.realpath(path) == os.path.realpath(before):
                raise UserError(f"{other} and {flag} both write {path}; name a file for each.")
    inputs = {name: value for name, value in vars(arguments).items() if name not in arguments.writes.values()}
    texts = [
        inputs.get("program"),
        inputs.get("problem"),
        inputs.get("pairs"),
        getattr(inputs.get("price"), "file", None),
    ]
    read = [text for text in texts if isinstance(text, str)]
    check_unread(arguments, [*read, *(value for value in inputs.values() if isinstance(value, Path))])


def check_unread(arguments: argparse.Namespace, sources: Iterable[str | Path]) -> None:
    """Raise `UserError` if an output is one of the source files under any name, unless `--force` allows it.

    A source may be a program as commands name it, or a directory, which stands for the JSON files in it.
    """
    outputs = [] if getattr(arguments, "force", True) else [each for each in _outputs(arguments) if _is_file(each[1])]
    for source in sources if outputs else ():
        path = Path(str(source).removeprefix("hf:"))
        for file in path.glob("*.json") if path.is_dir() else [path] if _is_file(path) else []:
            for flag, output in outputs:
                if os.path.samefile(output, file):
                    raise UserError(
                        f"{flag} {output} would write over {file}, which `autoshard {arguments.command}` reads; name "
                        "another file, or add --force."
                    )


def _is_file(path: Path) -> bool:
    """Return True if the path is a file; False also if the system rejects the path, as one with a NUL."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _outputs(arguments: argparse.Namespace) -> list[tuple[str, Path]]:
    """Return pairs (flag, file) of the outputs that flags name; a folder stands for the `sweep.json` in it.

    `autoshard plan --out` counts once for each candidate.
    """
    outputs: list[tuple[str, Path]] = []
    for flag, name in arguments.writes.items():
        path: Path | None = getattr(arguments, name)
        if path is not None and name in arguments.places and path.is_dir():
            path = path / "sweep.json"
        several = arguments.candidates if flag == "--out" and arguments.command == "plan" else 1
        outputs += [(flag, each) for each in out_files(path, several)]
    return outputs


def _check_place(flag: str, path: Path | None) -> None:
    """Raise `UserError` unless the path is a file with a suffix that can be written, or a folder.

    The folder may exist or be one that can be created; None passes.
    """
    if path is not None and path.suffix == "" and path.is_file():
        raise UserError(f"{flag} {path} is a file; name one that ends in .json, or a folder.")
    check_writable(flag, path / "sweep.json" if path is not None and path.is_dir() else path)


def check_writable(flag: str, path: Path | None) -> None:
    """Raise `UserError` if no file can be written at the path: stdout, a directory, a socket, no permission, no folder.

    None passes.
    """
    if path is None:
        return
    if str(path) in _STDOUT:
        raise UserError(f"{flag} {path}: the answer goes to stdout already; name a file.")
    try:
        folder = Path(os.path.realpath(path)).parent
        if path.is_dir():
            raise UserError(f"{flag} {path} is a directory; name a file.")
        if not path.absolute().parent.is_dir():
            raise UserError(f"{flag} {path}: the directory {path.absolute().parent} does not exist; create it first.")
        if not folder.is_dir():
            raise UserError(f"{flag} {path} is a link into the directory {folder}, which does not exist.")
        exists = path.exists()
    except (OSError, ValueError) as error:
        raise UserError(f"{flag} {path} cannot be written: {getattr(error, 'strerror', None) or error}.") from None
    if exists and stat.S_ISSOCK(path.stat().st_mode):
        raise UserError(f"{flag} {path} is a socket; name a file.")
    if not os.access(path if exists else folder, os.W_OK) or (is_replaced(path) and not os.access(folder, os.W_OK)):
        raise UserError(f"{flag} {path} cannot be written: permission denied.")


_STDOUT = ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")
"""Paths that stand for stdout."""


def read_json(path: Path, command: str) -> dict[str, Any]:
    """Return the object that `autoshard COMMAND --json` printed into a file.

    Raises `UserError` for a file that cannot be read, is not JSON, or is no object with `step_time_s`.
    """
    try:
        value = files.read_json(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); give what `autoshard {command} --json` printed.") from error
    if not isinstance(value, dict) or "step_time_s" not in value:
        raise UserError(f"{path} has no `step_time_s`; give what `autoshard {command} --json` printed.")
    return value


def read_compiled(path: Path) -> dict[str, Any]:
    """Return the object of `autoshard compile --json` in a file, which may also be under `compiled` in the output of
    `autoshard plan --compile --json`.

    Raises `UserError` as `read_json` does, and for the figures of a plan that was not compiled.
    """
    value = read_json(path, "compile")
    value = value["compiled"] if isinstance(value.get("compiled"), dict) else value
    if not isinstance(value["step_time_s"], dict):
        raise UserError(f"{path} has no compiled program; give what `autoshard compile --json` printed.")
    return value
