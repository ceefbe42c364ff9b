"""Files of captured steps: the steps that a script writes with their plans, and a plan that it is given."""

import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path

from autoshard import mlir
from autoshard.base.files import write_whole
from autoshard.cost import MESH_VARIABLE
from autoshard.errors import UserError
from autoshard.exec.torch_xla_hook.capture.lazy_graph import Capture
from autoshard.exec.torch_xla_hook.planning.capture_planning import Decision, idle_marks
from autoshard.exec.torch_xla_hook.planning.runtime_topology import mesh_here, xla_devices
from autoshard.exec.torch_xla_hook.values.live_marks import LiveMesh
from autoshard.planning import Plan, load_plan, spec_text
from autoshard.program import Role


DUMP_VARIABLE = "XLA_AUTO_SPMD_DUMP"
"""Environment variable: the folder into which captured steps and their plans are written."""
PLAN_VARIABLE = "XLA_AUTO_SPMD_PLAN"
"""Environment variable: the file of the plan that the script's step runs under."""


class RefusedPlan(UserError):
    """An error of the plan file that the environment names: the step must not run without that plan."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{PLAN_VARIABLE}={os.environ.get(PLAN_VARIABLE, '').strip()}: {reason}")


_KNOWN = (
    "XLA_AUTO_SPMD",
    "XLA_AUTO_USE_GROUP_SHARDING",
    "XLA_AUTO_PLAN_AHEAD",
    MESH_VARIABLE,
    DUMP_VARIABLE,
    PLAN_VARIABLE,
)
"""Environment variables whose names begin with `XLA_AUTO_`, autoshard's and PyTorch/XLA's."""


def check_here() -> None:
    """Check the environment before a first step: names of variables, mesh, folder of captured steps, and given plan.

    Raises `UserError` for an unknown name, a mesh or a plan of other devices, and a folder that cannot be made.
    """
    for name in sorted(os.environ):
        if name.startswith("XLA_AUTO_") and name not in _KNOWN:
            raise UserError(f"{name} is no variable of auto-sharding: unset it, or write one of {', '.join(_KNOWN)}.")
    if given_mesh() is None:
        mesh_here()
    folder = _folder()
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{DUMP_VARIABLE}={folder} is no folder to write steps into: {error.strerror}.") from None


def write_step(number: int, capture: Capture, plan: Plan) -> None:
    """Write a captured step and its plan into the folder that the environment names; do nothing without one.

    The files `<number>-<name>.mlir` and `<number>-<name>.json` are replaced if they exist. The first process of
    several writes. Raises `UserError` if that is impossible.
    """
    import torch_xla.runtime as xr

    folder = _folder()
    if folder is None or xr.process_index():
        return
    program = capture.program
    module = mlir.parse_module(program.module)
    arguments = [(a.name, a.role.value, a.result) for a in program.arguments]
    mlir.label_main(module, arguments, [result.name for result in program.results])
    step = folder / f"{number}-{program.name}.mlir"
    try:
        write_whole(step, mlir.text_of(module).encode())
    except OSError as error:
        raise UserError(f"{DUMP_VARIABLE}={folder}: cannot write {step.name}: {error.strerror}.") from None
    source = {"program": str(step), "entry": "program", "options": {}}
    plan = dataclasses.replace(plan, program_name=step.stem, provenance=plan.provenance | {"source": source})
    plan.save(step.with_suffix(".json"))


def _folder() -> Path | None:
    """Return the folder that the environment names for captured steps; None without one."""
    text = os.environ.get(DUMP_VARIABLE, "").strip()
    return Path(text) if text else None


@functools.cache
def given_plan() -> Plan | None:
    """Return the plan in the file that the environment names; None without one. The file is read once.

    Raises `UserError` if the file is no plan that a step of PyTorch/XLA can run under.
    """
    path = os.environ.get(PLAN_VARIABLE, "").strip()
    if not path:
        return None
    try:
        plan = load_plan(path)
    except UserError as error:
        raise RefusedPlan(str(error)) from None
    if plan.by_stage or plan.pipeline is not None or plan.host:
        raise RefusedPlan("PyTorch/XLA runs no pipeline stages and no state on hosts; plan without them.")
    return plan


def given_mesh() -> LiveMesh | None:
    """Return the mesh of the given plan over the devices that are here; None without a plan.

    Raises `UserError` if the plan is of another number of devices, or if the environment names another mesh.
    """
    plan = given_plan()
    if plan is None:
        return None
    try:
        devices = xla_devices(plan.topology, plan.device_order)
    except UserError as error:
        raise RefusedPlan(str(error)) from None
    asked = mesh_here() if os.environ.get(MESH_VARIABLE, "").strip() else dict(plan.mesh)
    if asked is None or list(asked.values()) != list(plan.mesh.values()):
        raise RefusedPlan(
            f"the plan's mesh is {dict(plan.mesh)}, and {MESH_VARIABLE}={os.environ[MESH_VARIABLE]} asks for another: "
            "unset one of them."
        )
    return LiveMesh(plan.mesh, devices)


def given_decision(capture: Capture, mesh: LiveMesh) -> Decision | None:
    """Return the decision of the given plan for a captured step; None if it is for a step of the other kind, training
    or inference.

    Raises `UserError` with the first difference if the plan is of another step. Raises it also for a mark of the
    script's own that the plan contradicts, and for a plan under which PyTorch/XLA computes wrong gradients.
    """
    plan = given_plan()
    if plan is None or is_of_training(plan) != capture.program.training:
        return None
    for number in sorted(capture.users):
        argument = capture.program.arguments[number]
        spec, own = plan.arguments.get(argument.name), mesh.read(capture.split[number], len(argument.shape))
        if spec is not None and own != spec:
            written = capture.split[number] if own is None else spec_text(own, argument.shape)
            raise RefusedPlan(
                f"the plan splits {argument.name} as {spec_text(spec, argument.shape)}, and the script marks it "
                f"{written}: leave out the mark, or pin it in the plan."
            )
    difference = next(_differences(capture, plan), None)
    if difference is not None:
        raise RefusedPlan(f"the plan is of another step than the script's: {difference}; plan the step again.")
    idle = idle_marks(capture, mesh, plan.arguments)
    if idle:
        raise RefusedPlan(idle[0])
    notes = ("the plan's own regions are left to XLA's propagation.",) if plan.regions else ()
    return Decision.of(capture, dataclasses.replace(plan, regions=()), notes)


def is_of_training(plan: Plan) -> bool:
    """Return True if a plan is of a step that updates parameters or optimizer state."""
    trained = (Role.PARAMETER.value, Role.OPTIMIZER_STATE.value)
    return any(plan.roles.get(name) in trained for name in plan.results)


def _differences(capture: Capture, plan: Plan) -> Iterator[str]:
    """Yield differences between a captured step and the step of a plan: of arguments by name, else of ops."""
    program = capture.program
    if program.fingerprint == plan.program_fingerprint:
        return
    names = {argument.name for argument in program.arguments}
    for argument in program.arguments:
        name = argument.name
        if name not in plan.arguments:
            yield f"the plan has no {name}, {argument.dtype}{list(argument.shape)}"
            continue
        here, there = (argument.dtype, argument.shape), (plan.dtypes[name], plan.shapes[name])
        if here != there:
            yield f"{name} is {here[0]}{list(here[1])}, and {there[0]}{list(there[1])} in the plan"
        if argument.role.value != plan.roles[name]:
            yield f"{name} is {argument.role.value}, and {plan.roles[name]} in the plan"
    for name in plan.arguments:
        if name not in names:
            yield f"the step has no {name}, which the plan splits"
    yield "its arguments are the plan's, but its ops differ"
