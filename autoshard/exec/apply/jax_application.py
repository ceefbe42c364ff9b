"""Applying a plan to a JAX function: a lowering of its own, shardings on its arguments, pins in its module."""

import collections
import dataclasses
import functools
import inspect
import os
import pathlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from autoshard.cost import Topology
from autoshard.errors import UserError, reason_of
from autoshard.exec.apply.calls_on_shards import explicit_mesh, in_type, lower_calls, on_mesh, place_calls
from autoshard.exec.apply.plan_agreement import (
    check_arguments,
    check_even,
    check_results,
    in_recipe,
    other_program,
)
from autoshard.exec.devices.local_devices import HOST_MEMORY, check_granted, jax_mesh, named_sharding, place
from autoshard.exec.dtensor.torch_application import TorchPlan
from autoshard.planning import Plan, Spec
from autoshard.program import (
    Functional,
    Lifted,
    OpaqueCall,
    Program,
    arrays_of,
    functional,
    lower_traced,
    positions_of,
    streamed,
    user_code,
)


@dataclasses.dataclass(frozen=True)
class Application:
    """A plan on devices: what `Plan.jit` and its neighbours call."""

    plan: Plan
    devices: tuple[Any, ...] | None = None
    """JAX devices to use, in any order; None for those of the default backend."""

    @functools.cached_property
    def mesh(self) -> Any:
        """`jax.sharding.Mesh` of the plan."""
        return jax_mesh(self.plan, self.devices)

    def in_shardings(self) -> tuple[Any, ...]:
        """A `NamedSharding` for every argument of the step, in their order."""
        return self._shardings(self.plan.arguments)

    def out_shardings(self) -> tuple[Any, ...]:
        """A `NamedSharding` for every result of the step, in their order."""
        return self._shardings(self.plan.results)

    def _shardings(self, specs: Mapping[str, Spec]) -> tuple[Any, ...]:
        if self.plan.host:
            check_host_memory(self.mesh.devices.flat[0])
        return tuple(named_sharding(self.mesh, spec, name in self.plan.host) for name, spec in specs.items())

    def shard_batch(self, batch: Any) -> Any:
        """See `Plan.shard_batch`. Raises `UserError` for arrays of other shapes than were planned."""
        import jax

        plan = self.plan
        names = [name for name in plan.arguments if plan.roles[name] == "batch"]
        leaves, tree = jax.tree.flatten(batch)
        found = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
        if found != [plan.shapes[name] for name in names]:
            wanted = ", ".join(f"{name} {list(plan.shapes[name])}" for name in names) or "nothing"
            raise UserError(
                f"the batch has arrays of shapes {', '.join(str(list(shape)) for shape in found) or 'nothing'}; the "
                f"plan for {plan.program_name} wants {wanted}."
            )
        placed = [
            place(leaf, named_sharding(self.mesh, plan.arguments[name]))
            for leaf, name in zip(leaves, names, strict=True)
        ]
        return tree.unflatten(placed)

    def load_weights(self, path: str | os.PathLike[str], program: Program) -> dict[str, Any]:
        """See `Plan.load_weights`."""
        from autoshard.exec.apply import weight_files

        return weight_files.load_weights(self.plan, path, program, self.mesh)

    def save_weights(
        self, params: Mapping[str, Any], folder: str | os.PathLike[str], program: Program
    ) -> list[pathlib.Path]:
        """See `Plan.save_weights`."""
        from autoshard.exec.apply import weight_files

        return weight_files.save_weights(self.plan, params, folder, program)

    def load_batches(self, batches: Iterable[Any], ahead: int) -> Iterator[Any]:
        """See `Plan.load_batches`. Raises `UserError` for an `ahead` below 1."""
        if ahead < 1:
            raise UserError(f"plan.load_batches: ahead={ahead}, but at least 1 batch has to be sent.")
        sent: collections.deque[Any] = collections.deque()
        for batch in batches:
            sent.append(self.shard_batch(batch))  # returns before the data has arrived
            if len(sent) == ahead:
                yield sent.popleft()
        yield from sent

    def torch(self) -> TorchPlan:
        """What applies the plan to torch modules."""
        return TorchPlan(self.plan)

    def jit(
        self, fn: Callable[..., Any] | Program, donate_argnums: int | Sequence[int] | None = None
    ) -> "PlannedFunction":
        """A function of the same arguments that runs as planned; see `Plan.jit`."""
        return PlannedFunction(self, *_step_of(fn, donate_argnums))

    def lower(
        self,
        fn: Callable[..., Any] | Program,
        args: Sequence[Any],
        donate_argnums: int | Sequence[int] | None = None,
        module: bytes | None = None,
    ) -> Any:
        """`jax.stages.Lowered` with shardings and pins; see `lower_planned`."""
        import jax

        fn, donate_argnums = _step_of(fn, donate_argnums)
        made = functional(in_recipe(self.plan, fn), args)
        abstract = jax.tree.map(_abstract, made.args)
        return lower_planned(self, made.fn, abstract, _donated(made.fn, abstract, donate_argnums), module)


class PlannedFunction:
    """A function compiled under a plan, once for every structure of its arguments; call it like the function.

    Arguments that are not where the plan wants them are moved there. A donated argument that already is there is
    consumed, as under `jax.jit`. Flax NNX objects are updated in place, as under `nnx.jit`.
    """

    def __init__(
        self, application: Application, fn: Callable[..., Any], donate_argnums: int | Sequence[int] | None
    ) -> None:
        self.application = application
        self.fn = fn
        self.donate_argnums = donate_argnums
        self._compiled: dict[Any, _Compiled] = {}
        functools.update_wrapper(self, fn, updated=())

    def lower(self, *args: Any, **named: Any) -> Any:
        """`jax.stages.Lowered` of the function for these arguments, pins inserted."""
        return self.application.lower(self.fn, self._in_order(args, named), self.donate_argnums)

    def compile(self, *args: Any, **named: Any) -> Any:
        """`jax.stages.Compiled` for these arguments (arrays or `jax.ShapeDtypeStruct`s)."""
        return self._compile(self._in_order(args, named))[0].step

    def shardings(self, *args: Any, **named: Any) -> tuple[Any, ...]:
        """Pytrees of `NamedSharding` like the arguments: where to put or load them."""
        return self._compile(self._in_order(args, named))[0].shardings

    def _in_order(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """Return all arguments by position, as they were traced. Raises `UserError` for names that have none."""
        if not named:
            return args
        name = getattr(self.fn, "__name__", "the function")
        try:
            bound = inspect.signature(self.fn).bind(*args, **named)
            named = bound.kwargs
        except (TypeError, ValueError) as error:
            raise UserError(f"`{name}` cannot be called so: {reason_of(error)}.") from None
        if named:
            raise UserError(
                f"`{name}` is planned for arguments by position, and `{next(iter(named))}` has none: trace a "
                "function that takes it by position."
            )
        return bound.args

    def __call__(self, *args: Any, **named: Any) -> Any:
        import jax

        args = self._in_order(args, named)
        made, arrays = self._compile(args)
        if self.application.mesh.is_multi_process:
            out = made.step(*jax.tree.map(place, arrays, made.shardings))
        else:
            out = made.step(*jax.device_put(arrays, made.shardings))
        mesh = explicit_mesh(jax.tree.leaves(arrays))
        return made.function.finish(args, out if mesh is None else on_mesh(out, mesh))

    def _compile(self, args: tuple[Any, ...]) -> tuple["_Compiled", tuple[Any, ...]]:
        """What was compiled for such arguments, and the arrays in them."""
        import jax
        from jax.core import Tracer

        taken = arrays_of(args)
        leaves, tree = jax.tree.flatten(taken.args)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            name = getattr(self.fn, "__name__", "the function")
            raise UserError(
                f"`{name}` is compiled under a plan and cannot be called inside jax.jit, jax.grad or jax.vmap: "
                "plan the whole step and call that."
            )
        abstract = [_abstract(leaf) for leaf in leaves]
        key = (taken.key, tree, tuple((leaf.shape, leaf.dtype, leaf.weak_type) for leaf in abstract))
        if key not in self._compiled:
            made = functional(in_recipe(self.application.plan, self.fn), args)
            lowered = self.application.lower(made.fn, tree.unflatten(abstract), self.donate_argnums)
            shardings = tree.unflatten(list(self.application.in_shardings()))
            compiled = compile_lowered(lowered)
            check_granted(self.application.plan, compiled, self.application.mesh.devices.flat)
            self._compiled[key] = _Compiled(compiled, shardings, made)
        return self._compiled[key], taken.args


def compile_lowered(lowered: Any) -> Any:
    """Compile a `jax.stages.Lowered` into a `jax.stages.Compiled` that takes arrays of any dtype.

    XLA gives arguments of 4 bits and fewer a layout that says how many bits they have. Arrays of jax 0.10 have none
    that says so, though their bits lie the same, and jax refuses to call the program (`jax.jit` does not ask).
    """
    import jax

    compiled = lowered.compile()
    for each in jax.tree.leaves(compiled.input_formats):
        if _bits_in(each.layout) and not _arrays_state_bits():
            each.layout.sub_byte_element_size_in_bits = 0
    return compiled


def _bits_in(layout: Any) -> int:
    """Return the bits of an element that a layout states; 0 if it states none."""
    return getattr(layout, "sub_byte_element_size_in_bits", 0)


@functools.cache
def _arrays_state_bits() -> bool:
    """Return True if the layout of an array of 4 bits states the bits, as that of a compiled argument does."""
    import jax.numpy as jnp

    array: Any = jnp.zeros(1, "int4")
    return bool(_bits_in(array.format.layout))


@dataclasses.dataclass(frozen=True, slots=True)
class _Compiled:
    """A compiled step, where its arguments go, and the function over arrays that it is."""

    step: Any
    shardings: tuple[Any, ...]
    function: Functional


def lower_planned(
    application: Application,
    fn: Callable[..., Any],
    abstract: tuple[Any, ...],
    donate_argnums: tuple[int, ...],
    module: bytes | None = None,
) -> Any:
    """Lower `fn(*abstract)` under the plan and insert its pins.

    The lowering belongs to a wrapper made here, so no cached program of `fn` is edited or run by mistake.
    Platforms lower some ops differently; then the body that was planned takes its place: `module` if given, else
    a lowering of `fn` for the plan's devices. Raises `UserError` if the program is not the planned one, or its body
    calls what these devices do not have.
    """
    import jax

    from autoshard import mlir

    plan = application.plan
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract)
    check_arguments(plan, leaves)
    fn = _with_host(plan, fn)
    mesh = explicit_mesh([leaf for _, leaf in leaves])
    lifted = plan.origin.lifted == Lifted.ALL
    typings = [tree.unflatten([leaf.update(sharding=None) for _, leaf in leaves])]
    axes = {axis for spec in plan.arguments.values() for axis in spec.axes}
    if mesh is not None and plan.origin.names_devices and not lifted and axes.issubset(mesh.axis_names):
        # Specs in types are kept by the trace: so the plan holds those of all arguments.
        types = [named_sharding(mesh, spec) for spec in plan.arguments.values()]
        typed = [leaf.update(sharding=of) for (_, leaf), of in zip(leaves, types, strict=True)]
        typings.insert(0, tree.unflatten(typed))
    abstract = typings[0]

    def planned(*args: Any) -> Any:
        return fn(*args)

    planned.__name__ = getattr(fn, "__name__", "planned")
    out = jax.eval_shape(planned, *abstract)
    check_results(plan, jax.tree.leaves(out))
    in_shardings = tree.unflatten(list(application.in_shardings()))
    out_shardings = jax.tree.structure(out).unflatten(list(application.out_shardings()))
    # A program with specs of its own names devices of its own, and so do values with explicit types: lowered for
    # those, it then runs on the plan's.
    own_specs = plan.origin.names_devices or mesh is not None
    body = functools.partial(_zeros, out) if own_specs else planned
    traced = jax.jit(
        body,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        donate_argnums=donate_argnums,
        keep_unused=True,
    ).trace(*abstract)
    found: dict[str, OpaqueCall] = {}
    lowered = user_code(planned.__name__, lambda: lower_traced(traced, found))
    ir = mlir.inline_calls(mlir.drop_sent_arguments(lowered.compiler_ir("stablehlo")))
    if plan.module_hash and mlir.structure_hash(ir) != plan.module_hash:
        lifted = lifted or (mesh is not None and not plan.origin.names_devices)
        platforms = dict.fromkeys((Topology.parse(plan.topology).traits.platform, "cpu"))
        made = (_lowered_for(platform, planned, each, found, lifted) for platform in platforms for each in typings)
        for donor in filter(None, made) if module is None else (module,):
            if mlir.structure_hash(mlir.inline_calls(mlir.parse_module(donor))) == plan.module_hash:
                break
        else:
            raise UserError(other_program(plan))
        own_targets = mlir.call_targets(ir)
        mlir.replace_body(ir, donor)
        check_targets(application, mlir.call_targets(ir) - own_targets - mlir.ANYWHERE)
        mlir.use_mesh(ir, mlir.ensure_mesh(ir, "mesh", plan.mesh))
    ops = mlir.number_ops(ir)
    if own_specs and mlir.remaining_calls(ir):
        _lowered_for("cpu", planned, abstract, found)
    platform = application.mesh.devices.flat[0].platform
    bodies, kept = lower_calls(plan, ops, found, application.mesh, "cuda" if platform == "gpu" else platform)
    _insert_choices(application, ir, lowered)
    place_calls(plan, ir, ops, bodies)
    mlir.drop_gspmd(ir)
    _KEPT_ALIVE[lowered] = kept
    return lowered


def check_targets(application: Application, targets: Collection[str]) -> None:
    """Raise `UserError` for custom calls that the plan's platform has, and the devices at hand do not."""
    plan, device = application.plan, application.mesh.devices.flat[0]
    kind, traits = device.device_kind, Topology.parse(plan.topology).traits
    if targets and device.platform != traits.name:
        names = ", ".join(f"`{target}`" for target in sorted(targets))
        raise UserError(
            f"the plan is for {plan.topology}, for which JAX lowers {plan.program_name} to calls of {names}; {kind} "
            "devices have none: plan it for the devices that are here."
        )


def _with_host(plan: Plan, fn: Callable[..., Any]) -> Callable[..., Any]:
    """The step that was planned, of one that has on the devices what the plan was asked to keep on the host."""
    if plan.origin.on_host == "none":
        return fn
    places = {name: number for number, name in enumerate(plan.results)}
    ties = {number: places[name] for number, name in enumerate(plan.arguments) if name in places}
    return streamed(fn, ties, [number for number, name in enumerate(plan.arguments) if name in plan.host])


def _zeros(out: Any, *_: Any) -> Any:
    """A stand-in with a program's results."""
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), out)


def _insert_choices(application: Application, ir: Any, lowered: Any) -> None:
    """Insert the plan's pins and regions into `ir`, `lowered`'s own module, and make sure that they are there."""
    from autoshard import mlir

    plan = application.plan
    before = mlir.count_pins(ir)
    found = mlir.regions_of(ir, plan.regions)
    inserted = mlir.insert_pins(ir, "mesh", plan.mesh, plan.pins)
    mlir.insert_regions(ir, "mesh", plan.mesh, found)
    mlir.guard_indexing(ir)
    if application.mesh.devices.flat[0].platform != "tpu":
        mlir.unfold_pooling(ir)
        mlir.drop_layouts(ir)
    else:
        mlir.order_hosted(ir)
    text = lowered.as_text()
    if mlir.PLACEMENT in text:
        check_host_memory(application.mesh.devices.flat[0])
    present = text.count("sdy.sharding_constraint")
    if present != before + inserted:
        raise RuntimeError(
            f"{inserted} pins were inserted but the module to be compiled has {present - before}: "
            "this version of jax no longer compiles the module that compiler_ir() returns"
        )


def check_host_memory(device: Any) -> None:
    """Raises `UserError` if nothing can wait in the host memory of `device`, which may be a chip of a topology."""
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST_MEMORY not in kinds:
        raise UserError(
            f"the step keeps values on its host, and {device.device_kind} devices have no memory there "
            f"(`{HOST_MEMORY}`) with this version of jax, only {', '.join(kinds) or 'none'}; plan it with a recipe "
            "that offloads nothing, and without `--host`."
        )


_KEPT_ALIVE: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""A lowering -> the lowerings of calls in it: host callbacks live as long as what they came from."""


def lower_module(
    application: Application, module: bytes, aliases: Mapping[int, int], bodies: Mapping[int, bytes] | None = None
) -> Any:
    """`jax.stages.Lowered` of a module that has no Python function here, under the plan, its pins inserted.

    A stand-in with the module's types is lowered for the devices and then given the module's body. `aliases` ties
    donated arguments to results; `bodies` are those of calls that stand for functions (`lower_for_compiler`). Raises
    `UserError` if the module is not the planned one.
    """
    import jax
    import jax.numpy as jnp

    from autoshard import mlir

    plan = application.plan
    source = mlir.inline_calls(mlir.parse_module(module))
    if plan.module_hash and mlir.structure_hash(source) != plan.module_hash:
        raise UserError(other_program(plan))
    arguments, results = mlir.main_types(source)
    specs = [*plan.arguments.items()], [*plan.results.items()]
    for what, types, named in (("argument", arguments, specs[0]), ("result", results, specs[1])):
        if len(types) != len(named):
            raise UserError(
                f"the plan is for another program: it has {len(named)} {what}s, this one {len(types)}; plan it again."
            )
        for (name, spec), (shape, dtype) in zip(named, types, strict=True):
            words = dtype == "uint32" and len(shape) - len(spec.dims) == 1  # a typed PRNG key
            if len(spec.dims) != len(shape) - words:
                raise UserError(
                    f"the plan is for another program: {what} `{name}` has {len(spec.dims)} dims in the plan, "
                    f"{len(shape)} here; plan it again."
                )
            check_even(plan, f"{what} `{name}`", shape[: len(spec.dims)], spec)

    def stand_in(*_: Any) -> Any:
        return tuple(jnp.zeros(shape, dtype) for shape, dtype in results)

    lowered = (
        jax.jit(
            stand_in,
            in_shardings=application.in_shardings(),
            out_shardings=application.out_shardings(),
            keep_unused=True,
        )
        .trace(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arguments))
        .lower()
    )
    ir = lowered.compiler_ir("stablehlo")
    mlir.replace_body(ir, module)
    mlir.use_mesh(ir, mlir.ensure_mesh(ir, "mesh", plan.mesh))
    mlir.set_aliases(ir, aliases)
    ops = mlir.number_ops(ir)
    _insert_choices(application, ir, lowered)
    place_calls(plan, ir, ops, bodies or {})
    mlir.drop_gspmd(ir)
    return lowered


def donated_aliases(program: Program, plan: Plan) -> dict[int, int]:
    """Argument number -> result number of donated state that keeps its spec."""
    names = [result.name for result in program.results]
    return {
        i: argument.result
        for i, argument in enumerate(program.arguments)
        if argument.donated
        and argument.result is not None
        and plan.arguments[argument.name] == plan.results[names[argument.result]]
    }


def _lowered_for(
    platform: str,
    planned: Callable[..., Any],
    abstract: tuple[Any, ...],
    found: dict[str, OpaqueCall] | None = None,
    lifted: bool = False,
) -> bytes | None:
    """Return the function's module for a platform; with `lifted`, without its own constraints. None if JAX has none."""
    import jax

    from autoshard import mlir

    traced = jax.jit(lambda *args: planned(*args), keep_unused=True).trace(*abstract)
    try:
        lowered = lower_traced(traced, found, (platform,))
    except (ValueError, NotImplementedError):  # JAX's words for ops that the platform lacks: another one may have them
        return None
    ir = mlir.drop_sent_arguments(lowered.compiler_ir("stablehlo"))
    return mlir.to_bytes(mlir.drop_constraints(ir) if lifted else ir)


def _abstract(leaf: Any) -> Any:
    import jax
    import jax.numpy as jnp
    import numpy as np

    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(sharding=in_type(leaf))
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        if not isinstance(leaf, (bool, int, float, complex)):
            raise UserError(f"an argument is a {type(leaf).__name__}; expected arrays or jax.ShapeDtypeStruct.")
        return jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(np.result_type(leaf)), weak_type=True)
    dtype = leaf.dtype
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    weak = bool(getattr(leaf, "weak_type", False))
    return jax.ShapeDtypeStruct(tuple(leaf.shape), dtype, weak_type=weak, sharding=in_type(leaf))


def _step_of(
    fn: Any, donate_argnums: int | Sequence[int] | None
) -> tuple[Callable[..., Any], int | Sequence[int] | None]:
    """Return a function and what it donates; of a program its step. Raises `UserError` for what cannot be called."""
    if isinstance(fn, Program):
        return fn.fn, fn.donate_argnums if donate_argnums is None else donate_argnums
    if not callable(fn):
        raise UserError(f"a plan is for a function or an autoshard.Program; found {fn!r}.")
    return fn, donate_argnums


def _donated(
    fn: Callable[..., Any], abstract: tuple[Any, ...], donate_argnums: int | Sequence[int] | None
) -> tuple[int, ...]:
    """Positional arguments to donate: as told, else those that a `jax.jit` function donates whole."""
    import jax

    if donate_argnums is not None:
        name = getattr(fn, "__name__", "the function")
        return positions_of("donate_argnums", donate_argnums, len(abstract), name)
    trace = getattr(fn, "trace", None)
    if trace is None:
        return ()
    info = trace(*abstract).args_info[0]
    return tuple(
        position
        for position, argument in enumerate(info)
        if jax.tree.leaves(argument) and all(leaf.donated for leaf in jax.tree.leaves(argument))
    )
