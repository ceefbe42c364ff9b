"""Application of a plan to a JAX function: its own lowering, with shardings on arguments and pins in the module."""

import collections
import dataclasses
import functools
import os
import pathlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from autoshard.cost import Topology
from autoshard.errors import UserError
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
    PositionalCall,
    Program,
    arrays_of,
    by_position,
    functional,
    lower_traced,
    positions_of,
    streamed,
    user_code,
)


@dataclasses.dataclass(frozen=True)
class Application:
    """Plan on devices; `Plan.jit` and related methods delegate to it."""

    plan: Plan
    """Plan that is applied to the program."""
    devices: tuple[Any, ...] | None = None
    """JAX devices to use, in any order; None for those of the default backend."""

    @functools.cached_property
    def mesh(self) -> Any:
        """The plan's `jax.sharding.Mesh` over its devices, constructed at first use; `UserError` if they do not form
        the topology.
        """
        return jax_mesh(self.plan, self.devices)

    def in_shardings(self) -> tuple[Any, ...]:
        """Return a `NamedSharding` for every argument of the step, flat, in the plan's order. Raises `UserError` as
        `_shardings` does.
        """
        return self._shardings(self.plan.arguments)

    def out_shardings(self) -> tuple[Any, ...]:
        """Return a `NamedSharding` for every result of the step, flat, in the plan's order. Raises `UserError` as
        `_shardings` does.
        """
        return self._shardings(self.plan.results)

    def _shardings(self, specs: Mapping[str, Spec]) -> tuple[Any, ...]:
        """Return a `NamedSharding` for each named spec, in the host's memory for tensors in `plan.host`.

        Raises `UserError` if the plan has such tensors and devices lack host memory.
        """
        if self.plan.host:
            check_host_memory(self.mesh.devices.flat[0])
        return tuple(named_sharding(self.mesh, spec, name in self.plan.host) for name, spec in specs.items())

    def shard_batch(self, batch: Any) -> Any:
        """Place a batch as planned and return the same pytree of `jax.Array`; see `Plan.shard_batch`.

        Raises `UserError` if the shapes of its leaves are not those of the plan's batch, in order. Dtypes are not
        compared.
        """
        import jax

        plan = self.plan
        names = [name for name in plan.arguments if plan.roles[name] == "batch"]
        leaves, tree = jax.tree.flatten(batch)
        shapes = [tuple(getattr(leaf, "shape", ())) for leaf in leaves]
        if shapes != [plan.shapes[name] for name in names]:
            wanted = ", ".join(f"{name} {list(plan.shapes[name])}" for name in names) or "nothing"
            raise UserError(
                f"the batch has arrays of shapes {', '.join(str(list(shape)) for shape in shapes) or 'nothing'}; the "
                f"plan for {plan.program_name} wants {wanted}."
            )
        placed = [
            place(leaf, named_sharding(self.mesh, plan.arguments[name]))
            for leaf, name in zip(leaves, names, strict=True)
        ]
        return tree.unflatten(placed)

    def load_weights(self, path: str | os.PathLike[str], program: Program) -> dict[str, Any]:
        """Load weights from safetensors files as global arrays by parameter name, sharded as planned; see
        `Plan.load_weights`.
        """
        from autoshard.exec.apply import weight_files

        return weight_files.load_weights(self.plan, path, program, self.mesh)

    def save_weights(
        self, params: Mapping[str, Any], folder: str | os.PathLike[str], program: Program
    ) -> list[pathlib.Path]:
        """Write sharded parameters to safetensors files in `folder` and return their paths; see `Plan.save_weights`."""
        from autoshard.exec.apply import weight_files

        return weight_files.save_weights(self.plan, params, folder, program)

    def load_batches(self, batches: Iterable[Any], ahead: int) -> Iterator[Any]:
        """Yield every batch in order, sharded by `shard_batch`; at most `ahead` placed batches wait.

        The first batch is yielded when `ahead` batches are placed, or all of fewer. Raises `UserError` for `ahead`
        below 1 at the first `next`.
        """
        if ahead < 1:
            raise UserError(f"plan.load_batches: ahead={ahead}, but at least 1 batch has to be sent.")
        sent: collections.deque[Any] = collections.deque()
        for batch in batches:
            sent.append(self.shard_batch(batch))  # returns before the data has arrived
            if len(sent) == ahead:
                yield sent.popleft()
        yield from sent

    def torch(self) -> TorchPlan:
        """Return the object that applies the plan to torch modules."""
        return TorchPlan(self.plan)

    def jit(
        self, fn: Callable[..., Any] | Program, donate_argnums: int | Sequence[int] | None = None
    ) -> "PlannedFunction":
        """Return a function of the same arguments that runs as planned; see `Plan.jit`. Compilation waits for the first
        call.

        - `donate_argnums`: positions to donate; None for those of the `Program` or of a `jax.jit` function.

        Raises `UserError` if `fn` is neither callable nor a `Program`.
        """
        return PlannedFunction(self, *_step_of(fn, donate_argnums))

    def lower(
        self,
        fn: Callable[..., Any] | Program,
        args: Sequence[Any],
        donate_argnums: int | Sequence[int] | None = None,
        module: bytes | None = None,
    ) -> Any:
        """Lower a function to a `jax.stages.Lowered` with shardings and pins; see `lower_planned`.

        - `args`: arguments by position, as arrays, numbers or `jax.ShapeDtypeStruct`s.
        - `donate_argnums`: as for `jit`.
        - `module`: serialised StableHLO module that was planned, if the caller has it.
        """
        import jax

        fn, donate_argnums = _step_of(fn, donate_argnums)
        call = by_position(fn, args)
        donate_argnums = call.donated if donate_argnums is None else donate_argnums
        step = functional(in_recipe(self.plan, call.fn), call.args)
        abstract = jax.tree.map(_abstract, step.args)
        return lower_planned(self, step.fn, abstract, _donated(step.fn, abstract, donate_argnums), module)


class PlannedFunction:
    """Function compiled under a plan, once for every structure of its arguments, and called like the original.

    A structure is the pytree with shapes, dtypes and weak types. Arguments move to the plan's shardings if they have
    others. A donated argument that already has the plan's sharding is consumed, as under `jax.jit`. Flax NNX objects
    are updated in place, as under `nnx.jit`.
    """

    def __init__(
        self, application: Application, fn: Callable[..., Any], donate_argnums: int | Sequence[int] | None
    ) -> None:
        """Store the function; nothing is compiled. `donate_argnums` are positions, None for those of a `jax.jit`
        function.
        """
        self.application = application
        self.fn = fn
        self.donate_argnums = donate_argnums
        self._compiled: dict[Any, _Compiled] = {}
        functools.update_wrapper(self, fn, updated=())

    def lower(self, *args: Any, **named: Any) -> Any:
        """Return the `jax.stages.Lowered` of the function for these arguments, with pins; nothing is cached."""
        call = by_position(self.fn, args, named)
        return self.application.lower(call.fn, call.args, self._donated(call))

    def compile(self, *args: Any, **named: Any) -> Any:
        """Return the cached `jax.stages.Compiled` for these arguments (arrays or `jax.ShapeDtypeStruct`s), compiled if
        it is new.
        """
        return self._compile(by_position(self.fn, args, named))[0].step

    def shardings(self, *args: Any, **named: Any) -> tuple[Any, ...]:
        """Return pytrees of `NamedSharding` like the arguments, with which to place or load them; compiles the step if
        it is new.
        """
        return self._compile(by_position(self.fn, args, named))[0].shardings

    def __call__(self, *args: Any, **named: Any) -> Any:
        """Run the step under the plan and return its results as the original function would.

        Places arguments first, and compiles for a new structure. Results have types of the arguments' explicit mesh, if
        there is one.
        """
        import jax

        call = by_position(self.fn, args, named)
        compiled, arrays = self._compile(call)
        if self.application.mesh.is_multi_process:
            out = compiled.step(*jax.tree.map(place, arrays, compiled.shardings))
        else:
            out = compiled.step(*jax.device_put(arrays, compiled.shardings))
        mesh = explicit_mesh(jax.tree.leaves(arrays))
        return compiled.function.finish(call.args, out if mesh is None else on_mesh(out, mesh))

    def _donated(self, call: PositionalCall) -> int | Sequence[int] | None:
        """Return the positions to donate: those of the user, else those of a `jax.jit` function."""
        return call.donated if self.donate_argnums is None else self.donate_argnums

    def _compile(self, call: PositionalCall) -> tuple["_Compiled", tuple[Any, ...]]:
        """Return the compiled step for such arguments, from the cache or new, and the pytree of their arrays.

        Raises `UserError` inside a JAX transformation, and if the step needs more memory than JAX may use
        (`check_granted`).
        """
        import jax
        from jax.core import Tracer

        extracted = arrays_of(call.args)
        leaves, tree = jax.tree.flatten(extracted.args)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            name = getattr(self.fn, "__name__", "the function")
            raise UserError(
                f"`{name}` is compiled under a plan and cannot be called inside jax.jit, jax.grad or jax.vmap: "
                "plan the whole step and call that."
            )
        abstract = [_abstract(leaf) for leaf in leaves]
        key = (extracted.key, call.key, tree, tuple((leaf.shape, leaf.dtype, leaf.weak_type) for leaf in abstract))
        if key not in self._compiled:
            function = functional(in_recipe(self.application.plan, call.fn), call.args)
            lowered = self.application.lower(function.fn, tree.unflatten(abstract), self._donated(call))
            shardings = tree.unflatten(list(self.application.in_shardings()))
            compiled = compile_lowered(lowered)
            check_granted(self.application.plan, compiled, self.application.mesh.devices.flat)
            self._compiled[key] = _Compiled(compiled, shardings, function)
        return self._compiled[key], extracted.args


def compile_lowered(lowered: Any) -> Any:
    """Compile a `jax.stages.Lowered` into a `jax.stages.Compiled` that accepts arrays of any dtype.

    XLA gives arguments of 4 bits and fewer a layout that states their bits. Arrays of jax 0.10 have the same bits, but
    their layout states none. For that reason jax refuses to call the compiled program; `jax.jit` does not compare
    layouts.
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
    """Return True if the layout of an array of 4 bits states the bits, as that of a compiled argument does; tested
    once.
    """
    import jax.numpy as jnp

    array: Any = jnp.zeros(1, "int4")
    return bool(_bits_in(array.format.layout))


@dataclasses.dataclass(frozen=True, slots=True)
class _Compiled:
    """Compiled step, the shardings of its arguments, and the function over arrays that it computes."""

    step: Any
    """Compiled step, a `jax.stages.Compiled`."""
    shardings: tuple[Any, ...]
    """Pytrees of `NamedSharding` like the arrays of the arguments."""
    function: Functional
    """Function over arrays, whose `finish` turns results into those of the original."""


def lower_planned(
    application: Application,
    fn: Callable[..., Any],
    abstract: tuple[Any, ...],
    donate_argnums: tuple[int, ...],
    module: bytes | None = None,
) -> Any:
    """Lower `fn(*abstract)` under the plan to a `jax.stages.Lowered` and insert its pins.

    - `abstract`: pytrees of `jax.ShapeDtypeStruct`, one for each argument.
    - `donate_argnums`: positions of arguments to donate.
    - `module`: serialised module that was planned; see below.

    The lowering belongs to a new wrapper, so that no cached program of `fn` is edited or run by mistake. Platforms
    lower some ops differently. If the lowering differs from the planned module, its body is replaced by `module`.
    Without `module` it is replaced by a lowering of `fn` for the plan's platform or for CPUs, the first that equals the
    planned module.

    Raises `UserError` if the program is not the planned one, or if its body calls targets that these devices lack.
    Raises `RuntimeError` if this jax version does not compile the edited module.
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
        # The planned trace had specs in its types, and the plan has them for all arguments. Arguments with these types
        # reproduce the planned module.
        types = [named_sharding(mesh, spec) for spec in plan.arguments.values()]
        typed = [leaf.update(sharding=of) for (_, leaf), of in zip(leaves, types, strict=True)]
        typings.insert(0, tree.unflatten(typed))
    abstract = typings[0]

    def planned(*args: Any) -> Any:
        """Call `fn`, as a new function that JAX has not cached."""
        return fn(*args)

    planned.__name__ = getattr(fn, "__name__", "planned")
    out = jax.eval_shape(planned, *abstract)
    check_results(plan, jax.tree.leaves(out))
    in_shardings = tree.unflatten(list(application.in_shardings()))
    out_shardings = jax.tree.structure(out).unflatten(list(application.out_shardings()))
    # A program with specs of its own, or with values of explicit types, names its own devices. A stand-in is lowered
    # for the plan's devices, and its body is then replaced by the program's.
    own_specs = plan.origin.names_devices or mesh is not None
    body = functools.partial(_zeros, out) if own_specs else planned
    traced = jax.jit(
        body,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        donate_argnums=donate_argnums,
        keep_unused=True,
    ).trace(*abstract)
    calls: dict[str, OpaqueCall] = {}
    lowered = user_code(planned.__name__, lambda: lower_traced(traced, calls))
    ir = mlir.inline_calls(mlir.drop_sent_arguments(lowered.compiler_ir("stablehlo")))
    if plan.module_hash and mlir.structure_hash(ir) != plan.module_hash:
        lifted = lifted or (mesh is not None and not plan.origin.names_devices)
        if plan.origin.names_devices and mesh is None:
            # JAX traces some loops otherwise where the specs of arguments name a mesh.
            placed = zip(leaves, application.in_shardings(), strict=True)
            typings.append(tree.unflatten([leaf.update(sharding=of) for (_, leaf), of in placed]))
        platforms = dict.fromkeys((Topology.parse(plan.topology).traits.platform, "cpu"))
        donors = (_lowered_for(platform, planned, each, calls, lifted) for platform in platforms for each in typings)
        for donor in filter(None, donors) if module is None else (module,):
            if mlir.structure_hash(mlir.inline_calls(mlir.parse_module(donor))) == plan.module_hash:
                break
        else:
            raise UserError(other_program(plan))
        own_targets = mlir.call_targets(ir)
        mlir.replace_body(ir, donor)
        check_targets(application, mlir.call_targets(ir) - own_targets - mlir.NO_DEVICE_TARGETS)
        mlir.use_mesh(ir, mlir.ensure_mesh(ir, "mesh", plan.mesh))
    ops = mlir.number_ops(ir)
    if own_specs and mlir.remaining_calls(ir):
        _lowered_for("cpu", planned, abstract, calls)
    platform = application.mesh.devices.flat[0].platform
    bodies, lowerings = lower_calls(plan, ops, calls, application.mesh, "cuda" if platform == "gpu" else platform)
    _insert_choices(application, ir, lowered)
    place_calls(plan, ir, ops, bodies)
    mlir.drop_gspmd(ir)
    _LIVE_LOWERINGS[lowered] = lowerings
    return lowered


def check_targets(application: Application, targets: Collection[str]) -> None:
    """Raise `UserError` if there are `targets` of custom calls and the present devices are of another platform than the
    plan's.
    """
    plan, device = application.plan, application.mesh.devices.flat[0]
    kind, traits = device.device_kind, Topology.parse(plan.topology).traits
    if targets and device.platform != traits.name:
        names = ", ".join(f"`{target}`" for target in sorted(targets))
        raise UserError(
            f"the plan is for {plan.topology}, for which JAX lowers {plan.program_name} to calls of {names}; {kind} "
            "devices have none: plan it for the devices that are here."
        )


def _with_host(plan: Plan, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step that was planned: `fn`, with the plan's host tensors streamed from and to the host's memory.

    Returns `fn` itself if the program was planned with nothing on the host.
    """
    if plan.origin.on_host == "none":
        return fn
    places = {name: number for number, name in enumerate(plan.results)}
    ties = {number: places[name] for number, name in enumerate(plan.arguments) if name in places}
    return streamed(fn, ties, [number for number, name in enumerate(plan.arguments) if name in plan.host])


def _zeros(out: Any, *_: Any) -> Any:
    """Return zeros with the shapes and dtypes of a program's results for any arguments: a stand-in for the program."""
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), out)


def _insert_choices(application: Application, ir: Any, lowered: Any) -> None:
    """Insert the plan's pins and regions into `ir`, the module of `lowered`, and verify that `lowered` has them.

    Also guards indexing, and rewrites pooling and layouts off TPUs, or orders host transfers on TPUs. Raises
    `UserError` if the module has values on the host and the devices have no memory there. Raises `RuntimeError` if this
    jax version compiles another module than `ir`.
    """
    from autoshard import mlir

    plan = application.plan
    before = mlir.count_pins(ir)
    regions = mlir.regions_of(ir, plan.regions)
    inserted = mlir.insert_pins(ir, "mesh", plan.mesh, plan.pins)
    mlir.insert_regions(ir, "mesh", plan.mesh, regions)
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
    """Raise `UserError` if `device`, present or described, cannot place values in its host's memory."""
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST_MEMORY not in kinds:
        raise UserError(
            f"the step keeps values on its host, and {device.device_kind} devices have no memory there "
            f"(`{HOST_MEMORY}`) with this version of jax, only {', '.join(kinds) or 'none'}; plan it with a recipe "
            "that offloads nothing, and without `--host`."
        )


_LIVE_LOWERINGS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Lowering -> the lowerings of its calls, since host callbacks live only as long as the lowering that made them."""


def lower_module(
    application: Application, module: bytes, aliases: Mapping[int, int], bodies: Mapping[int, bytes] | None = None
) -> Any:
    """Lower a module that has no Python function here to a `jax.stages.Lowered` under the plan, with its pins.

    - `module`: serialised StableHLO module.
    - `aliases`: number of a donated argument -> number of its result.
    - `bodies`: bodies of calls that stand for functions (`lower_for_compiler`), by op number; None for none.

    A stand-in with the module's types is lowered for the devices, and its body is replaced by the module's. Raises
    `UserError` if the module is not the planned one, by its hash, its numbers of arguments and results, or their dims.
    Raises it also for uneven shards.
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
    for what, types, planned in (("argument", arguments, specs[0]), ("result", results, specs[1])):
        if len(types) != len(planned):
            raise UserError(
                f"the plan is for another program: it has {len(planned)} {what}s, this one {len(types)}; plan it again."
            )
        for (name, spec), (shape, dtype) in zip(planned, types, strict=True):
            words = dtype == "uint32" and len(shape) - len(spec.dims) == 1  # a typed PRNG key
            if len(spec.dims) != len(shape) - words:
                raise UserError(
                    f"the plan is for another program: {what} `{name}` has {len(spec.dims)} dims in the plan, "
                    f"{len(shape)} here; plan it again."
                )
            check_even(plan, f"{what} `{name}`", shape[: len(spec.dims)], spec)

    def stand_in(*_: Any) -> Any:
        """Return zeros of the results' types."""
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
    """Map the argument number to the result number of donated state whose spec does not change; other donations are
    left out.
    """
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
    """Return the function's serialised StableHLO module for a platform; None if JAX cannot lower it for that platform.

    - `platform`: JAX's name of the platform.
    - `planned`: function to lower.
    - `abstract`: pytrees of its arguments' shapes.
    - `found`: mapping that receives the opaque calls, by key; None to discard them.
    - `lifted`: True removes the program's own sharding constraints.
    """
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
    """Return the `jax.ShapeDtypeStruct` of an argument, with its explicit sharding if its type has one.

    A Python number becomes a weakly typed scalar. Dtypes are canonicalised as JAX does, except those of a
    `ShapeDtypeStruct`. Raises `UserError` if it is no array or number.
    """
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
    """Return a function, or a program's step, and its donated arguments; `donate_argnums` overrides the program's.

    Raises `UserError` if `fn` is neither a `Program` nor callable.
    """
    if isinstance(fn, Program):
        return fn.fn, fn.donate_argnums if donate_argnums is None else donate_argnums
    if not callable(fn):
        raise UserError(f"a plan is for a function or an autoshard.Program; found {fn!r}.")
    return fn, donate_argnums


def _donated(
    fn: Callable[..., Any], abstract: tuple[Any, ...], donate_argnums: int | Sequence[int] | None
) -> tuple[int, ...]:
    """Return the positions to donate: `donate_argnums`, else the arguments that a `jax.jit` function donates whole.

    An argument without arrays is not donated, and a function that is not jitted donates nothing.
    """
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
