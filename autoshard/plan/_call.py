"""`autoshard.plan(program, ...)`: the public function."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from autoshard.plan.record._plan import Plan


if TYPE_CHECKING:
    from autoshard.program import Program


PATIENCE_S = 3.0
"""Seconds of work after which helper processes are started: a small program is planned by then."""


def plan(
    program: "Program | str",
    *,
    topology: str,
    mesh: "str | Mapping[str, int] | None" = None,
    memory_limit: int | None = None,
    time_limit: float = 60.0,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    pins: Mapping[str, Any] | None = None,
    replicate: Iterable[str] | None = None,
    forbid: Mapping[str, Any] | None = None,
    axis_only: Mapping[str, Any] | None = None,
    pin_from: "Plan | str | os.PathLike[str] | None" = None,
    refine_axes: bool = True,
    calibration: bool = True,
    ignore_constraints: bool = False,
    form: str | None = None,
    xla_flags: str | Iterable[str] | None = None,
) -> Plan:
    """Choose a sharding for every tensor of `program` on `topology`.

    `program` is a `Program` (see `autoshard.trace`) or what the command takes (`"model.py"`, `"hf:gpt2"`).
    `topology` names chips and shape, such as `"v5p:4x8x8"` or `"cpu:8"`. `mesh` gives axes and sizes, such as
    `{"data": 32, "model": 8}` or `"data=32,model=8"`; without it `XLA_AUTO_SPMD_MESH` is read, then the program's
    own mesh is taken, and without either the best of all meshes of 1 to 4 axes is looked for (`"auto"` looks
    whatever the variable says; `Plan.meshes` has all that were considered). `memory_limit` is in bytes of one
    device (default: the chip's usable memory), `time_limit` in seconds of processor for each solve (its work is
    bounded apart from it; `math.inf` is allowed). Where a dim is divided by a part of an axis only (8 key-value
    heads on an axis of 16), the mesh may be refined: `model(8 of 16)` and `model(2 of 16)` are then axes of
    `Plan.mesh`; `refine_axes=False` keeps the axes whole. `progress` is called with one line at the start of every
    phase. What `autoshard.refine` has seen of the topology with this compiler is used, unless `calibration=False`.
    `xla_flags` are the compiler flags that the step will run with (`"--xla_... --xla_..."`, as in `LIBTPU_INIT_ARGS`):
    those that make collectives asynchronous change their prices, and warnings name those that are not in the price.

    What is asked for holds, and the rest is chosen for it. Names are those of reports, patterns take wildcards and may
    begin after any dot. `pins` fix specs (`{"layers.*.mlp.*.weight": "model,None"}`; also `PartitionSpec`s; `?` leaves
    a dim free, `+` stands between axes that split one dim; dims count from the right, so a stack of layers has the spec
    of one layer); `replicate` names tensors that stay whole; `forbid` keeps axes from tensors (`{"*.embed*": "data"}`);
    `axis_only` keeps an axis to dim groups (`{"data": "batch"}`); `pin_from` takes the specs of another plan's
    parameters. `form` names a form of `autoshard.report.export_plan` (`"dtensor"`, `"torch-xla"`, `"flax"`, ...) that
    the plan is for: it holds only what that form can say, and is the best of those. What the program itself asks for
    (`with_sharding_constraint`, shardings of its arguments) holds too, unless `ignore_constraints`: it is then taken
    out of what is planned and run, but for regions by hand.

    Raises `UserError` for bad input, such as a pin that cannot hold, and `InfeasibleError` when no plan keeps within
    the memory limit.
    """
    from autoshard.base.crew import Crew, helpers_here
    from autoshard.plan._make import check_request, make_plan
    from autoshard.plan.model._asked import read_asked
    from autoshard.plan.record._store import parameter_specs
    from autoshard.program import lift_constraints, open_source

    asked = read_asked(pins, replicate, forbid, axis_only, None if pin_from is None else parameter_specs(pin_from))
    check_request(topology, mesh, asked)
    if isinstance(program, str):
        program = open_source(program)
    if ignore_constraints:
        program = lift_constraints(program)
    with Crew(helpers_here(), "autoshard.plan._warm:ready", PATIENCE_S) as crew:
        return make_plan(
            program,
            topology=topology,
            mesh=mesh,
            memory_limit=memory_limit,
            time_limit=time_limit,
            seed=seed,
            progress=progress,
            save_problem=None,
            asked=asked,
            refine_axes=refine_axes,
            calibration=calibration,
            xla_flags=xla_flags,
            crew=crew,
            form=form,
        ).plan
