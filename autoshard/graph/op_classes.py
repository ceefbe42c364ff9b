"""Class of each op for the planner (`OpClass`): pointwise, view, layer of a stack, or heavy."""

from autoshard.graph.records import FactorKind, OpClass, Rule, Tensor


_RESHAPES = frozenset({"reshape", "broadcast_in_dim"})
_REDUCERS = frozenset({"reduce"})


def classify(kind: str, rule: Rule | None, operands: list[Tensor], results: list[Tensor]) -> OpClass:
    """Return the class of an op that has computed inputs; an op without a rule or without results is heavy."""
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
    """Return True if the op reads or writes exactly one slice along the leading dim (one layer of a stack)."""
    whole, part = (operands[0], results[0]) if kind == "dynamic_slice" else (operands[0], operands[1])
    return bool(whole.shape) and part.shape[0] == 1 and whole.shape[1:] == part.shape[1:] and whole.shape[0] > 1


def _dims_agree(rule: Rule, operands: list[Tensor], results: list[Tensor]) -> bool:
    """Return True if every non-scalar operand and result has the same factors, one for each dim, in any order."""
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
