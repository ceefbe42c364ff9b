"""From parsed arguments to what commands work on: programs, devices, options, and files to read and write."""

import argparse
import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.base import reading
from autoshard.base.files import is_replaced
from autoshard.cli._process import settle_imports
from autoshard.errors import UserError


if TYPE_CHECKING:
    from autoshard.cost import Topology
    from autoshard.plan import Options, Plan, PlanOptions
    from autoshard.program import Program
    from autoshard.report import ProgressLine

PROGRAM_OPTIONS = ("train", "batch", "seq", "image", "dtype", "param_dtype", "state_dtype", "remat", "optimizer")
PROGRAM_OPTIONS += ("serve", "cache", "experts", "capacity_factor", "imbalance", "attention", "exchange")
PROGRAM_OPTIONS += ("microbatches", "host", "stages", "schedule", "gradient_groups")
"""What `hf:CONFIG` takes."""


def need_no_accelerator() -> None:
    """Keep JAX, and PyTorch/XLA where tracing imports it, from looking for one, and from saying that there is none."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("PJRT_DEVICE", "CPU")


def open_program(
    arguments: argparse.Namespace,
    progress: "ProgressLine",
    topology: str | None = None,
    kept: bool = False,
    recipe: Mapping[str, Any] | None = None,
    plan: "Plan | None" = None,
) -> "Program":
    """The program; the mesh that a Python file may make finds a CPU device for each of the topology's.

    What no flag says of a program that a `plan` is for is as that plan has it.
    """
    if plan is not None:
        plan.check_one_step()
    progress(f"Tracing {arguments.program}")
    from autoshard.plan.record._place import is_same_program
    from autoshard.program import lift_constraints, load_rules, open_source

    settle_imports()
    if topology is not None:
        stand_in_devices(arguments.program, topology)

    options = {name: getattr(arguments, name) for name in PROGRAM_OPTIONS if getattr(arguments, name) is not None}
    source = plan.provenance.get("source") if plan is not None else None
    if source and is_same_program(source["program"], arguments.program):
        options = {name: value for name, value in source["options"].items() if name in PROGRAM_OPTIONS} | options
        recipe = source.get("recipe")
    if topology is not None:
        from autoshard.plan import settled_options

        options = settled_options(options, topology)
    if arguments.rules is not None:
        load_rules(arguments.rules)
    program = open_source(
        arguments.program, entry=arguments.entry, roles=arguments.roles, kept=kept, recipe=recipe, **options
    )
    return lift_constraints(program) if getattr(arguments, "ignore_constraints", False) else program


def stand_in_devices(source: str, topology: str) -> None:
    """A CPU device for each of the topology's, where a program is Python and may make a mesh."""
    if source.endswith(".py"):
        from autoshard.cost import Topology
        from autoshard.exec import ensure_devices

        with contextlib.suppress(UserError):  # JAX has started with fewer, which is enough for most programs
            ensure_devices(Topology.parse(topology).num_devices)


def start_devices(topology: "Topology") -> None:
    """CPU devices are made before anything imports jax; any other devices must be here already."""
    from autoshard.exec import ensure_devices

    if topology.traits.shares_machine:
        need_no_accelerator()
        ensure_devices(topology.num_devices)
        return
    import jax

    if jax.default_backend() == "cpu":
        raise UserError(
            f"the plan is for {topology.name}, but only CPU devices are here; "
            f"plan for cpu:{topology.num_devices} to rehearse it."
        )


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
"""The options of `autoshard.plan` that flags of the same names give."""


def plan_options(arguments: argparse.Namespace) -> "Options":
    """How to plan; what cannot be for any program is refused here, before one is traced."""
    from autoshard.plan import check_request, read_options

    options = read_options(arguments.topology, said_options(arguments))
    check_request(options)
    return options


def said_options(arguments: argparse.Namespace) -> "PlanOptions":
    """What flags say of how to plan, as `autoshard.plan` takes it."""
    from autoshard.plan import parameter_specs, read_asked

    pairs = {flag: _merged(flag, getattr(arguments, flag)) for flag in ("pin", "forbid", "axis_only")}
    others = parameter_specs(arguments.pin_from) if arguments.pin_from is not None else None
    asked = read_asked(pairs["pin"], arguments.replicate, pairs["forbid"], pairs["axis_only"], others)
    return {**planning_flags(arguments), "asked": asked}


def planning_flags(arguments: argparse.Namespace) -> "PlanOptions":
    """What the flags in `PLANNING` say, those that were given."""
    said: Any = {name: value for name in PLANNING if (value := getattr(arguments, name, None)) is not None}
    return said


def _merged(flag: str, pairs: list[tuple[str, str]]) -> dict[str, str]:
    """Pairs by name; what is said of one name twice must be a list of axes or groups."""
    found: dict[str, str] = {}
    for name, value in pairs:
        if name in found and flag == "pin" and found[name] != value:
            raise UserError(f"--pin {name}={value} contradicts --pin {name}={found[name]}: leave one of them out.")
        found[name] = value if name not in found or flag == "pin" else f"{found[name]},{value}"
    return found


def check_writable(flag: str, path: Path | None) -> None:
    """Before minutes of work, not after."""
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


def read_json(path: Path, command: str) -> dict[str, Any]:
    """What `autoshard COMMAND --json` printed."""
    try:
        value = reading.read_json(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); give what `autoshard {command} --json` printed.") from error
    if not isinstance(value, dict) or "step_time_s" not in value:
        raise UserError(f"{path} has no `step_time_s`; give what `autoshard {command} --json` printed.")
    return value
