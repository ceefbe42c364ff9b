"""Class of each op for the planner (`OpClass`): pointwise, view, layer of a stack, or heavy."""

from autoshard.graph.records import FactorKind, OpClass, Rule, Tensor


_RESHAPES = frozenset({"reshape", "broadcast_in_dim"})
_REDUCERS = frozenset({"reduce"})


def classify(kind: str, rule: Rule | None, operands: list[Tensor], results: list[Tensor]) -> OpClass:
    """Return the class of an op that has computed inputs, by the first of these tests that applies.

    1. Heavy: no rule or no results. 2. View: reshapes, broadcasts, and reductions without a factor that needs
    replication. 3. Layer: reads or writes one slice along the leading dim. 4. Heavy: a factor above size 1 that is not
    parallel. 5. Pointwise: all tensors of more than one element have the same dims. 6. Heavy: all others.
    """
    if rule is None or not results:
        return OpClass.HEAVY
    if kind in _RESHAPES or (kind in _REDUCERS and FactorKind.NEED_REPLICATION not in rule.kinds):
        return OpClass.VIEW
    if kind in ("dynamic_slice", "dynamic_update_slice") and _one_slice(operands, results, kind):
        return OpClass.LAYER
    special = [s for s, k in zip(rule.sizes, rule.kinds, strict=True) if k is not FactorKind.PARALLEL and s > 1]
    if special:
        return OpClass.HEAVY
    return OpClass.POINTWISE if _dims_agree(rule, operands, results) else OpClass.HEAVY


def _one_slice(operands: list[Tensor], results: list[Tensor], kind: str) -> bool:
    """Return True if the op reads or writes exactly one slice along a leading dim above size 1 (one layer of a
    stack).
    """
    whole, part = (operands[0], results[0]) if kind == "dynamic_slice" else (operands[0], operands[1])
    return bool(whole.shape) and part.shape[0] == 1 and whole.shape[1:] == part.shape[1:] and whole.shape[0] > 1


def _dims_agree(rule: Rule, operands: list[Tensor], results: list[Tensor]) -> bool:
    """Return True if all operands and results of more than one element have the same factors, one for each dim above
    size 1.

    Their order may differ.
    """
    wanted = None
    for tensor, dims in zip((*operands, *results), (*rule.operands, *rule.results), strict=True):
        if tensor.elements == 1:
            continue
        factors = [dim for dim, size in zip(dims, tensor.shape, strict=True) if size > 1]
        if any(len(dim) != 1 for dim in factors):
            return False
        present = sorted(dim[0] for dim in factors)
        if wanted is not None and present != wanted:
            return False
        wanted = present
    return True
