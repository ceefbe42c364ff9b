"""`autoshard.plan(program, ...)`: the public function."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Unpack

from autoshard.errors import UserError
from autoshard.planning.record.plan_record import Plan


if TYPE_CHECKING:
    from autoshard.planning.space.plan_options import PlanOptions
    from autoshard.program import Program


PATIENCE_S = 3.0
"""Seconds of work after which helper processes are started: a small program is planned by then."""


def plan(
    program: "Program | str | Callable[[str], Program]",
    *,
    topology: str,
    program_options: Mapping[str, Any] | None = None,
    progress: Callable[[str], None] | None = None,
    **options: "Unpack[PlanOptions]",
) -> Plan:
    """Choose a sharding for every tensor of `program` on `topology`.

    `program` is a `Program` (see `autoshard.trace`), or what the command takes (`"model.py"`, `"hf:gpt2"`): then
    `program_options` are that source's (`{"train": True, "batch": 64, "seq": 8192}`), where `"remat"`, `"microbatches"`
    and `"batch"` may be `"auto"`, for what is fastest for each token within memory, as may `"exchange"`, how queries
    meet keys and values where the sequence is split (`"gather"`, `"heads"` or `"ring"`), and `"attention": "plain"`
    where the kernels that TPUs take wherever they gain something are not wanted; `"host": "optimizer"` has the
    optimizer's state in the hosts' memory (`"auto"`: where that pays; `autoshard.trace` takes it as well). It may also
    be a function that gives a `Program`: one with `autoshard.choices` is planned for all of them; any other takes a
    remat policy (`"none"`, `"dots"`, `"full"`, or a mixture `"full:12+dots"`). What was tried is in the plan's
    provenance (`recipe`).
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

    A torch module in a file is planned as a program for each stage with `form="torch-pipelining"`, or where
    `program_options` say a schedule that only such programs have (`{"train": True, "stages": 2, "schedule": "1f1b"}`;
    `"interleaved:2"`): it is cut between its modules, see `Plan.pipeline`.

    What is asked for holds, and the rest is chosen for it. Names are those of reports, patterns take wildcards and may
    begin after any dot. `pins` fix specs (`{"layers.*.mlp.*.weight": "model,None"}`; also `PartitionSpec`s; `?` leaves
    a dim free, `+` stands between axes that split one dim; dims count from the right, so a stack of layers has the spec
    of one layer); `replicate` names tensors that stay whole; `forbid` keeps axes from tensors (`{"*.embed*": "data"}`);
    `axis_only` keeps an axis to dim groups (`{"data": "batch"}`); `pin_from` takes the specs of another plan's
    parameters. `form` names a form of `autoshard.exports.export_plan` (`"dtensor"`, `"torch-xla"`, `"flax"`, ...) that
    the plan is for: it holds only what that form can say, and is the best of those. What the program itself asks for
    (`with_sharding_constraint`, shardings of its arguments) holds too, unless `ignore_constraints`: it is then taken
    out of what is planned and run, but for regions by hand.

    Raises `UserError` for bad input, such as a pin that cannot hold, and `InfeasibleError` when no plan keeps within
    the memory limit.
    """
    from autoshard.base.workers import Crew, helpers_here
    from autoshard.planning.plan_builder import check_request, make_plan, plan_by_stage
    from autoshard.planning.recipes.recipe_search import plan_recipes, plan_remat
    from autoshard.planning.space.plan_options import read_options, settled_options, source_choices
    from autoshard.planning.stages.stage_programs import is_by_stage
    from autoshard.program import choices_of, open_source, read_choices

    read = read_options(topology, options)
    check_request(read)
    given = dict(program_options or {})
    with Crew(helpers_here(), "autoshard.planning.warm_planner:ready", PATIENCE_S) as crew:
        running = {"progress": progress, "crew": crew}
        if isinstance(program, str) and is_by_stage(given, read.form):
            settled = settled_options(given, topology)

            def opened(**more: Any) -> "Program":
                parts = {"stages": None, "microbatches": None, "schedule": None}
                return open_source(program, **{**settled, **parts, **more})

            return plan_by_stage(opened, given, read, **running).plan
        if isinstance(program, str):
            settled, own = settled_options(given, topology), read_choices(program, given.get("entry", "program"))
            left = source_choices(given, topology)

            def make(**recipe: Any) -> "Program":
                options = settled | {name: value for name, value in recipe.items() if name in left}
                return open_source(
                    program, recipe={name: value for name, value in recipe.items() if name in own}, **options
                )

            if left or own:
                return plan_recipes(make, {**left, **own}, read, of_source=not own, **running)[1].plan
            return make_plan(make(), read, **running).plan
        if given:
            names = ", ".join(given)
            raise UserError(
                f"program_options ({names}) are for a source such as 'hf:gpt2'; trace the program with them."
            )
        if not callable(program):
            if not hasattr(program, "module"):
                raise UserError(
                    f"the program is of type {type(program).__name__}; "
                    "trace it with `autoshard.trace`, or name its source."
                )
            return make_plan(program, read, **running).plan
        if choices_of(program):
            return plan_recipes(program, choices_of(program), read, **running)[1].plan
        return plan_remat(program, read, **running).plan
