"""Text that exports of all forms share: first lines, tables, specs and meshes as code."""

from collections.abc import Mapping

from autoshard.planning import FORMS, Plan, Rest, Spec, mesh_words
from autoshard.program import SUFFIXES, Lifted, Program
from autoshard.report.display import clean


def other_code(plan: Plan, program: Program | None) -> str:
    """Return in words the kind of code of a plan that is not of JAX code, as far as plan and program show.

    The kinds are torch modules, models made from their configuration, and files of a compiler; empty for JAX code.
    """
    name = plan.source.program if plan.source is not None else ""
    if program is not None and program.source is not None:
        name = str(program.source.get("program", ""))
    if plan.uses or (program is not None and program.weights):
        return "a torch module"
    if name.startswith("hf:"):
        return "a model that is made from its configuration"
    return "a file of a compiler" if name.endswith(SUFFIXES) else ""


MAKE_MESH = '''def make_mesh(devices=None):
    """The plan's mesh. TPUs are numbered by slice, coordinates and core; other devices by process and id."""

    def place(device):
        where = (getattr(device, "slice_index", 0) or 0, *getattr(device, "coords", ()))
        return (*where, getattr(device, "core_on_chip", 0), device.process_index, device.id)

    ordered = sorted(jax.devices() if devices is None else devices, key=place)
    grid = np.array([ordered[number] for number in DEVICE_ORDER], dtype=object)
    return Mesh(grid.reshape(tuple(MESH.values())), tuple(MESH))
'''
"""Code of a function that makes a JAX mesh of `MESH` and `DEVICE_ORDER`."""

STATIC = '''
def static_positions(fn, count, options):
    """Positions of the static ones of `count` arguments, taken out of `options`, else those of a `jax.jit` step."""
    own = getattr(fn, "_jit_info", None)
    given = {key: options.pop(key) for key in ("static_argnums", "static_argnames") if key in options}
    numbers, names = (
        given.get(key, ()) if given else getattr(own, key, ()) for key in ("static_argnums", "static_argnames")
    )
    names = [names] if isinstance(names, str) else names
    parameters = list(inspect.signature(fn).parameters) if names else []
    numbers = [numbers] if isinstance(numbers, int) else [*numbers]
    numbers += [parameters.index(name) for name in names if name in parameters]
    return sorted({number % count for number in numbers if -count <= number < count})


def split(args, static):
    """The other arguments, and a function from those to all."""

    def whole(given):
        rest = iter(given)
        return tuple(arg if number in static else next(rest) for number, arg in enumerate(args))

    return tuple(arg for number, arg in enumerate(args) if number not in static), whole

'''
"""Code of functions that keep static arguments apart; it needs `inspect`."""

FUNCTIONAL = '''
def functional(fn, args, static):
    """`fn` over arrays, a function that makes its arguments, and one that turns its result into that of `fn`.

    The arguments have states in place of Flax NNX objects. States of objects that `fn` changes precede the result, and
    the last function updates the objects of a call by them.
    """
    nnx = sys.modules.get("flax.nnx")
    kinds = (nnx.Pytree, nnx.State) if nnx else ((), ())
    places = [n for n, arg in enumerate(args) if isinstance(arg, kinds[0]) and not isinstance(arg, kinds[1])]
    if not places:
        return fn, lambda given: given, lambda given, out: out

    def by_place(states):
        return {n: states[k] if k in states else nnx.State({}) for k, n in enumerate(places)}

    def arrays(given):
        states = by_place(nnx.split(tuple(given[n] for n in places))[1])
        return tuple(states.get(n, arg) for n, arg in enumerate(given))

    def run(*given):
        joined = nnx.State({k: given[n] for k, n in enumerate(places) if len(given[n])})
        objects = nnx.merge(graphs, joined)
        own = dict(zip(places, objects))
        result = fn(*(own.get(n, arg) for n, arg in enumerate(given)))
        return by_place(nnx.state(objects)), result

    def step(*given):
        states, result = run(*given)
        return (*(states[n] for n in changed), result) if changed else result

    def finish(given, out):
        *states, result = out if changed else (out,)
        for n, state in zip(changed, states):
            nnx.update(given[n], state)
        return result

    graphs, given = nnx.split(tuple(args[n] for n in places))[0], arrays(args)
    closed, (after, _) = jax.make_jaxpr(run, static_argnums=static, return_shape=True)(*given)
    ins, outs = iter(closed.jaxpr.invars), iter(closed.jaxpr.outvars)
    before = {n: [next(ins) for _ in jax.tree.leaves(arg)] for n, arg in enumerate(given) if n not in static}
    same = {n: [next(outs) for _ in jax.tree.leaves(after[n])] == before[n] for n in places}
    changed = [n for n in places if not same[n] or jax.tree.structure(after[n]) != jax.tree.structure(given[n])]
    return functools.wraps(fn)(step), arrays, finish

'''
"""Code of a function that replaces Flax NNX objects by arrays; it needs `functools` and `sys`."""

DONATED = '''
DONATED = {{
{names}}}


def donate(args, static, options):
    """Options that donate the arguments that the plan donates, unless there are such options."""
    if "donate_argnums" in options or "donate_argnames" in options:
        return options
    names, numbers = iter(ARGUMENTS), []
    for number, arg in enumerate(args):
        own = [] if number in static else [next(names) in DONATED for _ in jax.tree.leaves(arg)]
        numbers += [number] if own and all(own) else []
    return options | {{"donate_argnums": numbers}}

'''
"""Code of a function that donates arguments as planned."""
DONATES = " The plan's donated\n    arguments are donated, unless `options` name others."
"""Sentence of a docstring on such code."""


def donating(plan: Plan, args: str) -> tuple[str, str]:
    """Return the code that a plan with donated arguments adds to an export, and the options of its `jax.jit`.

    `args` are the first two arguments of the function, as code.
    """
    if not plan.donated:
        return "", "options"
    names = "".join(f"    {name!r},\n" for name in plan.donated)
    return DONATED.format(names=names), f"donate({args}, options)"


ON_SHARDS = '''

def on_shards({parameters}):
    """`fn`, whose grouped convolutions run on shards of the batch: XLA's gradients of them are wrong."""
    from jax.extend.core import jaxpr_as_fun

    total = int(np.prod([MESH[axis] for axis in BATCH]))

    def split(rank, dim, size):
        return P(*(BATCH if d == dim and size % total == 0 else None for d in range(rank)))

    def alone(eqn):
        left, right, out = eqn.params["dimension_numbers"]
        values, rank = [v.aval for v in eqn.invars], len(left)
        kernel_gradient = eqn.params["batch_group_count"] > 1  # sums over the batch, which is its feature dim
        size = values[0].shape[left[1] if kernel_gradient else left[0]]
        if kernel_gradient:
            ins, outs = (split(rank, left[1], size), split(rank, right[1], size)), P()
        else:
            ins, outs = (split(rank, left[0], size), P()), split(rank, out[0], size)

        def own(*shards):
            result = eqn.primitive.bind(*shards, **eqn.params)
            return jax.lax.psum(result, BATCH) if kernel_gradient and size % total == 0 and BATCH else result

        def run(*values):
{run}

        (call,) = jax.make_jaxpr(jax.jit(run))(*values).eqns
        return eqn.replace(primitive=call.primitive, params=call.params)

    def rewritten(value):
        if hasattr(value, "jaxpr"):
            return value.replace(jaxpr=rewritten(value.jaxpr))
        if hasattr(value, "eqns"):
            return value.replace(eqns=[each(eqn) for eqn in value.eqns])
        return type(value)(map(rewritten, value)) if type(value) in (tuple, list) else value

    def each(eqn):
        name, groups = eqn.primitive.name, ("feature_group_count", "batch_group_count")
        if name == "conv_general_dilated" and any(eqn.params[count] > 1 for count in groups):
            return alone(eqn)
        inner = () if name == "shard_map" else ((key, rewritten(value)) for key, value in eqn.params.items())
        return eqn.replace(params=eqn.params | dict(inner))

    def step(*args):
        closed, out = jax.make_jaxpr(fn, return_shape=True)(*args)
        leaves = jaxpr_as_fun(rewritten(closed))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), leaves)

    return step

'''
"""Code of a function that runs grouped convolutions as `jax.shard_map` over the mesh axes `BATCH`.

`parameters` are those of the function, and `run` is the body that calls `own` with the specs `ins` and `outs`.
"""


def head(plan: Plan, lacks: tuple[str, ...], sentence: str, mark: str = "#") -> str:
    """Return the first comment lines of an export.

    - `lacks`: a phrase for each omission, which follows `Not expressed here:`.
    - `sentence`: the line on the predicted step.
    - `mark`: the language's sign of a comment.

    Lines: origin, `sentence`, one line for each mesh axis that the planner split in parts, and one for each omission.
    """
    mesh = mesh_words(plan.mesh)
    lines = [f"Shardings of {clean(plan.program_name, 80)} on {plan.topology}, mesh {mesh}; made by autoshard."]
    lines.append(sentence)
    refined = [axis for axis in plan.original_mesh if axis not in plan.mesh]
    lines += [f"The mesh is refined: {', '.join(_parts(plan, axis))} are the parts of {axis}." for axis in refined]
    lines += [f"Not expressed here: {lack}" for lack in lacks]
    return "".join(comment(line, mark) for line in lines)


def comment(line: str, mark: str = "#") -> str:
    """Return one comment line and its line end; unprintable characters in names are replaced, so that none can end the
    line.
    """
    return f"{mark} {clean(line)}\n"


def _parts(plan: Plan, axis: str) -> list[str]:
    """Return the axes of the mesh that are parts of the original axis `axis`, outer first."""
    return [own for own in plan.mesh if own not in plan.original_mesh and own.startswith(f"{axis}(")]


def unpinned(
    plan: Plan,
    instead: str = "XLA's propagation chooses them instead",
    rest: Rest = Rest.XLA,
    local_batch: bool = False,
    on_shards: bool = False,
) -> tuple[str, ...]:
    """Return a sentence for each kind of decision that an export of shardings alone omits; none for kinds the plan
    lacks.

    The kinds are pinned intermediates, ops and calls that run on shards, and tensors in host memory.

    - `instead`: end of the sentence on intermediates.
    - `rest`: the system that splits values inside of the step. A plan that was made for it has no value that it omits.
    - `local_batch`: True if every process computes its part of the batch, calls included.
    - `on_shards`: True if the export runs grouped convolutions on shards of the batch (`ON_SHARDS`).
    """
    lacks, within = [], FORMS.get(plan.origin.form)
    held = within is not None and within.splits_inside and within.rest is rest
    if plan.pins and not held:
        lacks.append(f"the {len(plan.pins)} intermediates that the plan pins; {instead}.")
    if on_shards and convolves(plan) and _splits_images(plan):
        lacks.append(
            "images split in space; XLA then gives wrong gradients of some convolutions and pools (docs/limits.md)."
        )
    if rest is Rest.XLA and plan.origin.lifted == Lifted.ALL:
        lacks.append("ignored constraints of the step's own (`ignore_constraints`); remove them from the step.")
    elif rest is Rest.XLA and plan.origin.names_devices and plan.device_order != tuple(range(len(plan.device_order))):
        lacks.append(
            "another order of devices than in meshes that the step names; use `make_mesh()` in it, or JAX refuses "
            "to mix them."
        )
    writes = sum(op.kind in _WRITES for op in plan.ops)
    if rest is Rest.XLA and writes and _splits_images(plan):
        lacks.append(
            f"the barriers around {writes} kinds of writes by index; in a dim that is split, XLA may write other "
            "elements (docs/limits.md): compare with `plan.jit`, which has them."
        )
    if plan.regions and not on_shards and not held:
        lacks.append(
            f"the {len(plan.regions)} convolutions and pools that the plan runs shard by shard; they are split some "
            "other way, which in XLA gives wrong gradients of some (docs/limits.md)."
        )
    if (
        not local_batch
        and not held
        and rest is not Rest.MAXTEXT  # its own attention runs on shards
        and any(spec.axes for call in plan.calls for spec in (*call.operands, *call.results))
    ):
        lacks.append(f"the {len(plan.calls)} calls that the plan runs on shards; every device runs them whole.")
    if plan.host:
        lacks.append(f"the {len(plan.host)} tensors that the plan has in the hosts' memory; they stay on the devices.")
    return tuple(lacks)


_WRITES = ("scatter", "dynamic_update_slice")
"""Kinds of ops whose elements XLA may miss in a split dim."""


def batch_axes(plan: Plan) -> tuple[str, ...]:
    """Return the mesh axes that split the first dim of the batch, by the batch argument that most axes split."""
    split = [spec.dims[0] for name, spec in plan.arguments.items() if plan.roles[name] == "batch" and spec.dims]
    return max(split, key=len, default=())


def convolves(plan: Plan) -> bool:
    """Return True if the planned step has convolutions, as far as the plan lists its ops."""
    return bool(plan.regions) or any(op.kind == "convolution" for op in plan.ops)


def _splits_images(plan: Plan) -> bool:
    """Return True if an axis splits another dim than the first of a batch argument."""
    batch = [spec for name, spec in plan.arguments.items() if plan.roles[name] == "batch"]
    return any(axes for spec in batch for axes in spec.dims[1:])


def table(name: str, rows: Mapping[str, str]) -> str:
    """Return the code of a dict constant `name`, one row a line; keys are strings, the values of `rows` are code."""
    body = "".join(f"    {key!r}: {value},\n" for key, value in rows.items())
    return f"{name} = {{\n{body}}}\n"


def order_text(plan: Plan) -> str:
    """Return the plan's device order as code: `range(n)` for the natural order, else the tuple."""
    if plan.device_order == tuple(range(len(plan.device_order))):
        return f"range({len(plan.device_order)})"
    return repr(plan.device_order)


def partition(spec: Spec) -> str:
    """Return a spec as code without trailing None: `P('data', None, 'model')`, `P()` for an unsplit tensor."""
    entries = [repr(axes[0]) if len(axes) == 1 else repr(axes) if axes else "None" for axes in spec.dims]
    while entries and entries[-1] == "None":
        entries.pop()
    return f"P({', '.join(entries)})"
