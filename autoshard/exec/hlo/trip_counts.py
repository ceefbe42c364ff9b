"""Trip counts of the loops of a compiled module, derived from condition, body and start values."""

import re

from autoshard.exec.hlo.hlo_text import Computation, HloModule, Instruction


def trip_count(module: HloModule, loop: Instruction) -> int | None:
    """Return the trip count of a while loop of a module, or None if the text does not determine it.

    The compiler's own `known_trip_count` has priority, then a counting loop (`_counted`).
    """
    known = re.search(r'"known_trip_count":\{"n":"?(\d+)"?', loop.attributes)
    if known:
        return int(known[1])
    owner = next((c for c in module.computations.values() if c.by_name.get(loop.name) is loop), None)
    return _counted(module, owner, loop) if owner else None


def _counted(module: HloModule, owner: Computation, loop: Instruction) -> int | None:
    """Return the trip count of a counting loop of computation `owner`, or None for any other loop.

    Such a loop compares `carried[k]` with a limit in its condition, and adds a constant to it in its body. The start
    value is constant. The limit is a constant, or a carried element with a constant start value that the body passes
    on. The constant must move `carried[k]` towards the limit, and the comparison must be an order or `NE`. The count is
    the distance over the step's size, rounded up; 0 if the condition fails at the start.
    """
    condition = module.computations.get((loop.attribute("condition") or "").lstrip("%"))
    body = module.computations.get((loop.attribute("body") or "").lstrip("%"))
    if condition is None or body is None or not loop.operands:
        return None
    carried = _tuple_elements(owner, loop.operands[0])
    compared = _comparison(module, condition)
    if compared is None or carried is None:
        return None
    direction, left, right = compared
    if right[0] == "carried" and left[0] == "constant":
        left, right = right, left
        direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    if left[0] != "carried":
        return None
    index = left[1]
    start = _constant_of(module, owner, carried[index]) if index < len(carried) else None
    updated = _tuple_elements(body, body.root.name)
    if updated is None or len(updated) != len(carried) or start is None:
        return None
    limit: int | None = right[1]
    if right[0] == "carried":
        passed_on = _affine(module, body, updated[right[1]], {}) == (right[1], 0)
        limit = _constant_of(module, owner, carried[right[1]]) if passed_on else None
    change = _affine(module, body, updated[index], {})
    if limit is None or change is None or change[0] != index:
        return None
    return _trips(direction, start, limit, change[1])


def _trips(direction: str, start: int, limit: int, step: int) -> int | None:
    """Return the trips of a counter from `start` by `step`; None for an endless loop and for another comparison."""
    towards = limit - start if step > 0 else start - limit
    inclusive = direction in ("LE", "GE")
    if direction == "NE":
        return towards // abs(step) if step and towards >= 0 and towards % abs(step) == 0 else None
    if direction not in ("LT", "LE", "GT", "GE"):
        return None
    span = (limit - start if direction in ("LT", "LE") else start - limit) + inclusive
    if span <= 0:
        return 0
    # A step away from the limit never ends the loop.
    return -(-span // abs(step)) if step and (step > 0) == (direction in ("LT", "LE")) else None


def _tuple_elements(computation: Computation, name: str) -> tuple[str, ...] | None:
    """Return the names of a tuple's elements, seen through copies and barriers; None if the value is no tuple."""
    instruction = computation.by_name.get(name)
    while instruction is not None and instruction.opcode in ("copy", "optimization-barrier", "bitcast"):
        instruction = computation.by_name.get(instruction.operands[0])
    return instruction.operands if instruction is not None and instruction.opcode == "tuple" else None


def _constant_of(module: HloModule, computation: Computation, name: str) -> int | None:
    """Return the value of a constant integer scalar, seen through copies and fusions; None for any other value."""
    value = _affine(module, computation, name, {})
    return value[1] if value is not None and value[0] is None else None


_Affine = tuple[int | None, int]
"""A carried element plus an offset, `carried[k] + offset`, as (k, offset); a constant has None for k."""


def _affine(module: HloModule, computation: Computation, name: str, bound: dict[int, _Affine | None]) -> _Affine | None:
    """Return an integer scalar as carried element plus offset, seen through copies and fusions; None if it is neither.

    Sums and differences of such a value and constants are followed too. An element of any tuple parameter counts as
    carried. `bound` has the values of the computation's parameters by number.
    """
    instruction = computation.by_name.get(name)
    if instruction is None:
        return None
    if instruction.opcode == "constant":
        return (None, int(instruction.literal)) if re.fullmatch(r"-?\d+", instruction.literal) else None
    if instruction.opcode == "parameter":
        return bound.get(int(instruction.literal))
    if instruction.opcode in ("copy", "bitcast", "convert", "reshape", "copy-done", "copy-start"):
        return _affine(module, computation, instruction.operands[0], bound)
    if instruction.opcode == "get-tuple-element":
        source = computation.by_name.get(instruction.operands[0])
        index = int(instruction.attribute("index") or 0)
        if source is not None and source.opcode == "parameter":
            return (index, 0)
        if source is not None and source.opcode == "fusion":
            return _through_fusion(module, computation, source, index, bound)
        return None
    if instruction.opcode == "fusion":
        return _through_fusion(module, computation, instruction, None, bound)
    if instruction.opcode in ("add", "subtract"):
        left = _affine(module, computation, instruction.operands[0], bound)
        right = _affine(module, computation, instruction.operands[1], bound)
        if left is None or right is None or (left[0] is not None and right[0] is not None):
            return None
        sign = 1 if instruction.opcode == "add" else -1
        if right[0] is not None and sign < 0:
            return None
        return (left[0] if left[0] is not None else right[0], left[1] + sign * right[1])
    return None


def _through_fusion(
    module: HloModule, outside: Computation, fusion: Instruction, index: int | None, bound: dict[int, _Affine | None]
) -> _Affine | None:
    """Return a fusion's result as carried element plus offset; None if it is neither.

    - `outside`: computation of the fusion.
    - `index`: element of a tuple result; None for a result that is no tuple.
    - `bound`: values of the parameters of `outside` by number.
    """
    inside = module.computations.get((fusion.attribute("calls") or "").lstrip("%"))
    if inside is None:
        return None
    operands = {k: _affine(module, outside, operand, bound) for k, operand in enumerate(fusion.operands)}
    target = inside.root
    if index is not None:
        if target.opcode != "tuple" or index >= len(target.operands):
            return None
        return _affine(module, inside, target.operands[index], operands)
    return _affine(module, inside, target.name, operands)


def _comparison(module: HloModule, condition: Computation) -> tuple[str, tuple[str, int], tuple[str, int]] | None:
    """Return direction and both sides of a condition's comparison, each ("carried", k) or ("constant", value).

    Returns None if the condition is no comparison, or if a side is neither of these. The direction is `LT`, `LE`, `GT`,
    `GE`, `EQ` or `NE`.
    """
    root, computation, bound = condition.root, condition, dict[int, _Affine | None]()
    while root.opcode in ("fusion", "copy", "bitcast", "call"):
        if root.opcode in ("copy", "bitcast"):
            root = computation.by_name[root.operands[0]]
            continue
        inside = module.computations.get((root.attribute("calls") or root.attribute("to_apply") or "").lstrip("%"))
        if inside is None:
            return None
        bound = {k: _affine(module, computation, operand, bound) for k, operand in enumerate(root.operands)}
        computation, root = inside, inside.root
    if root.opcode != "compare":
        return None
    sides = []
    for operand in root.operands:
        value = _affine(module, computation, operand, bound)
        if value is None or (value[0] is not None and value[1] != 0):
            return None
        sides.append(("constant", value[1]) if value[0] is None else ("carried", value[0]))
    return root.attribute("direction") or "LT", sides[0], sides[1]
