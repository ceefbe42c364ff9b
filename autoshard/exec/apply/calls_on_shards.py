"""Opaque calls that run on each device's shards, and JAX's explicit meshes around a planned step."""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from autoshard import mlir
from autoshard.errors import UserError
from autoshard.planning import Call, Plan, Spec
from autoshard.program import OpaqueCall, Program, lower_on_shards, lower_traced


def lower_calls(
    plan: Plan, ops: Sequence[Any], found: Mapping[str, OpaqueCall], mesh: Any, platform: str
) -> tuple[dict[int, bytes], list[Any]]:
    """Lower the body of every call that stands for a function; return bodies by op number, and objects to keep alive.

    - `ops`: ops of the module before any pin (`mlir.number_ops`).
    - `found`: functions behind the calls, by key.
    - `mesh`: mesh over which the calls run.
    - `platform`: platform of the bodies.

    A call that the plan does not split runs whole on every device. Raises `UserError` for a call whose function is
    missing, or that cannot be lowered for `platform`.
    """
    planned = {call.op: call for call in plan.calls}
    bodies: dict[int, bytes] = {}
    lowerings = []
    for number, op in enumerate(ops):
        key = mlir.call_key(op)
        if not key:
            continue
        name = key.rpartition("#")[0]
        if key not in found:
            raise UserError(
                f"the program calls `{name}`, a Python function or kernel that a file does not hold; "
                "give the Python program that it was traced from."
            )
        by_hand = mlir.is_by_hand(op)
        call = _whole(number, op) if by_hand else planned.get(number, _whole(number, op))
        operands, results = ([_partition_spec(spec) for spec in side] for side in (call.operands, call.results))
        try:
            bodies[number], lowering = lower_on_shards(found[key], mesh, operands, results, platform, by_hand)
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
    """Return the bodies of a program's calls, by op number, for a platform whose devices are not present."""
    import jax
    from jax.sharding import AbstractMesh, AxisType

    with mlir.new_context() as context:
        module = mlir.inline_calls(mlir.parse_module(program.module, context))
        if not mlir.remaining_calls(module):
            return {}
        opaque_calls: dict[str, OpaqueCall] = {}
        traced = jax.jit(lambda *args: program.fn(*args), keep_unused=True).trace(*program.args)
        lower_traced(traced, opaque_calls, (program.platform,))
        mesh = AbstractMesh(tuple(plan.mesh.values()), tuple(plan.mesh), axis_types=(AxisType.Auto,) * len(plan.mesh))
        return lower_calls(plan, mlir.number_ops(module), opaque_calls, mesh, platform)[0]


def place_calls(plan: Plan, module: Any, ops: Sequence[Any], bodies: Mapping[int, bytes]) -> None:
    """Replace every call in the module, in place, by its work on shards.

    - `ops`: ops of the module, as numbered before pins.
    - `bodies`: lowered bodies by op number.

    Raises `UserError` if the plan splits a call whose code is compiled for whole tensors.
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


def _whole(number: int, op: Any) -> Call:
    """Return a call whose operands and results are replicated."""
    ranks = [[len(shape) for shape in side] for side in mlir.call_shapes(op)]
    operands, results = (tuple(Spec.replicated(rank) for rank in side) for side in ranks)
    return Call(number, "", operands, results)


def _partition_spec(spec: Spec) -> Any:
    """Convert a spec to a `PartitionSpec`."""
    from jax.sharding import PartitionSpec

    return PartitionSpec(*(axes or None for axes in spec.dims))


def explicit_mesh(leaves: Iterable[Any]) -> Any:
    """Return the mesh in the types of arrays or shapes, else that of the context; None if neither is explicit."""
    import jax

    for leaf in leaves:
        sharding = in_type(leaf)
        if sharding is not None:
            return sharding.mesh
    context = jax.sharding.get_mesh()
    return context if context.abstract_mesh.explicit_axes else None


def in_type(leaf: Any) -> Any:
    """Return the sharding that is part of the type of an array or shape; None if there is none."""
    from jax.sharding import NamedSharding

    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.abstract_mesh.explicit_axes else None


def on_mesh(results: Any, mesh: Any) -> Any:
    """Return the results of a step with types of an explicit mesh, as `jax.jit` types them; no data moves.

    A result stays on the plan's mesh if no spec over the other mesh splits it over the same devices alike.
    """
    import jax

    leaves, tree = jax.tree.flatten(results)
    shardings = [_spelled(leaf.sharding, leaf.shape, mesh) for leaf in leaves]
    return tree.unflatten(jax.device_put(leaves, shardings))


@functools.lru_cache(maxsize=4096)
def _spelled(sharding: Any, shape: tuple[int, ...], mesh: Any) -> Any:
    """Return the sharding over another mesh that places shards alike; the given one if there is none."""
    from jax.sharding import NamedSharding, PartitionSpec

    counts = [whole // part if part else 1 for whole, part in zip(shape, sharding.shard_shape(shape), strict=True)]
    axes = {name: size for name, size in mesh.shape.items() if size > 1}
    for entries in _entries(counts, axes):
        candidate = NamedSharding(mesh, PartitionSpec(*entries), memory_kind=sharding.memory_kind)
        if candidate.is_equivalent_to(sharding, len(shape)):
            return candidate
    return sharding


def _entries(counts: Sequence[int], axes: dict[str, int]) -> Iterator[tuple[Any, ...]]:
    """Yield the ways to split dims into `counts` shards, each axis used at most once."""
    if not counts:
        yield ()
        return
    for number in range(len(axes) + 1):
        for names in itertools.permutations(axes, number):
            if math.prod(axes[name] for name in names) == counts[0]:
                left = {name: size for name, size in axes.items() if name not in names}
                first: Any = names[0] if len(names) == 1 else names or None
                yield from ((first, *others) for others in _entries(counts[1:], left))
