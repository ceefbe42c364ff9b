"""Shardy's sharding rules, as an attribute of every op."""

from collections.abc import Sequence
from typing import Any


_CHLO_SELECTIONS = frozenset({"chlo.top_k"})
"""CHLO ops whose results are a few elements of the last dim, in order."""


def populate_rules(module: Any) -> Any:
    """Write `sdy.sharding_rule` on every op that has one (in place), and return `module`.

    Shardy does not know CHLO ops, so they get a rule here. Ops whose operands and results have one shape get an
    elementwise rule; others get none. The last dim of `chlo.top_k` is a reduction, and that of its results stays whole.
    """
    from jaxlib.mlir import ir, passmanager

    with module.context:
        passmanager.PassManager.parse("builtin.module(func.func(sdy-populate-op-sharding-rules))").run(module.operation)
        for function in module.body.operations:
            if function.operation.name != "func.func":
                continue

            def visit(op: Any) -> Any:
                if op.name.startswith("chlo.") and "sdy.sharding_rule" not in op.attributes:
                    rule = _chlo_rule(op)
                    if rule is not None:
                        op.attributes["sdy.sharding_rule"] = rule
                return ir.WalkResult.ADVANCE

            function.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return module


Mappings = tuple[tuple[tuple[int, ...], ...], ...]
"""Factors of each dim of each tensor."""


def read_rule(op: Any) -> tuple[tuple[int, ...], tuple[str, ...], Mappings, Mappings] | None:
    """Return sizes and kinds of the factors of an op's sharding rule, and the factors of its operands and results.

    They are those of `rule_attribute`: kinds are `parallel`, `reduction`, `need_replication` or `permutation`. The
    result is None for an op without a rule.
    """
    from jaxlib.mlir.dialects import sdy

    if "sdy.sharding_rule" not in op.attributes:
        return None
    rule = sdy.OpShardingRuleAttr(op.attributes["sdy.sharding_rule"])
    kinds = ["parallel"] * len(rule.factor_sizes)
    for kind in ("reduction", "need_replication", "permutation"):
        for factor in getattr(rule, f"{kind}_factors"):
            kinds[factor] = kind
    return tuple(rule.factor_sizes), tuple(kinds), _mappings(rule.operand_mappings), _mappings(rule.result_mappings)


def _mappings(tensors: Any) -> Mappings:
    """Return the factors of each dim of each tensor."""
    from jaxlib.mlir.dialects import sdy

    return tuple(
        tuple(tuple(sdy.DimMappingAttr(dim).factor_indices) for dim in sdy.TensorMappingAttr(tensor).dim_mappings)
        for tensor in tensors
    )


def _chlo_rule(op: Any) -> Any | None:
    """Return the elementwise rule of a CHLO op; None if its operands and results differ in shape.

    The last dim of `_CHLO_SELECTIONS` is reduced, and their results have one of their own.
    """
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import sdy

    shapes = [list(ir.RankedTensorType(value.type).shape) for value in (*op.operands, *op.results)]
    first, last = shapes[0], len(shapes[0]) - 1

    def mapping(factors: Sequence[int]) -> Any:
        """Return the mapping of a tensor whose dims have one factor each."""
        return sdy.TensorMappingAttr.get([sdy.DimMappingAttr.get([factor]) for factor in factors])

    dims = list(range(len(first)))
    if op.name in _CHLO_SELECTIONS:
        selected = mapping([*dims[:-1], last + 1])
        return sdy.OpShardingRuleAttr.get(
            [*first, shapes[-1][-1]],
            [mapping(dims)] * len(op.operands),
            [selected] * len(op.results),
            reduction_factors=[last],
            need_replication_factors=[last + 1],
        )
    if any(shape != first for shape in shapes):
        return None
    return sdy.OpShardingRuleAttr.get(first, [mapping(dims)] * len(op.operands), [mapping(dims)] * len(op.results))
