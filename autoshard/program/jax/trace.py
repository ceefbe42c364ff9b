"""Tracing of a JAX function, with the shapes of its arguments, into a `Program`."""

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from autoshard import mlir
from autoshard.base.processes import collecting_seldom
from autoshard.errors import UserError
from autoshard.program import argument_names, example_values
from autoshard.program import roles as role_rules
from autoshard.program.jax.call_arguments import by_position
from autoshard.program.jax.host_state import offload_notes, on_host
from autoshard.program.jax.jax_modules import functional
from autoshard.program.jax.step_checks import without_custom_gradients
from autoshard.program.jax.step_parts import split_step
from autoshard.program.lowering import lower_function, user_code
from autoshard.program.program_record import WEIGHTS, Argument, Lifted, Program, Result, Role, serialise
from autoshard.program.segments import NotDividedError, asked_segments
from autoshard.program.source_choices import sharding_notes, weak_type_notes


Evidence = Sequence[Role | None] | Callable[[dict[int, int]], Sequence[Role | None]]
"""Roles by leaf of the arguments, None for unknown ones, or a function from ties to them."""


@collecting_seldom()
def trace(
    fn: Callable[..., Any],
    args: Sequence[Any] | Mapping[str, Any],
    *,
    name: str | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    roles: role_rules.Roles | None = None,
    training: bool | None = None,
    model_flops: float | None = None,
    tokens: int | None = None,
    make_args: Callable[[int], tuple[Any, ...]] | None = None,
    arg_names: Sequence[str] | None = None,
    notes: Sequence[str] = (),
    ties: dict[int, int] | None = None,
    evidence: Evidence | None = None,
    host: str = "none",
) -> Program:
    """Lower `fn(*args)` without shardings and return it as a program with names for all its arguments and results.

    A leaf is named by its path (`params.layers.w`). State that the function returns updated is tied to its result,
    which has the argument's name. Other results are named `result` and their path.

    - `args`: pytrees of arrays or `jax.ShapeDtypeStruct`, one per positional argument, or all of them by name.
      Nothing is allocated for the latter type. Static arguments of a `jax.jit` function keep their values.
    - `name`: name of the program; None for that of `fn`.
    - `donate_argnums`: positions of the arguments whose memory the results may reuse; None for those of a `jax.jit`
      function.
    - `roles`: a mapping from name prefixes to roles, or a callable from a name to a role or None. It overrides the
      roles that are guessed (optax states, updated state, data).
    - `training`: True for a training step. By default it is one if it has optimizer state or updates a parameter.
    - `model_flops`, `tokens`: the caller's figures for one step, not negative; None if unknown.
    - `make_args`: function of a seed that returns concrete arguments; by default plausible values by role.
    - `arg_names`: names of the positional arguments, in place of the parameters' names. An empty name omits the prefix.
    - `notes`: sentences for reports.
    - `ties`: leaf number of the arguments -> leaf number of the result; replaces the search for updated state.
    - `evidence`: for each leaf, the role that a file shows, or None. It precedes a guess by name, and may be a function
      of `ties`.
    - `host`: state in the hosts' memory between steps: `none`, or `optimizer` for the optimizer state of parameters
      that a `jax.lax.scan` runs over. Their update becomes a loop over layers in `Program.fn`. `Plan.jit` changes `fn`
      likewise.

    Raises `UserError` if `fn` cannot be traced, a shape is dynamic, or a leaf is neither an array nor a Python number.
    Ordered side effects and options of a wrong type or length raise it too.
    """
    import jax

    if not callable(fn):
        raise UserError(f"trace: the program must be a callable, got {type(fn).__name__}.")
    if not isinstance(args, (tuple, list, Mapping)):
        raise UserError(f"trace: `args` must be a tuple of the positional arguments, got {type(args).__name__}.")
    label = name or getattr(fn, "__name__", type(fn).__name__)
    call = by_position(fn, (), args) if isinstance(args, Mapping) else by_position(fn, args)
    fn, args, donated_by_jit = call.fn, call.args, call.donated or ()
    donate_argnums = donated_by_jit if donate_argnums is None else donate_argnums
    donate = argument_names.positions_of("donate_argnums", donate_argnums, len(args), label)
    _check_figures(label, arg_names, notes, model_flops, tokens)
    own_names = (*argument_names.positional_names(fn, len(args) - len(call.named)), *call.named)
    positions = tuple(arg_names) if arg_names is not None else own_names
    if len(positions) != len(args):
        raise UserError(f"arg_names: {len(positions)} names were given for {len(args)} arguments of `{label}`.")

    functional_form = user_code(label, lambda: functional(call.fn, call.args))
    fn, args = functional_form.fn, functional_form.args
    names: list[str] = []
    names_used: set[str] = set()
    treedefs: list[Any] = []
    leaves: list[Any] = []
    owner: list[int] = []
    known: list[Role | None] = []
    dims: list[tuple[str, ...] | None] = []
    for position, (prefix, arg) in enumerate(zip(positions, args, strict=True)):
        flat, treedef = jax.tree_util.tree_flatten_with_path(arg)
        own = argument_names.named_dims(arg)
        names.extend(
            argument_names.unique(argument_names.leaf_names(prefix, [path for path, _ in flat], own), names_used)
        )
        dims.extend(own)
        treedefs.append(treedef)
        leaves.extend(leaf for _, leaf in flat)
        owner.extend([position] * len(flat))
        known.extend(functional_form.roles.get(position, [None] * len(flat)))
    leaves = [_abstract(leaf, leaf_name) for leaf, leaf_name in zip(leaves, names, strict=True)]
    abstract, start = [], 0
    for treedef in treedefs:
        abstract.append(treedef.unflatten(leaves[start : start + treedef.num_leaves]))
        start += treedef.num_leaves

    lowered = lower_function(fn, tuple(abstract), donate, label)
    out_paths, out_tree = jax.tree_util.tree_flatten_with_path(lowered.out_info)
    avals = [_aval(leaf) for leaf in leaves]
    out_avals = [_aval(leaf) for _, leaf in out_paths]
    donated = [position in donate for position in range(len(args))]
    if ties is None:
        ties = role_rules.tie(positions, treedefs, donated, avals, out_tree, out_avals)
    else:
        role_rules.check_ties(ties, avals, out_avals)

    role_rules.check_used(roles, names)
    in_optax = [mark for arg in args for mark in _optax_marks(arg)]
    shown = _shown(evidence(ties) if callable(evidence) else evidence, len(leaves))
    ir = lowered.ir
    numbered = [i for i in ties if role_rules.is_numbered(names[i], positions[owner[i]]) and not in_optax[i]]
    used = role_rules.by_use(names, leaves, _uses(ir, numbered)) if numbered else {}
    chosen: list[Role] = []
    containers = [bool(treedef.children()) for treedef in treedefs]  # per leaf this would be quadratic
    for index, leaf in enumerate(leaves):
        guessed = role_rules.guess(
            names[index],
            positions[owner[index]],
            leaf,
            optax=in_optax[index],
            tied=index in ties,
            any_state=any(not role_rules.is_key(avals[i]) for i in ties),
            container=containers[owner[index]],
        )
        chosen.append(
            role_rules.user_role(roles, names[index]) or known[index] or shown[index] or used.get(index) or guessed
        )

    arguments = tuple(
        Argument(names[i], avals[i][0], avals[i][1], chosen[i], ties.get(i), donated[owner[i]])
        for i in range(len(names))
    )
    back = {result: argument for argument, result in ties.items()}
    free = argument_names.leaf_names("", [path for path, _ in out_paths], argument_names.named_dims(lowered.out_info))
    free = [_result_name(text, len(out_paths)) for text in free]
    out_taken = {names[i] for i in ties}
    result_names = [
        names[back[i]] if i in back else argument_names.unique([free[i]], out_taken)[0] for i in range(len(free))
    ]
    results = tuple(
        Result(text, aval[0], aval[1], back.get(i))
        for i, (text, aval) in enumerate(zip(result_names, out_avals, strict=True))
    )
    if training is None:
        training = any(
            a.role is Role.OPTIMIZER_STATE or (a.role is Role.PARAMETER and a.result is not None) for a in arguments
        )
    entering = [str(value.type) for value in mlir.main_block(ir).arguments]
    if len(entering) != len(arguments) and not any("token" in each for each in entering):
        raise UserError(
            f"`{label}` uses a value from inside of a `jax.checkpoint` or another traced call that did not return it "
            "(layers that share keys and values hand them on so); return it, or trace without recomputation "
            "(--remat none)."
        )
    if len(entering) != len(arguments):
        raise UserError(
            f"`{label}` has side effects in a fixed order (ordered callbacks, or a Pallas kernel in TPU interpret "
            "mode), which no plan can split; take them out, or give `pallas_call` interpret=True."
        )
    module, fingerprint = serialise(ir, arguments)
    own = mlir.count_constraints(ir)
    if make_args is None:
        limit = example_values.smallest_table([a.shape for a in arguments if a.role in WEIGHTS])
        make_args = example_values.fill(tuple(args), names, chosen, lambda _: limit)
    program = Program(
        name=label,
        fn=fn,
        args=tuple(args),
        donate_argnums=donate,
        arguments=arguments,
        results=results,
        module=module,
        fingerprint=fingerprint,
        training=training,
        model_flops=model_flops,
        tokens=tokens,
        make_args=make_args,
        dims={name: own for name, own in zip(names, dims, strict=True) if own is not None},
        notes=(
            *notes,
            *sharding_notes(own),
            *_explicit_notes(own),
            *offload_notes(lowered.jaxpr),
            *weak_type_notes(names, leaves, ties, lowered.jaxpr.out_avals),
        ),
        lifted=Lifted.IDLE if own.idle else Lifted.NONE,
        platform=lowered.platform,
        lowerings=lowered.lowerings,
    )
    return on_host(program, host)


def _explicit_notes(own: mlir.ConstraintCounts) -> tuple[str, ...]:
    """Return a note on constraints that a mesh with explicit axes around the trace adds; empty without such a mesh."""
    import jax

    if not own.constraints or jax.sharding.AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return ()
    return (
        "The trace was made under `jax.set_mesh` of a mesh with explicit axes, which puts constraints into it: trace "
        "outside of it, or plan with ignore_constraints (--ignore-constraints), to leave the split to the planner.",
    )


def in_one_microbatch(program: Program) -> Program:
    """Return a traced program with one microbatch of its batch arguments, if segments are requested; else unchanged.

    Batch arguments are cut along their first dim. Tokens and model FLOPs are divided likewise.

    Programs without marked segments are unchanged too. Raises `NotDividedError` if the microbatches do not divide a
    first dim. Raises `UserError` for a step whose results do not follow from those of its microbatches.
    """
    import jax

    asked = asked_segments()
    if asked is None:
        return program
    whole = user_code(program.name, lambda: jax.make_jaxpr(program.fn)(*program.args))
    if not asked.names:
        return program
    leaves, tree = jax.tree.flatten(program.args)
    count = asked.microbatches
    for number, argument in enumerate(program.arguments):
        if argument.role is Role.BATCH and argument.shape:
            rows = asked.batch = argument.shape[0]
            if rows % count:
                raise NotDividedError(f"{count} microbatches do not divide the {rows} examples of `{argument.name}`.")
            shape = (rows // count, *argument.shape[1:])
            leaves[number] = jax.ShapeDtypeStruct(shape, leaves[number].dtype)
    try:
        with without_custom_gradients():
            less = user_code(program.name, lambda: jax.make_jaxpr(program.fn)(*tree.unflatten(leaves)))
    except UserError as error:
        cut = ", ".join(f"`{each.name}`" for each in program.arguments if each.role is Role.BATCH and each.shape)
        raise UserError(
            f"one of {count} microbatches cannot be traced: {str(error).rstrip('.')}. The arguments {cut} are cut "
            "along their first dim; --roles corrects roles that are guessed wrong."
        ) from error
    batch, parameters = (
        [number for number, each in enumerate(program.arguments) if each.role is role]
        for role in (Role.BATCH, Role.PARAMETER)
    )
    split_step(less, whole, range(len(asked.names)), len(asked.names), batch, parameters)
    roles = {argument.name: argument.role for argument in program.arguments}
    return trace(
        program.fn,
        tree.unflatten(leaves),
        name=program.name,
        donate_argnums=program.donate_argnums,
        roles=roles.get,
        training=program.training,
        model_flops=None if program.model_flops is None else program.model_flops / count,
        tokens=None if program.tokens is None else program.tokens // count,
        notes=program.notes,
    )


def _check_figures(label: str, arg_names: Any, notes: Any, model_flops: Any, tokens: Any) -> None:
    """Raise `UserError` for names and notes that are no sequences of texts, and for figures that are no numbers >= 0.

    Figures and `arg_names` may be None.
    """
    for option, texts in (("arg_names", arg_names if arg_names is not None else ()), ("notes", notes)):
        if isinstance(texts, str) or not isinstance(texts, Sequence) or not all(isinstance(t, str) for t in texts):
            raise UserError(f"{option} of `{label}` is {texts!r}; expected a list of texts.")
    for option, figure in (("model_flops", model_flops), ("tokens", tokens)):
        if figure is None:
            continue
        if isinstance(figure, bool) or not isinstance(figure, Real) or not 0 <= float(figure) < math.inf:
            raise UserError(f"{option} of `{label}` is {figure!r}; expected a number from 0 up, of one step.")


def _shown(evidence: Any, count: int) -> list[Role | None]:
    """Return the roles that a file shows, one for each of `count` leaves; all None for None or an empty sequence.

    Raises `UserError` for another length or type, and for entries that are no roles.
    """
    if not evidence and (evidence is None or isinstance(evidence, Sequence)):
        return [None] * count
    if isinstance(evidence, str) or not isinstance(evidence, Sequence) or len(evidence) != count:
        raise UserError(f"evidence is {evidence!r}; expected a role or None for each of the {count} leaves of `args`.")
    return [role_rules.checked(role, f"leaf {number}") for number, role in enumerate(evidence)]


def _uses(ir: Any, leaves: Sequence[int]) -> dict[int, mlir.Use]:
    """Return leaf number -> its use in the program, for `leaves`; those that are no arguments of the module lack."""
    uses = mlir.argument_uses(ir)
    return {leaf: uses[leaf] for leaf in leaves if leaf < len(uses)}


def _abstract(leaf: Any, name: str) -> Any:
    """Return shape, canonical dtype and stated sharding of a leaf, an array or a Python number.

    A sharding is stated by a shape, or by an array under a mesh with explicit axes. Raises `UserError` for dynamic
    shapes and other objects, in which the leaf is called `name`.
    """
    import jax
    import numpy as np

    if isinstance(leaf, (bool, int, float, complex)):
        return jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(np.result_type(leaf)), weak_type=True)
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise UserError(
            f"argument `{name}` is a {type(leaf).__name__}, expected an array or a jax.ShapeDtypeStruct; "
            "bind what is none before, as in `lambda x: step(x, n)`."
        )
    for size in leaf.shape:
        if not isinstance(size, (int, np.integer)) or size < 0:
            raise UserError(
                f"argument `{name}` has the dynamic shape ({', '.join(map(str, leaf.shape))}); "
                "a plan is made for fixed sizes, so give each dim a number."
            )
    dtype = leaf.dtype
    if not jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    weak = bool(getattr(leaf, "weak_type", False))
    stated = getattr(leaf, "sharding", None)
    stated = stated if isinstance(stated, jax.sharding.NamedSharding) else None
    # A sharding counts if it is stated for a shape, or if it is part of the array's type, as under an explicit mesh.
    # The sharding of any other array only says where the array happens to be.
    if stated is not None and not isinstance(leaf, jax.ShapeDtypeStruct):
        context = jax.sharding.get_abstract_mesh()
        stated = stated if context.explicit_axes and stated.mesh.abstract_mesh == context else None
    return jax.ShapeDtypeStruct(tuple(int(size) for size in leaf.shape), dtype, weak_type=weak, sharding=stated)


def _aval(leaf: Any) -> tuple[tuple[int, ...], str]:
    """Return shape and dtype."""
    return tuple(int(size) for size in leaf.shape), str(leaf.dtype)


def _optax_marks(arg: Any) -> list[bool]:
    """Return for every leaf of `arg` whether it is inside an optax state."""
    import jax

    def state(node: Any) -> bool:
        return isinstance(node, tuple) and type(node).__module__.split(".")[0] == "optax"

    marks: list[bool] = []
    for node in jax.tree_util.tree_leaves(arg, is_leaf=state):
        inside = state(node)
        marks.extend([inside] * len(jax.tree_util.tree_leaves(node)))
    return marks


def _result_name(path: str, count: int) -> str:
    """Return the name of an untied result at `path`: `result` for the only one of `count`, else `result.<path>`."""
    if path == "value" and count == 1:
        return "result"
    return f"result.{path}"
