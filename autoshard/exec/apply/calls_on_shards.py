"""Opaque calls that run on each device's shards, and JAX's explicit meshes around a planned step."""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from autoshard import mlir
from autoshard.errors import UserError
from autoshard.planning import Call, Plan, Spec
from autoshard.program import OpaqueCall, Program, lower_on_shards, lower_traced, top_k_on_shards


def lower_calls(
    plan: Plan, ops: Sequence[Any], found: Mapping[str, OpaqueCall], mesh: Any, platform: str
) -> tuple[dict[int, bytes], list[Any]]:
    """Lower the body of every call that stands for a function, and of every top-k that the plan splits.

    Returns the bodies by op number, and objects to keep alive.

    - `ops`: ops of the module before any pin (`mlir.number_ops`).
    - `found`: functions behind the calls, by key.
    - `mesh`: JAX mesh, concrete or abstract, over which the calls run.
    - `platform`: JAX's name of the platform of the bodies, such as `tpu` or `cuda`.

    A call that the plan does not split runs whole on every device. So does one in a region that the program split by
    hand, whose values are shards already. Raises `UserError` for a call whose function is missing, and for a Pallas
    kernel that `platform` cannot run. Other errors of the lowering pass through.
    """
    import jax

    planned = {call.op: call for call in plan.calls}
    bodies: dict[int, bytes] = {}
    lowerings = []
    for number, op in enumerate(ops):
        key = mlir.call_key(op)
        selection = mlir.read_top_k(op) if number in planned else None
        if not key and selection is None:
            continue
        name = key.rpartition("#")[0]
        if key and key not in found:
            raise UserError(
                f"the program calls `{name}`, a Python function or kernel that a file does not hold; "
                "give the Python program that it was traced from."
            )
        wide = selection is not None and selection[1].endswith("64")
        function = found[key] if selection is None else _selection(*selection)
        by_hand = mlir.is_by_hand(op)
        call = _whole(number, op) if by_hand else planned.get(number, _whole(number, op))
        operands, results = ([_partition_spec(spec) for spec in side] for side in (call.operands, call.results))
        try:
            with jax.enable_x64(wide or bool(jax.config.read("jax_enable_x64"))):
                bodies[number], lowering = lower_on_shards(function, mesh, operands, results, platform, by_hand)
        except ValueError as error:
            if "interpret mode" not in str(error):
                raise
            raise UserError(
                f"the Pallas kernel `{name}` cannot run on {platform} devices; plan and run it on TPUs, or give "
                "`pallas_call` interpret=True to rehearse it here."
            ) from error
        lowerings.append(lowering)
    return bodies, lowerings


def lower_for_compiler(program: Program, plan: Plan, platform: str) -> dict[int, bytes]:
    """Return the bodies of a program's calls, by op number, for a platform whose devices are not present.

    Traces the program again if it calls functions. Raises `UserError` as `lower_calls` does.
    """
    import jax
    from jax.sharding import AbstractMesh, AxisType

    with mlir.new_context() as context:
        module = mlir.inline_calls(mlir.parse_module(program.module, context))
        opaque_calls: dict[str, OpaqueCall] = {}
        if mlir.remaining_calls(module):
            traced = jax.jit(lambda *args: program.fn(*args), keep_unused=True).trace(*program.args)
            lower_traced(traced, opaque_calls, (program.platform,))
        elif not plan.calls:
            return {}
        mesh = AbstractMesh(tuple(plan.mesh.values()), tuple(plan.mesh), axis_types=(AxisType.Auto,) * len(plan.mesh))
        return lower_calls(plan, mlir.number_ops(module), opaque_calls, mesh, platform)[0]


def place_calls(plan: Plan, module: Any, ops: Sequence[Any], bodies: Mapping[int, bytes]) -> None:
    """Replace every call in the module, in place, by its work on shards.

    - `ops`: ops of the module, as numbered before pins.
    - `bodies`: lowered bodies by op number, which are spliced in.

    A split call without a body runs on shards with the plan's specs; calls that are replicated or split by hand stay as
    they are. Raises `UserError` if the plan splits a call whose code is compiled for whole tensors.
    """
    planned = {call.op: call for call in plan.calls}
    for number, call in planned.items():
        op = ops[number]
        if number in bodies or mlir.is_by_hand(op) or not any(spec.axes for spec in (*call.operands, *call.results)):
            continue
        if mlir.has_fixed_shapes(op):
            raise UserError(
                f"the plan splits `{call.name}`, whose code in the file is compiled for whole tensors; to run the "
                "plan, give the Python program that it was traced from."
            )
        mlir.run_on_shards(module, op, plan.mesh, call.operands, call.results)
    mlir.splice(module, {number: ops[number] for number in bodies}, bodies, plan.mesh)


def _selection(shape: tuple[int, ...], dtype: str, count: int) -> OpaqueCall:
    """Return the call of a top-k that selects `count` elements of an operand of this shape and dtype."""
    import jax

    return OpaqueCall("top_k", (jax.ShapeDtypeStruct(shape, dtype),), top_k_on_shards(count))


def _whole(number: int, op: Any) -> Call:
    """Return a `Call` of op `number`, without a name, whose operands and results are replicated."""
    ranks = [[len(shape) for shape in side] for side in mlir.call_shapes(op)]
    operands, results = (tuple(Spec.replicated(rank) for rank in side) for side in ranks)
    return Call(number, "", operands, results)


def _partition_spec(spec: Spec) -> Any:
    """Convert a spec to a `PartitionSpec` with an entry for every dim: a tuple of axes, or None for a dim that is not
    split.
    """
    from jax.sharding import PartitionSpec

    return PartitionSpec(*(axes or None for axes in spec.dims))


def explicit_mesh(leaves: Iterable[Any]) -> Any:
    """Return the mesh of the first array or shape with an explicit sharding, else the context's mesh; None if it has no
    explicit axes.
    """
    import jax

    for leaf in leaves:
        sharding = in_type(leaf)
        if sharding is not None:
            return sharding.mesh
    context = jax.sharding.get_mesh()
    return context if context.abstract_mesh.explicit_axes else None


def in_type(leaf: Any) -> Any:
    """Return the sharding in the type of an array or shape: a `NamedSharding` over a mesh with explicit axes; else
    None.
    """
    from jax.sharding import NamedSharding

    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.abstract_mesh.explicit_axes else None


def on_mesh(results: Any, mesh: Any) -> Any:
    """Return a step's pytree of results with types of an explicit mesh, as `jax.jit` types them; no data moves.

    A result stays on the plan's mesh if no spec over `mesh` splits it over the same devices alike.
    """
    import jax

    leaves, tree = jax.tree.flatten(results)
    shardings = [_spelled(leaf.sharding, leaf.shape, mesh) for leaf in leaves]
    return tree.unflatten(jax.device_put(leaves, shardings))


@functools.lru_cache(maxsize=4096)
def _spelled(sharding: Any, shape: tuple[int, ...], mesh: Any) -> Any:
    """Return the first `NamedSharding` over `mesh` that places shards of `shape` as `sharding` does; `sharding` if
    there is none.
    """
    from jax.sharding import NamedSharding, PartitionSpec

    counts = [whole // part if part else 1 for whole, part in zip(shape, sharding.shard_shape(shape), strict=True)]
    axes = {name: size for name, size in mesh.shape.items() if size > 1}
    for entries in _entries(counts, axes):
        candidate = NamedSharding(mesh, PartitionSpec(*entries), memory_kind=sharding.memory_kind)
        if candidate.is_equivalent_to(sharding, len(shape)):
            return candidate
    return sharding


def _entries(counts: Sequence[int], axes: dict[str, int]) -> Iterator[tuple[Any, ...]]:
    """Yield the entries of each `PartitionSpec` that splits dim k into exactly `counts[k]` shards.

    Each axis of `axes` (name -> size) is used at most once. An entry is None, a name, or a tuple of names, major first.
    """
    if not counts:
        yield ()
        return
    for number in range(len(axes) + 1):
        for names in itertools.permutations(axes, number):
            if math.prod(axes[name] for name in names) == counts[0]:
                left = {name: size for name, size in axes.items() if name not in names}
                first: Any = names[0] if len(names) == 1 else names or None
                yield from ((first, *others) for others in _entries(counts[1:], left))
