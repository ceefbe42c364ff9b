"""Reductions of a batch in a loss: the way from losses of parts to that of the whole (mean, sum, quotient of sums).

They are read from two traces of the loss, one of the whole batch and one of a part. A dim or a constant that differs
between them grows with the batch.
"""

import dataclasses
import enum
import math
from collections.abc import Callable, Sequence
from typing import Any

from autoshard.program.batch_dims import ExampleDim, example_position, sums_over_examples


class Reduction(enum.Enum):
    """The relation between values of the parts of a batch and that of the whole."""

    CONST = "const"
    """A value that is equal for all parts and the whole."""
    MEAN = "mean"
    """The mean of the parts' values."""
    SUM = "sum"
    """The sum of the parts' values."""
    QUOTIENT = "quotient"
    """A sum divided by a sum that depends on no parameter."""
    COUNT = "count"
    """A constant that grows with the batch."""
    SHARE = "share"
    """A constant that shrinks as the batch grows."""
    EACH = "each"
    """A value with a dim of examples."""
    OTHER = "other"
    """A value that is not known to follow from those of the parts."""


_LINEAR = {"convert_element_type", "neg", "reshape", "broadcast_in_dim", "squeeze", "transpose", "copy", "copy_p"}
"""Primitives whose result, for one operand, has the operand's relation to the batch."""
_SCALED = {
    (Reduction.SUM, Reduction.SHARE): Reduction.MEAN,
    (Reduction.COUNT, Reduction.SHARE): Reduction.CONST,
    (Reduction.MEAN, Reduction.COUNT): Reduction.SUM,
}
"""Kinds of factors, in either order -> kind of the product."""
_DIVIDED = {
    (Reduction.SUM, Reduction.COUNT): Reduction.MEAN,
    (Reduction.COUNT, Reduction.COUNT): Reduction.CONST,
    (Reduction.CONST, Reduction.COUNT): Reduction.SHARE,
}
"""Kinds of dividend and divisor -> kind of the quotient."""
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Names of the parameter in which an equation has the body that it calls."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Value:
    """The relation of one value of the trace to the batch."""

    kind: Reduction
    """The relation of the value to those of the parts."""
    trained: bool = False
    """True if the value depends on parameters."""
    why: str = ""
    """The operation that causes the kind `OTHER`."""
    place: ExampleDim | None = None
    """The position of examples in a value of kind `EACH`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reduced:
    """The reduction of the batch in a loss, as steps that compute it in parts need it."""

    kind: Reduction = Reduction.MEAN
    """`MEAN`, `SUM`, `QUOTIENT` or `OTHER`."""
    why: str = ""
    """The reason for `OTHER`, in words."""
    division: int = -1
    """The number of the dividing operation in the loss's trace, for a quotient; -1 otherwise."""

    @classmethod
    def unread(cls) -> "Reduced":
        """Return the reduction of a loss that is computed in 64 bits, which is not analysed: `OTHER`."""
        return cls(Reduction.OTHER, "numbers of 64 bits, in which no reduction is looked for")


def reduction_of(loss: Callable[..., Any], args: Sequence[Any], batch: int, parts: int) -> Reduced:
    """Return the reduction of `args[batch]`, cut into `parts` equal parts, in `loss(*args)`, a scalar.

    `args[0]` are the parameters. A loss that does not depend on the batch, or that cannot be traced, counts as `MEAN`.
    A quotient is `OTHER` if its division is inside a called function.
    """
    import jax

    part = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] // parts, *x.shape[1:]), x.dtype), args[batch])
    try:
        whole_trace = jax.make_jaxpr(loss)(*args)
        part_trace = jax.make_jaxpr(loss)(*args[:batch], part, *args[batch + 1 :])
    except Exception:  # the trace of the step raises it again as an error of the user's code
        return Reduced()
    trained = len(jax.tree.leaves(args[0]))
    before = sum(len(jax.tree.leaves(each)) for each in args[:batch])
    examples = range(before, before + len(jax.tree.leaves(part)))
    given = [
        _Value(Reduction.EACH, place=ExampleDim(0)) if number in examples else _Value(Reduction.CONST, number < trained)
        for number in range(len(whole_trace.jaxpr.invars))
    ]
    known: dict[Any, _Value] = {}
    (value,) = _TwoTraces(parts).read(whole_trace, part_trace, given, known)
    if value.kind in (Reduction.MEAN, Reduction.CONST):
        return Reduced()
    if value.kind is Reduction.SUM:
        return Reduced(Reduction.SUM)
    division = _division(whole_trace.jaxpr, known) if value.kind is Reduction.QUOTIENT else -1
    if division >= 0:
        return Reduced(Reduction.QUOTIENT, division=division)
    return Reduced(Reduction.OTHER, value.why or (_DIVISOR if value.kind is Reduction.QUOTIENT else "no sum over them"))


def _division(jaxpr: Any, known: dict[Any, _Value]) -> int:
    """Return the number of the equation that divides, found backwards from the first result through quotients.

    Return -1 if the division is inside a called function, or if its result is not a scalar.
    """
    maker = {var: number for number, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    number = maker[jaxpr.outvars[0]]
    while True:
        eqn = jaxpr.eqns[number]
        before = [v for v in eqn.invars if not hasattr(v, "val") and v in known and known[v].kind is Reduction.QUOTIENT]
        if not before:
            return number if eqn.primitive.name == "div" and not eqn.outvars[0].aval.shape else -1
        if before[0] not in maker:
            return -1
        number = maker[before[0]]


_CONSTANT = "a constant that depends on the number of examples"
_DIVISOR = "a divisor that is computed from the batch"


class _TwoTraces:
    """An analysis of two traces of one function, equation by equation."""

    def __init__(self, parts: int) -> None:
        """Store the number of parts, the ratio of the whole batch to the part."""
        self.parts = parts

    def read(self, whole: Any, less: Any, given: Sequence[_Value], known: dict[Any, _Value]) -> list[_Value]:
        """Return the values of the results of two closed jaxprs, and add every value to `known`.

        - `whole`, `less`: the traces of the whole batch and of a part.
        - `given`: values of the operands.
        - `known`: values by variable of `whole`.

        If the equations differ in number or primitive, all results are `OTHER`.
        """
        first, second = whole.jaxpr, less.jaxpr
        known.update(zip(first.invars, given, strict=True))
        for mine, theirs in zip(first.constvars, second.constvars, strict=False):
            grows = mine.aval.shape != theirs.aval.shape
            known[mine] = _Value(Reduction.OTHER, False, _CONSTANT) if grows else _Value(Reduction.CONST)
        steps = list(zip(first.eqns, second.eqns, strict=False))
        if len(first.eqns) != len(second.eqns) or any(a.primitive is not b.primitive for a, b in steps):
            why = "operations that depend on the number of examples"
            return [_Value(Reduction.OTHER, True, why) for _ in first.outvars]
        for mine, theirs in steps:
            operands = [self._operand(a, b, known) for a, b in zip(mine.invars, theirs.invars, strict=True)]
            known.update(zip(mine.outvars, self._results(mine, theirs, operands), strict=True))
        return [self._operand(a, b, known) for a, b in zip(first.outvars, second.outvars, strict=True)]

    def _operand(self, mine: Any, theirs: Any, known: dict[Any, _Value]) -> _Value:
        """Return the value of an operand, by `known` if it is a variable; `CONST` if it is not there.

        A scalar literal that is `parts` times as large in `mine` is `COUNT`, one `parts` times as small `SHARE`. Equal
        ones are `CONST`, others `OTHER`.
        """
        if not hasattr(mine, "val"):
            return known.get(mine, _Value(Reduction.CONST))
        if mine.aval.shape or not hasattr(theirs, "val"):
            return _Value(Reduction.CONST)
        if mine.val == theirs.val or mine.val != mine.val:  # NaN differs from itself
            return _Value(Reduction.CONST)
        if isinstance(mine.val, complex):
            return _Value(Reduction.OTHER, False, _CONSTANT)
        value, other = float(mine.val), float(theirs.val)
        if math.isclose(value, other * self.parts, rel_tol=1e-2):  # constants may be in bf16
            return _Value(Reduction.COUNT)
        if math.isclose(value * self.parts, other, rel_tol=1e-2):
            return _Value(Reduction.SHARE)
        return _Value(Reduction.OTHER, False, _CONSTANT)

    def _results(self, mine: Any, theirs: Any, operands: list[_Value]) -> list[_Value]:
        """Return the values of the results of one equation; those of a call (no loop) by analysing its body."""
        inner = [(mine.params[key], theirs.params[key]) for key in _CALLS if key in mine.params]
        if len(inner) == 1 and mine.primitive.name not in ("scan", "while"):
            calls = [_closed(each) for each in inner[0]]
            if len(calls[0].jaxpr.invars) == len(operands) and len(calls[0].jaxpr.outvars) == len(mine.outvars):
                return self.read(calls[0], calls[1], operands, {})
        trained = any(value.trained for value in operands)
        values = []
        for number, (a, b) in enumerate(zip(mine.outvars, theirs.outvars, strict=True)):
            if a.aval.shape == b.aval.shape:
                kind, why = self._reduced(mine, operands, a.aval)
                values.append(_Value(kind, trained, why))
            else:
                values.append(self._each(mine, operands, number, b.aval, trained))
        return values

    def _each(self, eqn: Any, operands: Sequence[_Value], number: int, smaller: Any, trained: bool) -> _Value:
        """Return the value of a result that grows with the batch.

        - `operands`: values of the operands of `eqn`.
        - `number`: number of the result.
        - `smaller`: abstract value of the result for a part of the batch.
        - `trained`: True if the result depends on parameters.

        It is `EACH` if exactly one dim grows, by the number of parts, and each example is computed from itself alone.
        Otherwise it is `OTHER`.
        """
        import jax.numpy as jnp

        result = eqn.outvars[number].aval
        # Row counts in integers only wrap negative indices.
        exact = {Reduction.COUNT} if not jnp.issubdtype(result.dtype, jnp.inexact) else set()
        apart = {value.kind for value in operands} <= {Reduction.CONST, Reduction.EACH} | exact
        grown = [dim for dim, (m, n) in enumerate(zip(result.shape, smaller.shape, strict=True)) if m != n]
        place = None
        if apart and len(grown) == 1 and result.size == smaller.size * self.parts:
            place = example_position(eqn, [value.place for value in operands], grown[0], number)
        if place is not None:
            return _Value(Reduction.EACH, trained, place=place)
        known = next((value.why for value in operands if value.kind is Reduction.OTHER), "")
        return _Value(Reduction.OTHER, trained, known or f"`{eqn.primitive.name}`, which mixes examples")

    def _reduced(self, eqn: Any, operands: Sequence[_Value], result: Any) -> tuple[Reduction, str]:
        """Return the kind of a result without a dim of examples, and the reason for `OTHER` (else an empty string).

        `result` is its abstract value. Sums over examples are `SUM`. The tables `_SCALED` and `_DIVIDED` give products
        and quotients. An operand of kind `OTHER` makes the result `OTHER`.
        """
        import jax.numpy as jnp

        name = eqn.primitive.name
        kinds = [value.kind for value in operands]
        known = next((value.why for value in operands if value.kind is Reduction.OTHER), "")
        exact = jnp.issubdtype(result.dtype, jnp.inexact)
        truncates = not exact and jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.inexact) if eqn.invars else False
        if known:
            return Reduction.OTHER, _DIVISOR if name == "div" and not operands[0].why else known
        if all(kind is Reduction.CONST for kind in kinds):
            return Reduction.CONST, ""
        outcome: Reduction | None = None
        first, second = (*kinds, None, None)[:2]
        if name == "reduce_sum" and first is Reduction.EACH:
            outcome = Reduction.SUM if sums_over_examples(operands[0].place) else None
        elif name == "dot_general" and first is second is Reduction.EACH:
            outcome = Reduction.SUM if sums_over_examples(operands[0].place, operands[1].place) else None
        elif Reduction.EACH in kinds:
            outcome = None
        elif name == "reduce_sum" or (name in _LINEAR and not truncates):
            outcome = first
        elif name == "mul" and second is not None:
            assert first is not None
            outcome = first if second is Reduction.CONST else second if first is Reduction.CONST else None
            outcome = outcome or _SCALED.get((first, second)) or _SCALED.get((second, first))
        elif name == "div" and first is not None and second is not None:
            outcome = first if second is Reduction.CONST else _DIVIDED.get((first, second))
            if first is second is Reduction.SUM and not operands[1].trained:
                outcome = Reduction.QUOTIENT
            if outcome is None:
                return Reduction.OTHER, _DIVISOR
        elif name in ("add", "sub", "add_any"):
            outcome = first if first is second and first is not Reduction.QUOTIENT else None
            if {first, second} == {Reduction.MEAN, Reduction.CONST}:
                outcome = Reduction.MEAN
        return (Reduction.OTHER, f"`{name}` of what is reduced over examples") if outcome is None else (outcome, "")


def _closed(jaxpr: Any) -> Any:
    """Return a jaxpr as a closed one, without constants if it was open."""
    from jax.extend.core import ClosedJaxpr

    return jaxpr if hasattr(jaxpr, "jaxpr") else ClosedJaxpr(jaxpr, ())


def dividend_and_divisor(loss: Callable[..., Any], division: int) -> Callable[..., tuple[Any, Any]]:
    """Return a function of the arguments of `loss` that computes the dividend and the divisor of a quotient.

    `division` is the number of the dividing operation in the trace of `loss`. Operations after it apply to the
    dividend. The divisor is cast to f32 at least.
    """
    import jax
    from jax.extend.core import jaxpr_as_fun

    def run(*args: Any) -> tuple[Any, Any]:
        closed = jax.make_jaxpr(loss)(*args)
        eqns = list(closed.jaxpr.eqns)
        eqn = eqns[division]
        assert eqn.primitive.name == "div"
        dividend, over = eqn.invars
        # After a division by one, the later operations apply to the dividend instead of the quotient.
        eqns[division] = eqn.replace(invars=[dividend, _one(over)])
        outs = [*closed.jaxpr.outvars, over]
        names = closed.jaxpr.debug_info._replace(result_paths=None)
        both = closed.replace(jaxpr=closed.jaxpr.replace(eqns=eqns, outvars=outs, debug_info=names))
        total, count = jaxpr_as_fun(both)(*jax.tree.leaves(args))
        return total, count.astype(jax.numpy.promote_types(count.dtype, "float32"))

    return run


def _one(like: Any) -> Any:
    """Return a literal one with the type of `like`."""
    import numpy as np
    from jax.extend.core import Literal

    return Literal(np.ones((), like.aval.dtype), like.aval)
