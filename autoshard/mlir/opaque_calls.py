"""Opaque calls: custom calls that represent a Python function until its operands' specs are chosen."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.mlir.annotations import SpecLike, ensure_mesh, sharding_attribute
from autoshard.mlir.inline import inline_calls
from autoshard.mlir.module import (
    collect,
    main_block,
    main_function,
    mesh_ops,
    parse_module,
    replace_by_block,
    target_name,
    tensor_type,
)
from autoshard.mlir.module_shardings import COLLECTIVES_MESH, PLACEMENT
from autoshard.mlir.stated_shardings import rename_meshes


TARGET = "autoshard.call"
"""Target of a custom call that represents a Python function."""


@dataclasses.dataclass(frozen=True, slots=True)
class CallWork:
    """Work of one execution of a call on whole tensors, as the call declares it; 0 or empty if it is not known."""

    flops: int = 0
    """FLOPs of the matmuls in the call."""
    traffic: int = 0
    """Bytes that the call reads from and writes to main memory."""
    dtype: str = ""
    """The dtype in which most of the FLOPs multiply."""
    triangular: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Number of blocks of a factor along which the work grows evenly from almost none, by factor of the call's rule."""
    steps: int = 0
    """Steps of a kernel's grid that compute something."""
    imbalance: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Work of the busiest shard over the mean work, by the factor of the call's rule that is split."""
    sent_share: float = 1.0
    """Share of the rows that are real, and therefore sent, in a call that exchanges rows."""


FIXED_SHAPES = ("tpu_custom_call", "__cudnn$", "__gpu$xla.gpu.triton", "mosaic_gpu", "CustomSPMDPartitioning")
"""Prefixes of targets whose configuration is code for whole shapes, or a callback of another process."""


def emit_call(
    values: Sequence[Any],
    results: Sequence[tuple[Sequence[int], Any]],
    name: str,
    digest: str,
    rule: Any = None,
    work: CallWork | None = None,
) -> list[Any]:
    """Emit a custom call that represents the function `name` at the current insertion point; return its results.

    - `values`: operands of the call.
    - `results`: shape and numpy dtype of each result.
    - `digest`: digest of the function; the call's key is `name#digest`.
    - `rule`: an `sdy.op_sharding_rule`, or None.
    - `work`: work of one execution, None if unknown; it becomes attributes that `call_work` reads.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    call = stablehlo.CustomCallOp(
        tensor_types(results),
        list(values),
        call_target_name=ir.StringAttr.get(TARGET),
        has_side_effect=ir.BoolAttr.get(False),
        api_version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 2),
        called_computations=ir.ArrayAttr.get([]),
        backend_config=ir.StringAttr.get(f"{name}#{digest}"),
        operand_layouts=None,
        result_layouts=None,
    )
    work = work or CallWork()
    sloping = ",".join(f"{factor}:{blocks}" for factor, blocks in work.triangular.items())
    texts = {"flops": str(work.flops), "traffic": str(work.traffic), "dtype": work.dtype, "sloping": sloping}
    texts["steps"] = str(work.steps or "")
    texts["uneven"] = ",".join(f"{factor}:{times}" for factor, times in work.imbalance.items())
    texts["sent"] = str(work.sent_share) if work.sent_share < 1 else ""
    for key, text in texts.items():
        if text:
            call.operation.attributes[f"autoshard.{key}"] = ir.StringAttr.get(text)
    if rule is not None:
        call.operation.attributes["sdy.sharding_rule"] = rule
    return list(call.results)


def tensor_types(tensors: Sequence[tuple[Sequence[int], Any]]) -> list[Any]:
    """Return the MLIR type of each (shape, numpy dtype); needs a current context."""
    from jax.interpreters import mlir
    from jaxlib.mlir import ir

    return [ir.RankedTensorType.get(list(shape), mlir.dtype_to_ir_type(dtype)) for shape, dtype in tensors]


def rule_attribute(
    sizes: Sequence[int],
    kinds: Sequence[str],
    operands: Sequence[Sequence[Sequence[int]]],
    results: Sequence[Sequence[Sequence[int]]],
) -> Any:
    """Build `#sdy.op_sharding_rule` of numbered factors; needs a current context.

    - `sizes`: size of each factor.
    - `kinds`: kind of each factor: `parallel`, `reduction`, `need_replication` or `permutation`.
    - `operands`, `results`: factors of each dim of each tensor.
    """
    from jaxlib.mlir.dialects import sdy

    def tensors(side: Sequence[Sequence[Sequence[int]]]) -> list[Any]:
        """Return the mapping attributes of tensors with these factors."""
        return [sdy.TensorMappingAttr.get([sdy.DimMappingAttr.get(list(dim)) for dim in dims]) for dims in side]

    def of(kind: str) -> list[int]:
        """Return the factors of a kind."""
        return [factor for factor, each in enumerate(kinds) if each == kind]

    return sdy.OpShardingRuleAttr.get(
        list(sizes),
        tensors(operands),
        tensors(results),
        reduction_factors=of("reduction"),
        need_replication_factors=of("need_replication"),
        permutation_factors=of("permutation"),
        is_custom=True,
    )


def read_top_k(op: Any) -> tuple[tuple[int, ...], str, int] | None:
    """Return shape and dtype of a top-k's operand, and the number of elements that it selects; None for another op."""
    if op.name != "chlo.top_k":
        return None
    shape, dtype, _ = tensor_type(op.operands[0].type)
    return shape, dtype, tensor_type(op.results[0].type)[0][-1]


def call_target(op: Any) -> str:
    """Return a custom call's target; for a Python function or a TPU kernel the name of the function or kernel.

    A TPU kernel without a name gives `tpu_custom_call`.
    """
    from jaxlib.mlir import ir

    target = target_name(op)
    if target == TARGET:
        return call_key(op).rpartition("#")[0]
    if target == "tpu_custom_call" and "kernel_name" in op.attributes:
        return ir.StringAttr(op.attributes["kernel_name"]).value
    return target


def call_key(op: Any) -> str:
    """Return `name#digest` of a call that represents a function; empty for any other op."""
    from jaxlib.mlir import ir

    if op.name != "stablehlo.custom_call" or target_name(op) != TARGET:
        return ""
    return ir.StringAttr(op.attributes["backend_config"]).value


def backend_config(op: Any) -> str:
    """Return the configuration of a custom call as text; MLIR's text if it is a dictionary, empty if there is none."""
    for name in ("backend_config", "mhlo.backend_config"):
        if name in op.attributes:
            attribute = op.attributes[name]
            return str(getattr(attribute, "value", attribute))
    return ""


def call_figures(op: Any) -> dict[str, float] | None:
    """Return the numbers in the configuration of a call of `jax.ffi`, by name; None for a call without such a
    dictionary.
    """
    from jaxlib.mlir import ir

    config = op.attributes["mhlo.backend_config"] if "mhlo.backend_config" in op.attributes else None
    if not isinstance(config, ir.DictAttr):
        return None
    entries = (config[i] for i in range(len(config)))
    return {e.name: float(e.attr.value) for e in entries if isinstance(e.attr, ir.FloatAttr | ir.IntegerAttr)}


def call_work(op: Any) -> CallWork:
    """Return the work that the call itself declares in its attributes; defaults for missing ones."""
    from jaxlib.mlir import ir

    def told(key: str) -> str:
        """Return the text of an attribute of the call; empty if it is missing."""
        name = f"autoshard.{key}"
        return ir.StringAttr(op.attributes[name]).value if name in op.attributes else ""

    sloping = (entry.split(":") for entry in told("sloping").split(",") if entry)
    along = {int(f): int(n) for f, n in sloping}
    busiest = (entry.split(":") for entry in told("uneven").split(",") if entry)
    uneven = {int(f): float(times) for f, times in busiest}
    flops, traffic, steps = (int(told(key) or 0) for key in ("flops", "traffic", "steps"))
    return CallWork(flops, traffic, told("dtype"), along, steps, uneven, float(told("sent") or 1))


def call_shapes(op: Any) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return the shapes of an op's operands, and those of its results."""
    from jaxlib.mlir import ir

    sides = (op.operands, op.results)
    operands, results = ([tuple(ir.RankedTensorType(v.type).shape) for v in side] for side in sides)
    return operands, results


def is_by_hand(op: Any) -> bool:
    """Return True for an op inside a region that the program itself has split: values there are shards already."""
    parent = op.parent
    while parent is not None:
        if parent.operation.name == "sdy.manual_computation":
            return True
        parent = parent.operation.parent
    return False


def has_fixed_shapes(op: Any) -> bool:
    """Return True for a custom call that cannot run on shards in place of whole tensors, by its target
    (`FIXED_SHAPES`).
    """
    return target_name(op).startswith(FIXED_SHAPES)


def splice(module: Any, ops: Mapping[int, Any], bodies: Mapping[int, bytes], sizes: Mapping[str, int]) -> None:
    """Replace op `ops[n]` by the body of `@main` of the module `bodies[n]`, for each `n` of `bodies` (in place).

    Each body is a module over whole tensors whose only mesh has the axes `sizes`; it is inlined first.
    """
    for number, body in bodies.items():
        donor = _on_mesh_of(module, inline_calls(parse_module(body, module.context)), sizes)
        replace_by_block(ops[number], main_block(donor))


def _on_mesh_of(module: Any, donor: Any, sizes: Mapping[str, int]) -> Any:
    """Rename the only mesh of the donor (jax 0.11 names it twice) to that of the module with the axes `sizes`.

    The mesh is added to the module if it lacks one. Return `donor`; without a mesh nothing changes.
    """
    for name, mesh in list(mesh_ops(donor).items())[:1]:
        wanted = ensure_mesh(module, name, sizes)
        if COLLECTIVES_MESH in mesh.attributes:
            mesh_ops(module)[wanted].attributes[COLLECTIVES_MESH] = mesh.attributes[COLLECTIVES_MESH]
        rename_meshes(main_function(donor).operation, wanted)
    return donor


def run_on_shards(
    module: Any, op: Any, sizes: Mapping[str, int], operands: Sequence[SpecLike], results: Sequence[SpecLike]
) -> None:
    """Replace a custom call that accepts any shape by a manual region in which every device calls it on its shard (in
    place).

    - `sizes`: mesh axes with their sizes, all of them manual.
    - `operands`, `results`: specs of the call's operands and results, which must divide their dims.

    The call inside has the same attributes, without its sharding rule.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    name = ensure_mesh(module, "mesh", sizes)

    def shard(value: Any, spec: SpecLike) -> Any:
        """Return the type of a value's shard under a spec."""
        kind = ir.RankedTensorType(value.type)
        shape = list(kind.shape)
        for dim, axes in enumerate(spec.dims):
            for axis in axes:
                shape[dim] //= sizes[axis]
        return ir.RankedTensorType.get(shape, kind.element_type)

    def shardings(specs: Sequence[SpecLike]) -> Any:
        """Return the attribute of some specs on the mesh."""
        return sdy.TensorShardingPerValueAttr.get([sharding_attribute(name, spec.dims) for spec in specs])

    with module.context, op.location, ir.InsertionPoint(op):
        region = sdy.ManualComputationOp(
            [result.type for result in op.results],
            list(op.operands),
            shardings(operands),
            shardings(results),
            sdy.ManualAxesAttr.get([ir.StringAttr.get(axis) for axis in sizes]),
        )
        kinds = [shard(value, spec) for value, spec in zip(op.operands, operands, strict=True)]
        block = region.operation.regions[0].blocks.append(*kinds, arg_locs=[op.location] * len(kinds))
        attributes = {op.attributes[i].name: op.attributes[i].attr for i in range(len(op.attributes))}
        attributes.pop("sdy.sharding_rule", None)
        with ir.InsertionPoint(block):
            inner = ir.Operation.create(
                op.name,
                results=[shard(value, spec) for value, spec in zip(op.results, results, strict=True)],
                operands=list(block.arguments),
                attributes=attributes,
            )
            sdy.ReturnOp(list(inner.results))
        for old, new in zip(list(op.results), list(region.operation.results), strict=True):
            old.replace_all_uses_with(new)
    op.erase()


def remaining_calls(module: Any) -> list[str]:
    """Return the names of calls in the module that still represent functions, one entry a call."""
    calls = collect(module.operation, {"stablehlo.custom_call"})
    return [call_target(op) for op in calls if call_key(op)]


NO_DEVICE_TARGETS = frozenset(
    {TARGET, PLACEMENT, "Sharding", "LayoutConstraint", "SPMDFullToShardShape", "SPMDShardToFullShape"}
)
"""Targets of calls that no device executes: they instruct the compiler, or are replaced before compilation."""


def call_targets(module: Any) -> set[str]:
    """Return the targets of all custom calls of the module, as the module names them."""
    calls = collect(module.operation, {"stablehlo.custom_call"})
    return {target_name(op) for op in calls}
