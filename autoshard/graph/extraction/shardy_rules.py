"""Shardy's sharding rules as records, and their corrections where XLA differs."""

import dataclasses
from typing import Any

from autoshard import mlir
from autoshard.graph.records import FactorKind, Rule


def sharding_rule(op: Any, known: dict[Any, Rule] | None = None) -> Rule | None:
    """Return the sharding rule of an MLIR op by Shardy; None if it has none.

    - `known`: rules by attribute, extended in place; repeated layers have equal attributes. Default: none.
    """
    attribute = op.attributes["sdy.sharding_rule"] if "sdy.sharding_rule" in op.attributes else None
    if known is not None and attribute in known:
        return known[attribute]
    read = mlir.read_rule(op)
    if read is None:
        return None
    sizes, kinds, operands, results = read
    rule = Rule(sizes, tuple(map(FactorKind, kinds)), operands, results)
    if known is not None:
        known[attribute] = rule
    return rule


def updating_rule(rule: Rule) -> Rule:
    """Return the rule of a `dynamic_update_slice` in which permutation factors of the result become parallel.

    Other permutation factors need replication. Thus only the updated tensor may be split along sliced dims. Shardy in
    jax 0.10 has this rule. In jax 0.11 Shardy marks the dims of both operands as `permutation`, but XLA splits them as
    before.
    """
    result_factors = {factor for dims in rule.results for dim in dims for factor in dim}
    kinds = (
        kind
        if kind is not FactorKind.PERMUTATION
        else FactorKind.PARALLEL
        if f in result_factors
        else FactorKind.NEED_REPLICATION
        for f, kind in enumerate(rule.kinds)
    )
    return dataclasses.replace(rule, kinds=tuple(kinds))


def gathering_rule(rule: Rule) -> Rule:
    """Return the rule of a reduction that no collective combines: dims that it reduces (reduction factors) stay
    whole.
    """
    kinds = (FactorKind.NEED_REPLICATION if kind is FactorKind.REDUCTION else kind for kind in rule.kinds)
    return dataclasses.replace(rule, kinds=tuple(kinds))
