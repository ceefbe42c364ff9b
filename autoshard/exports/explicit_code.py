"""Export of a plan to JAX's explicit sharding mode."""

from autoshard.errors import UserError
from autoshard.exports.explicit_values import Hint, advice, explicit_hints
from autoshard.exports.export_text import (
    DONATES,
    FUNCTIONAL,
    ON_SHARDS,
    STATIC,
    batch_axes,
    comment,
    convolves,
    donating,
    head,
    order_text,
    other_code,
    partition,
    table,
    unpinned,
)
from autoshard.exports.form_writers import writes
from autoshard.planning import Plan, Spec
from autoshard.program import Program


_EXPLICIT = '''
import functools
import inspect
import sys

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

{mesh}
{order}

def make_mesh(devices=None):
    """The plan's mesh, all axes explicit.

    TPUs are numbered by slice, coordinates and core; other devices by process and id.
    """

    def place(device):
        where = (getattr(device, "slice_index", 0) or 0, *getattr(device, "coords", ()))
        return (*where, getattr(device, "core_on_chip", 0), device.process_index, device.id)

    ordered = sorted(jax.devices() if devices is None else devices, key=place)
    grid = np.array([ordered[number] for number in DEVICE_ORDER], dtype=object)
    return Mesh(grid.reshape(tuple(MESH.values())), tuple(MESH), axis_types=(AxisType.Explicit,) * len(MESH))


def shardings(specs, mesh):
    """One NamedSharding for each name, in the order of the step's flat arguments (or results)."""
    return {{name: NamedSharding(mesh, spec) for name, spec in specs.items()}}


def put(args, mesh):
    """A step's arguments, as they were planned, on the devices: their types have the plan's specs."""
    leaves, tree = jax.tree.flatten(tuple(args))
    return tree.unflatten(map(jax.device_put, leaves, shardings(ARGUMENTS, mesh).values()))


def at(place):
    """The spec at a place of `HINTS`, for `out_sharding=`; None, its default, where no mesh is explicit."""
    return HINTS[place] if jax.sharding.get_abstract_mesh().explicit_axes else None


def hint(place, value):
    """A value with the spec at a place of `HINTS`; the value itself where no mesh is explicit."""
    spec = at(place)
    return value if spec is None else jax.sharding.reshard(value, spec)

{static}{functional}{donated}{on_shards}
def jit(fn, args, mesh=None, **options):
    """`jax.jit` of a step that is written in explicit mode; its results are brought to the plan's specs.

    `args` are its arguments as they were planned, or their shapes. The function that is returned puts its own.{donates}
    """
    mesh = make_mesh() if mesh is None else mesh
    static = static_positions(fn, len(args), options)
    fn, arrays, finish = functional(fn, args, static)
    args = arrays(args)
    free, whole = split(args, static)
    bound = (lambda *values: fn(*whole(values))) if static else fn
{given}    leaves, tree = jax.tree.flatten(jax.eval_shape(lambda *given: given, *free))
    given = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for leaf, sharding in zip(leaves, shardings(ARGUMENTS, mesh).values(), strict=True)
    ]
    with jax.set_mesh(mesh):
        outs = jax.tree.structure(jax.eval_shape(bound, *tree.unflatten(given)))
    step = jax.jit(bound, out_shardings=outs.unflatten(shardings(RESULTS, mesh).values()), **{options})

    def run(*args):
        with jax.set_mesh(mesh):
            return finish(args, step(*put(split(arrays(args), static)[0], mesh)))

    return run


def jit_unchanged(fn, args, mesh=None, **options):
    """The same for a step as it was planned: explicit types without, XLA's propagation within."""
    mesh = make_mesh() if mesh is None else mesh
    static = static_positions(fn, len(args), options)
    fn, arrays, finish = functional(fn, args, static)
    args = arrays(args)
    free, whole = split(args, static)
    bound = (lambda *values: fn(*whole(values))) if static else fn
    outs = jax.tree.structure(jax.eval_shape(bound, *free))
    within = jax.sharding.auto_axes({step}, out_sharding=outs.unflatten(shardings(RESULTS, mesh).values()))
    step = jit(within, free, mesh, **options)
    return lambda *args: finish(args, step(*split(arrays(args), static)[0]))


{arguments}
{results}
{hints}'''
"""Template of the exported code."""

_RUN = """            explicit = jax.sharding.get_abstract_mesh().explicit_axes
            values = map(jax.sharding.reshard, values, ins) if explicit else values
            result = jax.shard_map(own, in_specs=ins, out_specs=outs, check_vma=False)(*values)
            return jax.sharding.reshard(result, eqn.outvars[0].aval.sharding.spec) if explicit else result"""


def check_explicit(plan: Plan, program: Program | None) -> None:
    """Return if a plan is of JAX code, as far as the plan, and the program if given, show; raise `UserError` otherwise.

    Rejected are torch modules, models made from their configuration (`hf:`), and files of a compiler.
    """
    what = other_code(plan, program)
    if not what:
        return
    raise UserError(
        f"explicit sharding mode is written in JAX code, and the plan of {plan.program_name} is of {what}: export it "
        "with --to jax, or plan a JAX step."
    )


@writes("explicit", check_explicit)
def explicit_text(plan: Plan, sentence: str, program: Program | None = None) -> str:
    """Return the plan's code for explicit mode; without its program the code has no hints.

    `sentence` is the predicted step. Raises:
    UserError for a plan of a program that is not JAX code, and for a program other than the planned one.
    """
    check_explicit(plan, program)
    hints: list[Hint] = []
    lacks = ["hints inside of the step, for which its program is needed."]
    if program is not None:
        hints, in_gradients = explicit_hints(plan, program)
        lacks = []
        if in_gradients:
            lacks.append(
                f"{in_gradients} of the pins, which are of gradients: explicit mode gives a gradient the type of its "
                "value."
            )
        unknown = [hint for hint in hints if hint.spec is None]
        if unknown:
            places = ", ".join(hint.place for hint in unknown[:5]) + (", ..." if len(unknown) > 5 else "")
            lacks.append(
                f"the specs of {len(unknown)} values for which explicit mode asks, since they are not known or "
                f"uneven: {places}."
            )
    instead = "types decide, or XLA's propagation in `jit_unchanged`, but for those in HINTS"
    pinned = unpinned(plan, instead, on_shards=True)
    on_shards, step, given, batch = "", "bound", "", ""
    if convolves(plan):
        on_shards, step = ON_SHARDS.format(parameters="fn", run=_RUN), "on_shards(bound)"
        given = f"    bound = {step}\n"
        batch = f"\nBATCH = {batch_axes(plan)!r}"
    donated, options = donating(plan, "free, ()")
    return head(plan, (*pinned, *lacks), sentence) + _EXPLICIT.format(
        mesh=f"MESH = {plan.mesh!r}{batch}",
        static=STATIC,
        functional=FUNCTIONAL,
        donated=donated,
        donates=DONATES if donated else "",
        options=options,
        on_shards=on_shards,
        step=step,
        given=given,
        order=f"DEVICE_ORDER = {order_text(plan)}",
        arguments=table("ARGUMENTS", {name: partition(spec) for name, spec in plan.arguments.items()}),
        results=table("RESULTS", {name: partition(spec) for name, spec in plan.results.items()}),
        hints=_hints_text(hints),
    )


def _hints_text(hints: list[Hint]) -> str:
    """Return the code of the table `HINTS`, below comments on how each primitive gets its spec; hints without spec are
    omitted.
    """
    lines = [
        "# Where the plan has another spec than explicit mode's types, in the step's order: `hint(place, value)`\n"
        "# gives it to a value. Where it says `asks`, JAX has no type of its own; `at(place)` is for the op itself:\n"
    ]
    lines += [comment(f"{primitive}: {where}.") for primitive, where in advice(hints).items()]
    if any(hint.asked and hint.primitive not in advice(hints) for hint in hints):
        lines.append("# others: `jax.sharding.auto_axes(f, out_sharding=at(place))` of a function `f` of that part.\n")
    lines.append("HINTS = {\n")
    for hint in hints:
        if hint.spec is not None:
            what = "what it takes" if hint.operand is not None else "asks" if hint.asked else "its result"
            shape = "x".join(map(str, hint.shape)) or "a scalar"
            lines.append(f"    {hint.place!r}: {partition(Spec(hint.spec.dims))},  # {shape}; {what}\n")
    return "".join([*lines, "}\n"])
