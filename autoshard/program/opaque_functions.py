"""Functions that stay whole in a program: each is lowered as one custom call, and as code on shards once it is planned.

These are functions with `jax.experimental.custom_partitioning`, which `register_rule` uses too, and Pallas kernels.
Otherwise they would be inlined on one device, or become code for one platform and one shape.
"""

import dataclasses
import functools
import hashlib
import importlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from autoshard import mlir
from autoshard.base.call_rules import bind
from autoshard.program.kernels.cudnn_attention import cudnn_flops, cudnn_rule
from autoshard.program.kernels.pallas_rules import PallasCall
from autoshard.program.kernels.ragged_dots import RaggedDot
from autoshard.program.kernels.ragged_exchange import RaggedCall, RaggedCalls
from autoshard.program.kernels.ring_attention import RingCall, RingCalls
from autoshard.program.kernels.splash_attention import kernels_as_they_are
from autoshard.program.registered_rules import Partition, jax_notation


OnShards = Callable[[Any, Sequence[Any], Sequence[Any]], tuple[Callable[..., Any], Sequence[Any], Sequence[Any]]]
"""Function of (mesh, operand specs, result specs) that returns the function on shards and its specs."""


@dataclasses.dataclass(frozen=True, slots=True)
class OpaqueCall:
    """A function that a program calls as one op."""

    name: str
    """Name of the call in the module."""
    operands: tuple[Any, ...]
    """A `jax.ShapeDtypeStruct` of each operand, with its unsharded shape."""
    on_shards: OnShards
    """Function that gives the code of one device."""


OpaqueCalls = dict[str, OpaqueCall]
"""Calls by their key in the module (`mlir.call_key`)."""


def lower_traced(traced: Any, found: OpaqueCalls | None = None, platforms: tuple[str, ...] | None = None) -> Any:
    """Lower `traced`, a `jax.stages.Traced`, with opaque functions as custom calls, which are added to `found`.

    `platforms` are those to lower for; None for JAX's own choice.
    """
    calls: OpaqueCalls = {} if found is None else found
    parameters = _private("jax._src.interpreters.mlir").LoweringParameters(override_lowering_rules=_overrides(calls))
    return traced.lower(lowering_platforms=platforms, _private_parameters=parameters)


def lower_on_shards(
    call: OpaqueCall, mesh: Any, operands: Sequence[Any], results: Sequence[Any], platform: str, by_hand: bool = False
) -> tuple[bytes, Any]:
    """Return a module, as bytes, in which every device of `mesh` runs the call on its shards, and its lowering.

    Its tensors are whole, or with `by_hand` those of the manual region.

    The lowering keeps the objects alive that the module refers to.

    - `operands`, `results`: their `PartitionSpec`s.
    - `platform`: `cpu`, `tpu` or `cuda`.
    - `by_hand`: True if the call stands in a manual region, where its operands are shards already.
    """
    import jax

    fn, into, out = call.on_shards(mesh, operands, results)

    def flat(*args: Any) -> tuple[Any, ...]:
        with jax.named_scope(call.name):  # readers of the compiled program find the kernel by its name
            return tuple(jax.tree.leaves(fn(*args)))

    if not by_hand:
        flat = jax.shard_map(flat, mesh=mesh, in_specs=tuple(into), out_specs=tuple(out), check_vma=False)
    rules = (kernels_as_they_are(),) if platform == "tpu" and "jax._src.pallas.pallas_call" in sys.modules else ()
    parameters = _private("jax._src.interpreters.mlir").LoweringParameters(override_lowering_rules=rules)
    traced = jax.jit(flat, keep_unused=True).trace(*call.operands)
    lowered = traced.lower(lowering_platforms=(platform,), _private_parameters=parameters)
    return mlir.to_bytes(lowered.compiler_ir("stablehlo")), lowered


def _private(name: str) -> Any:
    """Import a module of jax that is no public interface."""
    return importlib.import_module(name)


def _overrides(found: OpaqueCalls) -> tuple[tuple[Any, Any], ...]:
    """Return the lowering rules for opaque functions; a module that is not imported is not used by the program."""
    rules = []
    partitioning = sys.modules.get("jax._src.custom_partitioning")
    if partitioning is not None:
        rules.append((partitioning.custom_partitioning_p, functools.partial(_ruled, found, partitioning)))
    pallas = sys.modules.get("jax._src.pallas.pallas_call")
    if pallas is not None:
        rules.append((pallas.pallas_call_p, functools.partial(_kernel, found, pallas)))
    dispatch = _private("jax._src.dispatch")
    rules.append((dispatch.device_put_p, functools.partial(_lower_device_put, _private("jax._src.interpreters.mlir"))))
    lax = _private("jax._src.lax.lax")
    rules.append((lax.ragged_dot_general_p, functools.partial(_ragged, found, lax)))
    return tuple(rules)


def _lower_device_put(lowering: Any, ctx: Any, *values: Any, devices: Any, **params: Any) -> Any:
    """Lower transfers between memories as for TPUs and GPUs; JAX drops them in lowerings for a CPU."""
    core = _private("jax._src.core")
    out = []
    for value, device, aval in zip(values, devices, ctx.avals_out, strict=True):
        space = isinstance(device, core.MemorySpace)
        kind = core.mem_space_to_kind(device) if space else getattr(device, "_memory_kind", None)
        out.append(value if kind is None else lowering.wrap_with_memory_kind(ctx.module_context, value, kind, aval))
    return out


def _ruled(found: OpaqueCalls, partitioning: Any, ctx: Any, *values: Any, **params: Any) -> Any:
    """Lower a `custom_partitioning` with a sharding rule as one call; without a rule as JAX does."""
    if params["sharding_rule"] is None:
        return partitioning._custom_partitioning_lowering_rule(ctx, *values, **params)
    return _emit_ruled(found, values, params)


def _kernel(found: OpaqueCalls, pallas: Any, ctx: Any, *values: Any, **params: Any) -> Any:
    """Lower a Pallas kernel as one call; one with ordered host callbacks as JAX does."""
    if ctx.tokens_in.effects():  # ordered host callbacks, as TPU interpret mode emits: no opaque call
        return pallas._pallas_call_lowering(ctx, *values, **params)
    return _emit_kernel(found, ctx, values, params)


def _ragged(found: OpaqueCalls, lax: Any, ctx: Any, *values: Any, **params: Any) -> Any:
    """Lower a ragged matmul as one call, or by its plain implementation if its form is not supported."""
    operands, results = _shapes(ctx.avals_in), _shapes(ctx.avals_out)
    dot = RaggedDot.of(operands, params)
    if dot is None:
        plain = _private("jax._src.interpreters.mlir").lower_fun(lax._ragged_dot_general_impl, multiple_results=False)
        return plain(ctx, *values, **params)
    digest = _digest(*params.values(), operands, results)
    found[f"ragged_dot#{digest}"] = OpaqueCall("ragged_dot", operands, dot.on_shards)
    shapes = [(r.shape, r.dtype) for r in results]
    rule = mlir.rule_attribute(*dot.rule)
    return mlir.emit_call(values, shapes, "ragged_dot", digest, rule, mlir.CallWork(dot.flops))


def _shapes(avals: Sequence[Any]) -> tuple[Any, ...]:
    """Return abstract values as `jax.ShapeDtypeStruct`s."""
    import jax

    return tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals)


def _digest(*parts: Any) -> str:
    """Return a digest that distinguishes calls of one name and is the same in every process.

    It omits addresses, source lines and the `interpret` flag of inner kernels.
    """
    text = re.sub(r"0x[0-9a-f]+| at \S+:\d+|:\d+|\binterpret=\w+", "", "\n".join(map(str, parts)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _emit_ruled(found: OpaqueCalls, values: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Emit the call of a function with a sharding rule, add the call to `found`, and return its results.

    Ring and ragged exchanges, `register_rule`'s functions and cuDNN's attention have a known cost; others have none.
    """
    import jax
    from jax.sharding import NamedSharding

    call, partition, static = params["call"], params["partition"], params["static_args"]
    operands, results = _shapes(call.in_avals), _shapes(call.out_avals)
    if isinstance(partition, RingCalls):
        ring = partition.of(operands)
        work = mlir.CallWork(ring.flops, dtype=ring.dtype, steps=ring.steps)
        return _emit_exchanging(found, values, ring, work, (operands, results))
    if isinstance(partition, RaggedCalls):
        rows = partition.of(operands)
        work = mlir.CallWork(dtype=rows.dtype, imbalance=rows.uneven, sent_share=rows.sent)
        return _emit_exchanging(found, values, rows, work, (operands, results))
    work, notation = mlir.CallWork(), params["sharding_rule"]
    if isinstance(partition, Partition):
        name = partition.rule.name
        flops = bind(partition.rule, [a.shape for a in operands], [r.shape for r in results], f"of `{name}`").flops
        work = dataclasses.replace(partition.work, flops=flops or partition.work.flops)
    else:
        name = getattr(call.jaxpr.debug_info, "func_name", "") or "custom_partitioning"
        attention = cudnn_rule(name, static, operands, results)
        if attention is not None:
            work = dataclasses.replace(work, flops=cudnn_flops(attention, static, operands, results))
            bound = bind(attention, [a.shape for a in operands], [r.shape for r in results], f"of `{name}`")
            text, sizes = jax_notation(bound)
            notation = _private("jax._src.custom_partitioning_sharding_rule").str_to_sdy_sharding_rule(text, **sizes)

    def on_shards(mesh: Any, into: Sequence[Any], out: Sequence[Any]) -> Any:
        def pinned(shapes: Sequence[Any], specs: Sequence[Any]) -> list[Any]:
            return [
                jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, spec))
                for s, spec in zip(shapes, specs, strict=True)
            ]

        args = params["in_tree"].unflatten(pinned(operands, into))
        wanted = params["out_tree"].unflatten(pinned(results, out))
        _, fn, gives, takes = partition(*static, mesh, args, wanted)

        def flat(*leaves: Any) -> Any:
            return fn(*params["in_tree"].unflatten(leaves))

        return flat, _specs(takes, operands), _specs(gives, results)

    digest = _digest(call.jaxpr, static)
    found[f"{name}#{digest}"] = OpaqueCall(name, operands, on_shards)
    rule = _mlir_rule(notation, static, operands, results)
    return mlir.emit_call(values, [(r.shape, r.dtype) for r in results], name, digest, rule, work)


def _specs(shardings: Any, values: Sequence[Any]) -> list[Any]:
    """Return the specs of shardings, without the entries past the rank that JAX's own rules may give."""
    import jax
    from jax.sharding import PartitionSpec

    leaves = jax.tree.leaves(shardings)
    return [PartitionSpec(*tuple(leaf.spec)[: len(value.shape)]) for leaf, value in zip(leaves, values, strict=True)]


def _emit_exchanging(
    found: OpaqueCalls,
    values: Sequence[Any],
    call: RingCall | RaggedCall,
    work: mlir.CallWork,
    shapes: tuple[tuple[Any, ...], Sequence[Any]],
) -> list[Any]:
    """Emit a call that itself exchanges data between the devices of an axis, and return its results.

    - `found`: calls by key, to which this one is added.
    - `values`: operands in the module.
    - `work`: cost of one execution.
    - `shapes`: shapes of its operands and of its results.
    """
    operands, results = shapes
    digest = _digest(call, operands)
    found[f"{call.name}#{digest}"] = OpaqueCall(call.name, operands, call.on_shards)
    result_types = [(r.shape, r.dtype) for r in results]
    return mlir.emit_call(values, result_types, call.name, digest, mlir.rule_attribute(*call.rule), work)


def _mlir_rule(rule: Any, static: Sequence[Any], operands: Sequence[Any], results: Sequence[Any]) -> Any:
    """Return a sharding rule in any of JAX's forms (a function, a text or a rule) as an MLIR attribute."""
    notation = _private("jax._src.custom_partitioning_sharding_rule")
    operand_types, result_types = (
        mlir.tensor_types([(a.shape, a.dtype) for a in side]) for side in (operands, results)
    )
    options: dict[str, Any] = {}
    if callable(rule):
        rule = rule(*static, None, operand_types, result_types)
        if isinstance(rule, (list, tuple)) and len(rule) == 2:
            rule, options = rule
    if isinstance(rule, str):
        rule = notation.str_to_sdy_sharding_rule(rule, **options)
    return notation.sdy_sharding_rule_to_mlir(rule, operand_types, result_types)


def _emit_kernel(found: OpaqueCalls, ctx: Any, values: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """Emit the call of a Pallas kernel, add the call to `found`, and return its results."""
    operands, results = _shapes(ctx.avals_in), _shapes(ctx.avals_out)
    kernel = PallasCall.of(operands, results, params)
    digest = _digest(params["jaxpr"], params["grid_mapping"], params["compiler_params"], operands, results)
    found[f"{kernel.name}#{digest}"] = OpaqueCall(kernel.name, operands, kernel.on_shards)
    rule = mlir.rule_attribute(*kernel.rule)
    shapes = [(r.shape, r.dtype) for r in results]
    work = mlir.CallWork(kernel.flops, kernel.traffic, kernel.dtype, kernel.triangular, kernel.steps)
    return mlir.emit_call(values, shapes, kernel.name, digest, rule, work)
