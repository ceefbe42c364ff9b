"""The public function `autoshard.plan(program, ...)`."""

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Unpack

from autoshard.errors import UserError
from autoshard.planning.record.plan_record import Plan


if TYPE_CHECKING:
    from autoshard.planning.space.plan_options import PlanOptions
    from autoshard.program import Program


PATIENCE_S = 3.0
"""Seconds of work after which helper processes are started; a small program is planned by then."""


def plan(
    program: "Program | str | Callable[[str], Program]",
    *,
    topology: str,
    program_options: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
    **options: "Unpack[PlanOptions]",
) -> Plan:
    """Choose a sharding for every tensor of `program` on `topology`, and return the plan.

    `program` is one of these:

    - a `Program`, see `autoshard.trace`.
    - a source that the command accepts, such as `"model.py"` or `"hf:gpt2"`.
    - a function that returns a `Program`. A function with `autoshard.choices` is planned for all of them. Any other
      receives a remat policy: `"none"`, `"dots"`, `"full"`, or a mixture such as `"full:12+dots"`.

    `program_options` are the options of a source, such as `{"train": True, "batch": 64, "seq": 8192}`. The plan's
    provenance (`recipe`) lists all recipes that were tried. Some options may be left to the planner:

    - `"remat"`, `"microbatches"`, `"batch"`: `"auto"` chooses the fastest per token within memory.
    - `"exchange"`: exchange between queries and keys of a split sequence: `"gather"`, `"heads"`, `"ring"` or `"auto"`.
    - `"attention"`: `"plain"` excludes the kernels that TPUs otherwise use wherever they gain time.
    - `"host"`: `"optimizer"` puts the optimizer state into the hosts' memory, `"auto"` does so if that pays.
      `autoshard.trace` accepts the option too.

    Further arguments and options:

    - `topology`: chips and shape, such as `"v5p:4x8x8"` or `"cpu:8"`.
    - `progress`: receives one line at the start of every phase.
    - `mesh`: axes and sizes, such as `{"data": 32, "model": 8}` or `"data=32,model=8"`. By default `XLA_AUTO_SPMD_MESH`
      is read, then the program's own mesh is used. Without either, the best mesh of 1 to 4 axes is searched. `"auto"`
      ignores the variable; `Plan.meshes` lists all considered meshes.
    - `memory_limit`: bytes of one device (default: the chip's usable memory).
    - `time_limit`: processor seconds for each solve, whose work is bounded separately; `math.inf` is allowed.
    - `refine_axes`: if a dim is divisible by a part of an axis only, the axis may be cut in two. For 8 key-value heads
      on an axis of 16, `Plan.mesh` has the axes `model(8 of 16)` and `model(2 of 16)`. False prevents the cut.
    - `calibration`: False ignores the figures that `autoshard.refine` learned for the topology with this compiler.
    - `xla_flags`: compiler flags of the step (`"--xla_... --xla_..."`, as in `LIBTPU_INIT_ARGS`). Flags that make
      collectives asynchronous change their prices, and warnings name the flags that are not in the price.

    With `form="torch-pipelining"` a torch module in a file is planned as a program for each stage. The same holds if
    `program_options` name a schedule that only such programs have: `{"train": True, "stages": 2, "schedule": "1f1b"}`
    or `"interleaved:2"`. The module is cut between its modules, see `Plan.pipeline`.

    Constraints hold in the plan, and the rest is chosen around them. Names are those of reports. Patterns contain
    wildcards and may begin after any dot.

    - `pins`: fixed specs (`{"layers.*.mlp.*.weight": "model,None"}`), also as `PartitionSpec`s. `?` leaves a dim free,
      and `+` separates axes that split one dim. Dims count from the right, so a stack of layers has the spec of one
      layer.
    - `replicate`: tensors that stay whole.
    - `forbid`: axes that may not split a tensor (`{"*.embed*": "data"}`).
    - `axis_only`: dim groups that an axis may split (`{"data": "batch"}`).
    - `pin_from`: another plan, or its file, whose parameter specs are pinned.
    - `form`: form of `autoshard.exports.export_plan` (`"dtensor"`, `"torch-xla"`, `"flax"`, ...). The plan is the best
      of those that the form can express.
    - `ignore_constraints`: True removes the program's own constraints (`with_sharding_constraint`, shardings of its
      arguments) from planning and running, except for manual regions. By default they hold.

    Raises `UserError` for bad input, such as a pin that cannot hold, and `InfeasibleError` if no plan fits the memory
    limit.
    """
    from autoshard.base.workers import WorkerCrew, helpers_here
    from autoshard.planning.plan_builder import Running, check_request
    from autoshard.planning.recipes.plan_dispatch import NamedSource, plan_any
    from autoshard.planning.space.plan_options import read_options, settled_options
    from autoshard.program import choices_of, open_source

    read = read_options(topology, options)
    check_request(read)
    given = dict(program_options or {})

    def opened(options: Mapping[str, Any], recipe: Mapping[str, Any], *, anew: bool) -> "Program":
        """Open the source with these options and this recipe; it is traced each time, whether `anew` or not."""
        return open_source(str(program), recipe=recipe, **settled_options(options, topology))

    if isinstance(program, str):
        subject = NamedSource(program, given, opened, given.get("entry", "program"))
    elif given:
        names = ", ".join(given)
        raise UserError(f"program_options ({names}) are for a source such as 'hf:gpt2'; trace the program with them.")
    elif not callable(program) and not hasattr(program, "module"):
        raise UserError(
            f"the program is of type {type(program).__name__}; trace it with `autoshard.trace`, or name its source."
        )
    else:
        if callable(program) and not choices_of(program):
            _check_maker(program)
        subject = program
    with WorkerCrew(helpers_here(), "autoshard.planning.warm_planner:ready", PATIENCE_S) as crew:
        return plan_any(subject, read, Running(progress=progress, crew=crew)).plan


def _check_maker(function: Callable[..., Any]) -> None:
    """Raise `UserError` for a function with several arguments, which is a step and makes no program."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return  # the call says what is wrong
    asked = [each for each in parameters if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    if len(asked) > 1:
        name = getattr(function, "__name__", "the function")
        raise UserError(
            f"`{name}` takes {len(asked)} arguments, as a step does: plan `autoshard.trace({name}, args)`. A function "
            "in place of a program receives a remat policy alone, and returns a program."
        )
