"""Export of a plan to `jax.jit`."""

from autoshard.exports.export_text import (
    MAKE_MESH,
    ON_SHARDS,
    batch_axes,
    convolves,
    head,
    order_text,
    partition,
    table,
    unpinned,
)
from autoshard.exports.form_writers import writes
from autoshard.planning import Plan


_JAX = '''
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

{mesh}
{order}

{make_mesh}

def shardings(specs, mesh):
    """One NamedSharding for each name, in the order of the step's flat arguments (or results)."""
    return {{name: NamedSharding(mesh, spec) for name, spec in specs.items()}}

{on_shards}
def jit(fn, args, mesh=None, **options):
    """`jax.jit(fn)` with the plan's shardings; `args` are its arguments, or their shapes, as they were planned."""
    mesh = make_mesh() if mesh is None else mesh
    ins, outs = jax.tree.structure(tuple(args)), jax.tree.structure(jax.eval_shape(fn, *args))
    return jax.jit(
        {step},
        in_shardings=ins.unflatten(shardings(ARGUMENTS, mesh).values()),
        out_shardings=outs.unflatten(shardings(RESULTS, mesh).values()),
        **options,
    )


{arguments}

{results}'''
"""Template of the exported code."""

_RUN = "            return jax.shard_map(own, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)(*values)"


@writes("jax")
def jax_text(plan: Plan, sentence: str) -> str:
    """Return the plan's code for `jax.jit`: mesh, and shardings of arguments and results. `sentence` is the line on the
    predicted step.
    """
    on_shards, step, batch = "", "fn", ""
    if convolves(plan):
        on_shards, step = ON_SHARDS.format(parameters="fn, mesh", run=_RUN), "on_shards(fn, mesh)"
        batch = f"\nBATCH = {batch_axes(plan)!r}"
    return head(plan, unpinned(plan, on_shards=True), sentence) + _JAX.format(
        mesh=f"MESH = {plan.mesh!r}{batch}",
        on_shards=on_shards,
        step=step,
        order=f"DEVICE_ORDER = {order_text(plan)}",
        make_mesh=MAKE_MESH,
        arguments=table("ARGUMENTS", {name: partition(spec) for name, spec in plan.arguments.items()}),
        results=table("RESULTS", {name: partition(spec) for name, spec in plan.results.items()}),
    )
