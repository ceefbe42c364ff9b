"""Lowering of a step under a plan: shardings of arguments and results, pins in the module, and bodies of calls."""

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

from autoshard.cost import Topology
from autoshard.errors import UserError
from autoshard.exec.apply.calls_on_shards import explicit_mesh, lower_calls, place_calls
from autoshard.exec.apply.plan_agreement import check_arguments, check_even, check_results, other_program
from autoshard.exec.devices.local_devices import HOST_MEMORY, jax_mesh, named_sharding
from autoshard.planning import Plan, Spec
from autoshard.program import Lifted, OpaqueCall, Program, lower_traced, streamed, user_code


@dataclasses.dataclass(frozen=True)
class PlacedPlan:
    """Plan with the devices that run it, and the shardings of its arguments and results on them."""

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


def lower_planned(
    placed: PlacedPlan,
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

    plan = placed.plan
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract)
    check_arguments(plan, leaves)
    fn = _with_host(plan, fn)
    mesh = explicit_mesh([leaf for _, leaf in leaves])
    lifted = plan.origin.lifted == Lifted.ALL
    bare = tree.unflatten([leaf.update(sharding=None) for _, leaf in leaves])
    typings = [bare]
    axes = {axis for spec in plan.arguments.values() for axis in spec.axes}
    if mesh is not None and plan.origin.names_devices and not lifted and axes.issubset(mesh.axis_names):
        # The planned trace had specs in its types, and the plan has them for all arguments. Arguments with these types
        # reproduce the planned module.
        types = [named_sharding(mesh, spec) for spec in plan.arguments.values()]
        typed = [leaf.update(sharding=of) for (_, leaf), of in zip(leaves, types, strict=True)]
        typings.insert(0, tree.unflatten(typed))
    elif mesh is not None:
        typings.append(tree.unflatten([leaf for _, leaf in leaves]))
    abstract = typings[0]

    def planned(*args: Any) -> Any:
        """Call `fn`, as a new function that JAX has not cached."""
        return fn(*args)

    planned.__name__ = getattr(fn, "__name__", "planned")
    out = jax.eval_shape(planned, *abstract)
    check_results(plan, jax.tree.leaves(out))
    in_shardings = tree.unflatten(list(placed.in_shardings()))
    out_shardings = jax.tree.structure(out).unflatten(list(placed.out_shardings()))
    # A program with specs of its own, or within a mesh of the user's, names its own devices. A stand-in is lowered for
    # the plan's devices, and its body is then replaced by the program's.
    within = not jax.sharding.get_mesh().empty
    own_specs = plan.origin.names_devices or mesh is not None or within
    body = functools.partial(_zeros, out) if own_specs else planned
    calls: dict[str, OpaqueCall] = {}
    with jax.set_mesh(placed.mesh) if within else contextlib.nullcontext():
        traced = jax.jit(
            body,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            donate_argnums=donate_argnums,
            keep_unused=True,
        ).trace(*(bare if own_specs else abstract))
        lowered = user_code(planned.__name__, lambda: lower_traced(traced, calls))
    ir = mlir.inline_calls(mlir.drop_sent_arguments(lowered.compiler_ir("stablehlo")))
    if plan.module_hash and mlir.structure_hash(ir) != plan.module_hash:
        lifted = lifted or (mesh is not None and not plan.origin.names_devices)
        if plan.origin.names_devices and mesh is None:
            # JAX traces some loops otherwise where the specs of arguments name a mesh.
            shardings = zip(leaves, placed.in_shardings(), strict=True)
            typings.append(tree.unflatten([leaf.update(sharding=of) for (_, leaf), of in shardings]))
        platforms = dict.fromkeys((Topology.parse(plan.topology).traits.platform, "cpu"))
        donors = (_lowered_for(platform, planned, each, calls, lifted) for platform in platforms for each in typings)
        for donor in filter(None, donors) if module is None else (module,):
            if mlir.structure_hash(mlir.inline_calls(mlir.parse_module(donor))) == plan.module_hash:
                break
        else:
            raise UserError(other_program(plan, mlir.to_bytes(ir)))
        own_targets = mlir.call_targets(ir)
        mlir.replace_body(ir, donor)
        check_targets(placed, mlir.call_targets(ir) - own_targets - mlir.NO_DEVICE_TARGETS)
        mlir.use_mesh(ir, mlir.ensure_mesh(ir, "mesh", plan.mesh))
    ops = mlir.number_ops(ir)
    if own_specs and mlir.remaining_calls(ir):
        _lowered_for("cpu", planned, abstract, calls)
    platform = placed.mesh.devices.flat[0].platform
    bodies, lowerings = lower_calls(plan, ops, calls, placed.mesh, "cuda" if platform == "gpu" else platform)
    _insert_choices(placed, ir, lowered)
    place_calls(plan, ir, ops, bodies)
    mlir.drop_gspmd(ir)
    _LIVE_LOWERINGS[lowered] = lowerings
    return lowered


def check_targets(placed: PlacedPlan, targets: Collection[str]) -> None:
    """Raise `UserError` if there are `targets` of custom calls and the present devices are of another platform than the
    plan's.
    """
    plan, device = placed.plan, placed.mesh.devices.flat[0]
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


def _insert_choices(placed: PlacedPlan, ir: Any, lowered: Any) -> None:
    """Insert the plan's pins and regions into `ir`, the module of `lowered`, and verify that `lowered` has them.

    Also guards indexing, and rewrites pooling and layouts off TPUs, or orders host transfers on TPUs. Raises
    `UserError` if the module has values on the host and the devices have no memory there. Raises `RuntimeError` if this
    jax version compiles another module than `ir`.
    """
    from autoshard import mlir

    plan = placed.plan
    before = mlir.count_pins(ir)
    regions = mlir.regions_of(ir, plan.regions)
    inserted = mlir.insert_pins(ir, "mesh", plan.mesh, plan.pins)
    mlir.insert_regions(ir, "mesh", plan.mesh, regions)
    mlir.guard_indexing(ir)
    if placed.mesh.devices.flat[0].platform != "tpu":
        mlir.unfold_pooling(ir)
        mlir.drop_layouts(ir)
    else:
        mlir.order_hosted(ir)
    text = lowered.as_text()
    if mlir.PLACEMENT in text:
        check_host_memory(placed.mesh.devices.flat[0])
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
    placed: PlacedPlan, module: bytes, aliases: Mapping[int, int], bodies: Mapping[int, bytes] | None = None
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

    plan = placed.plan
    source = mlir.inline_calls(mlir.parse_module(module))
    if plan.module_hash and mlir.structure_hash(source) != plan.module_hash:
        raise UserError(other_program(plan, module))
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
            in_shardings=placed.in_shardings(),
            out_shardings=placed.out_shardings(),
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
    _insert_choices(placed, ir, lowered)
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
