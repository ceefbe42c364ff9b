"""Planned step as a `jax.export` artifact, whose module has shardings and pins, and which runs without autoshard."""

from typing import Any

from autoshard.errors import UserError
from autoshard.exec.apply.calls_on_shards import lower_for_compiler, place_calls
from autoshard.exec.apply.plan_agreement import other_program
from autoshard.exec.apply.planned_lowering import donated_aliases
from autoshard.planning import Plan, Spec, as_planned
from autoshard.program import Program


def jax_export(plan: Plan, program: Program) -> bytes:
    """Serialise the planned step for `jax.export.deserialize`, for as many devices as the plan has. Nothing is compiled
    and no device is used.

    The artifact has the program's pytrees. If `jax.export` does not know their nodes, it has flat arrays in the order
    of the plan's arguments and results. Its `in_shardings_jax(mesh)` gives the placement of arguments, on a mesh of any
    devices with the plan's axes. It runs on other platforms than the plan's too, unless it calls kernels.

    Raises `UserError` for another program than the plan's, and for tensors in the hosts' memory.
    """
    import dataclasses

    import jax
    from jax import export
    from jax.sharding import AbstractMesh, AxisType, NamedSharding

    if plan.host:
        raise UserError(
            f"`{program.name}` keeps {len(plan.host)} tensors in the hosts' memory, which an artifact of jax.export "
            "does not say: plan it without `--host`, or run it with plan.jit."
        )
    platform = _platform(plan)
    module = _planned_module(plan, program, platform)
    mesh = AbstractMesh(tuple(plan.mesh.values()), tuple(plan.mesh), axis_types=(AxisType.Auto,) * len(plan.mesh))

    def shardings(specs: dict[str, Spec]) -> list[Any]:
        """Return a `NamedSharding` over the abstract mesh for each spec, in order."""
        return [NamedSharding(mesh, spec.partition_spec()) for spec in specs.values()]

    out = jax.eval_shape(program.fn, *program.args)
    flat = jax.tree.leaves(program.args), jax.tree.leaves(out)
    for args, results in ((program.args, out), (tuple(flat[0]), tuple(flat[1]))):
        stand_in = jax.jit(
            _stand_in(results),
            in_shardings=jax.tree.structure(args).unflatten(shardings(plan.arguments)),
            out_shardings=jax.tree.structure(results).unflatten(shardings(plan.results)),
            keep_unused=True,
        )
        exported = export.export(
            stand_in, platforms=(platform,), disabled_checks=[export.DisabledSafetyCheck.platform()]
        )(*jax.eval_shape(lambda *given: given, *args))  # fmt: skip
        exported = dataclasses.replace(exported, mlir_module_serialized=module, fun_name=program.name, _get_vjp=None)
        try:
            return bytes(exported.serialize())
        except (TypeError, ValueError) as error:  # jax.export cannot serialise some pytree node
            if args is not program.args and not isinstance(args, list):
                raise UserError(f"`{program.name}` cannot be written by jax.export: {error}") from error
    raise AssertionError("the second of the two is flat")


def _platform(plan: Plan) -> str:
    """Return JAX's name of the plan's platform, such as `tpu`, `cuda` or `cpu`."""
    from autoshard.cost import Topology

    return Topology.parse(plan.topology).traits.platform


def _stand_in(results: Any) -> Any:
    """Return a function of any arguments whose results are zeros of these shapes and dtypes; its exported body is
    replaced.
    """
    import jax
    import jax.numpy as jnp

    def step(*_: Any) -> Any:
        """Return zeros of the results' types."""
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), results)

    return step


def _planned_module(plan: Plan, program: Program, platform: str) -> bytes:
    """Return the program's module with the plan's shardings, pins, regions and calls, as a portable artifact.

    - `platform`: JAX's name of the platform (`_platform`); pooling ops are unfolded for all but `tpu`.

    Raises `UserError` if the fingerprint of the program, in the plan's recipe, is not the plan's.
    """
    from autoshard import mlir

    program = as_planned(program, plan)
    if program.fingerprint != plan.program_fingerprint:
        raise UserError(other_program(plan))
    bodies = lower_for_compiler(program, plan, platform)
    with mlir.new_context() as context:
        module = mlir.inline_calls(mlir.parse_module(program.module, context))
        mlir.set_shardings(module, "mesh", plan.mesh, list(plan.arguments.values()), list(plan.results.values()))
        mlir.use_mesh(module, mlir.ensure_mesh(module, "mesh", plan.mesh))
        mlir.set_aliases(module, donated_aliases(program, plan))
        ops = mlir.number_ops(module)
        regions = mlir.regions_of(module, plan.regions)
        mlir.insert_pins(module, "mesh", plan.mesh, plan.pins)
        mlir.insert_regions(module, "mesh", plan.mesh, regions)
        mlir.guard_indexing(module)
        if platform != "tpu":
            mlir.unfold_pooling(module)
        place_calls(plan, module, ops, bodies)
        mlir.drop_gspmd(module)
        return mlir.to_portable(module)
