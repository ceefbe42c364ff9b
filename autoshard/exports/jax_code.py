"""Export of a plan to `jax.jit`."""

from autoshard.exports.export_text import (
    DONATES,
    FUNCTIONAL,
    MAKE_MESH,
    ON_SHARDS,
    STATIC,
    batch_axes,
    convolves,
    donating,
    head,
    order_text,
    partition,
    table,
    unpinned,
)
from autoshard.exports.form_writers import writes
from autoshard.planning import Plan


_JAX = '''
import functools
import inspect
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

{mesh}
{order}

{make_mesh}

def shardings(specs, mesh):
    """One NamedSharding for each name, in the order of the step's flat arguments (or results)."""
    return {{name: NamedSharding(mesh, spec) for name, spec in specs.items()}}

{static}{functional}{donated}{on_shards}
def jit(fn, args, mesh=None, **options):
    """`jax.jit(fn)` with the plan's shardings; `args` are its arguments, or their shapes, as they were planned.

    Static arguments are those of `options`, or of a step that is a `jax.jit`.{donates}
    """
    mesh = make_mesh() if mesh is None else mesh
    static = static_positions(fn, len(args), options)
    fn, arrays, finish = functional(fn, args, static)
    objects, args = args, arrays(args)

    @functools.wraps(fn)
    def step(*given):
        free, whole = split(given, static)
        bound = functools.wraps(fn)(lambda *values: fn(*whole(values)))
        return {step}(*free)

    outs = jax.tree.structure(jax.jit(fn, static_argnums=static).eval_shape(*args))
    if outs.num_leaves != len(RESULTS):
        raise TypeError(f"the plan has {{len(RESULTS)}} results, this step {{outs.num_leaves}}; plan it again")
    planned = jax.jit(
        step if static else {direct},
        static_argnums=static,
        in_shardings=jax.tree.structure(split(args, static)[0]).unflatten(shardings(ARGUMENTS, mesh).values()),
        out_shardings=outs.unflatten(shardings(RESULTS, mesh).values()),
        **{options},
    )
    if args is objects:
        return planned
    return lambda *given: finish(given, planned(*arrays(given)))


{arguments}

{results}'''
"""Template of the exported code."""

_RUN = "            return jax.shard_map(own, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)(*values)"


@writes("jax")
def jax_text(plan: Plan, sentence: str) -> str:
    """Return the plan's code for `jax.jit`: mesh, and shardings of arguments and results. `sentence` is the line on the
    predicted step.
    """
    on_shards, step, direct, batch = "", "bound", "fn", ""
    if convolves(plan):
        on_shards = ON_SHARDS.format(parameters="fn, mesh", run=_RUN)
        step, direct = "on_shards(bound, mesh)", "on_shards(fn, mesh)"
        batch = f"\nBATCH = {batch_axes(plan)!r}"
    donated, options = donating(plan, "args, static")
    return head(plan, unpinned(plan, on_shards=True), sentence) + _JAX.format(
        mesh=f"MESH = {plan.mesh!r}{batch}",
        on_shards=on_shards,
        static=STATIC,
        functional=FUNCTIONAL,
        donated=donated,
        donates=DONATES if donated else "",
        options=options,
        step=step,
        direct=direct,
        order=f"DEVICE_ORDER = {order_text(plan)}",
        make_mesh=MAKE_MESH,
        arguments=table("ARGUMENTS", {name: partition(spec) for name, spec in plan.arguments.items()}),
        results=table("RESULTS", {name: partition(spec) for name, spec in plan.results.items()}),
    )
