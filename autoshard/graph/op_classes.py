"""Which part an op plays in planning: pointwise, a view, a layer of a stack, or one with strategies of its own."""

from autoshard.graph.records import FactorKind, OpClass, Rule, Tensor


_RESHAPES = frozenset({"reshape", "broadcast_in_dim"})
_REDUCERS = frozenset({"reduce"})


def classify(kind: str, rule: Rule | None, operands: list[Tensor], results: list[Tensor]) -> OpClass:
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
    """True if exactly the leading dim is cut to one slice (a layer of a stack)."""
    whole, part = (operands[0], results[0]) if kind == "dynamic_slice" else (operands[0], operands[1])
    return bool(whole.shape) and part.shape[0] == 1 and whole.shape[1:] == part.shape[1:] and whole.shape[0] > 1


def _dims_agree(rule: Rule, operands: list[Tensor], results: list[Tensor]) -> bool:
    """True if every non-scalar operand and result has the same factors, one per dim, in any order."""
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
