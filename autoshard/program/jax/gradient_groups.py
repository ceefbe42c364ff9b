"""Reductions of a batch in a loss: the way from losses of parts to that of the whole (mean, sum, quotient of sums).

They are read from two traces of the loss, one of the whole batch and one of a part. A dim or a constant that differs
between them grows with the batch.
"""

import dataclasses
import enum
import math
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from autoshard.program.batch_dims import ExampleDim, common_position, example_position, sums_over_examples
from autoshard.program.lowering import is_users_file


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
    COMBINED = "combined"
    """A sum of means, sums and quotients of different kinds, or one of them over a number without parameters."""
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
_WEIGHTED = {Reduction.MEAN, Reduction.SUM, Reduction.QUOTIENT, Reduction.COMBINED, Reduction.CONST}
"""Kinds of terms of a sum that depends on single examples alone."""
_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Names of the parameter in which an equation has the body that it calls."""
_NO_CALLS = ("while", "reduce", "reduce_window")
"""Operations whose body combines two elements, or is not called once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Relation:
    """The relation of one value of the trace to the batch."""

    kind: Reduction
    """The relation of the value to those of the parts."""
    trained: bool = False
    """True if the value depends on parameters."""
    why: str = ""
    """The operation that causes the kind `OTHER` or `COMBINED`."""
    line: str = ""
    """The line of that operation."""
    order: int = sys.maxsize
    """The place of that operation among those that mix examples, in the order of the trace; constants come last."""
    place: ExampleDim | None = None
    """The position of examples in a value of kind `EACH`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reduced:
    """The reduction of the batch in a loss, as steps that compute it in parts need it."""

    kind: Reduction = Reduction.MEAN
    """`MEAN`, `SUM`, `QUOTIENT`, `COMBINED` or `OTHER`."""
    why: str = ""
    """The reason for `COMBINED` and `OTHER`, in words, and for a `MEAN` that is not checked."""
    line: str = ""
    """The line of the user's code where examples meet, for `OTHER`; empty if it is not known."""
    division: int = -1
    """The number of the dividing operation in the loss's trace, for a quotient; -1 otherwise."""
    norms: bool = False
    """True if batch norms use statistics of the batch, apart from which the reduction is stated."""
    written: tuple[Any, ...] = ()
    """The further results, as numbers or by name, whose values follow from the examples."""
    closed: str = ""
    """Type of the module's output that torch's pytrees do not open; hooks of FSDP find no tensors in it."""

    @classmethod
    def unread(cls) -> "Reduced":
        """Return the reduction of a loss that is computed in 64 bits, which is not analysed: `OTHER`."""
        return cls(Reduction.OTHER, "numbers of 64 bits, in which no reduction is looked for")


def reduction_of(loss: Callable[..., Any], args: Sequence[Any], batch: int, parts: int) -> Reduced:
    """Return the reduction of `args[batch]`, cut into `parts` equal parts, in `loss(*args)`, a scalar.

    `args[0]` are the parameters. A loss that does not depend on the batch, or that cannot be traced, counts as `MEAN`.
    A quotient is `COMBINED` if its division is inside a called function.
    """
    import jax

    dims = jax.tree.map(lambda _: 0, args[batch])
    part = jax.tree.map(lambda x: _resized(x, 0, x.shape[0] // parts), args[batch])
    return _reduction(loss, args, (*args[:batch], part, *args[batch + 1 :]), batch, dims, parts)


def doubled_reduction(loss: Callable[..., Any], args: Sequence[Any], batch: int, dims: Any) -> Reduced:
    """Return the reduction of the examples in `loss(*args)`, read from `args` and from a batch of twice the size.

    - `loss`: function with a scalar, or with a value of every example, as its first result.
    - `dims`: the dim of examples of each array in `args[batch]`, in its structure; -1 for an array without examples.

    See `reduction_of` for the rest. A value of every example counts as its mean. A loss that cannot be traced for both
    sizes counts as one too, and `why` says so.
    """
    import jax

    whole = jax.tree.map(lambda x, dim: x if dim < 0 else _resized(x, dim, 2 * x.shape[dim]), args[batch], dims)
    unread = "its loss cannot be read for two sizes of the batch"
    return _reduction(loss, (*args[:batch], whole, *args[batch + 1 :]), args, batch, dims, 2, unread)


def relations(whole: Any, less: Any, batch: Sequence[int], parameters: Collection[int]) -> list[Relation]:
    """Return the relation of each result of a closed jaxpr to the results of another one, on a part of the batch.

    - `whole`, `less`: traces of one function on the whole batch and on a part.
    - `batch`: positions of the arguments with examples along their first dim.
    - `parameters`: positions of the trained arguments.
    """
    variables = whole.jaxpr.invars
    given = [
        Relation(Reduction.EACH, place=ExampleDim(0))
        if number in batch
        else Relation(Reduction.CONST, number in parameters)
        for number in range(len(variables))
    ]
    parts = variables[batch[0]].aval.shape[0] // less.jaxpr.invars[batch[0]].aval.shape[0] if batch else 1
    return _TwoTraces(parts).read(whole, less, given, {})


def _resized(x: Any, dim: int, size: int) -> Any:
    """Return the shape and dtype of an array with another size of one dim."""
    import jax

    return jax.ShapeDtypeStruct((*x.shape[:dim], size, *x.shape[dim + 1 :]), x.dtype)


def _reduction(
    loss: Callable[..., Any],
    args: Sequence[Any],
    fewer: Sequence[Any],
    batch: int,
    dims: Any,
    parts: int,
    unread: str = "",
) -> Reduced:
    """Return the reduction of a loss by its traces on `args` and on a part of the examples, `fewer`.

    - `batch`: number of the argument with the examples.
    - `dims`: dims of examples in it, -1 for none.
    - `parts`: number of such parts in the whole.
    - `unread`: the result's `why` if a trace fails.
    """
    import jax

    try:
        whole_trace, part_trace = jax.make_jaxpr(loss)(*args), jax.make_jaxpr(loss)(*fewer)
    except Exception:  # the trace of the step raises it again as an error of the user's code, or `unread` says so
        return Reduced(why=unread)
    trained = len(jax.tree.leaves(args[0]))
    before = sum(len(jax.tree.leaves(each)) for each in args[:batch])
    examples = dict(enumerate(jax.tree.leaves(dims), before))
    given = [
        Relation(Reduction.EACH, place=ExampleDim(examples[number]))
        if examples.get(number, -1) >= 0
        else Relation(Reduction.CONST, number < trained)
        for number in range(len(whole_trace.jaxpr.invars))
    ]
    known: dict[Any, Relation] = {}
    value, *others = _TwoTraces(parts).read(whole_trace, part_trace, given, known)
    written = tuple(number for number, each in enumerate(others) if each.kind is not Reduction.CONST)
    division = _division(whole_trace.jaxpr, known) if value.kind is Reduction.QUOTIENT else -1
    return dataclasses.replace(_reduced(value, division), written=written)


def _reduced(value: Relation, division: int) -> Reduced:
    """Return the reduction that a loss's relation to the batch means.

    - `division`: the number of the dividing operation of a quotient; -1 if it is inside a called function.
    """
    if value.kind in (Reduction.MEAN, Reduction.CONST, Reduction.EACH):
        return Reduced()
    if value.kind is Reduction.SUM:
        return Reduced(Reduction.SUM)
    if division >= 0:
        return Reduced(Reduction.QUOTIENT, division=division)
    if value.kind in (Reduction.QUOTIENT, Reduction.COMBINED):
        return Reduced(Reduction.COMBINED, value.why or _DIVISOR)
    return Reduced(Reduction.OTHER, value.why or "no sum over them", value.line)


def _division(jaxpr: Any, known: dict[Any, Relation]) -> int:
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


_PASSES = 4
"""Most passes over the body of a scan, until the relations of its carry change no more."""
_CONSTANT = "a constant that depends on the number of examples"
_DIVISOR = "a divisor that is computed from the batch"


class _TwoTraces:
    """An analysis of two traces of one function, equation by equation."""

    def __init__(self, parts: int) -> None:
        """Store the number of parts, the ratio of the whole batch to the part."""
        self.parts = parts
        self.mixing = 0
        """Number of operations so far that mix examples."""

    def read(self, whole: Any, less: Any, given: Sequence[Relation], known: dict[Any, Relation]) -> list[Relation]:
        """Return the values of the results of two closed jaxprs, and add every value to `known`.

        - `whole`, `less`: the traces of the whole batch and of a part.
        - `given`: values of the operands.
        - `known`: values by variable of `whole`.

        If the equations differ in number, primitive or operands, all results are `OTHER`.
        """
        first, second = whole.jaxpr, less.jaxpr
        known.update(zip(first.invars, given, strict=True))
        consts = zip(first.constvars, second.constvars, whole.consts, less.consts, strict=False)
        known.update((variable, self._constant(mine, theirs)) for variable, _, mine, theirs in consts)
        steps = list(zip(first.eqns, second.eqns, strict=False))
        differs = [a for a, b in steps if a.primitive is not b.primitive or len(a.invars) != len(b.invars)]
        differs += [*first.eqns[len(steps) :], *second.eqns[len(steps) :]]
        if differs:
            why = "operations that depend on the number of examples"
            return [Relation(Reduction.OTHER, True, why, line_of(differs[0])) for _ in first.outvars]
        for mine, theirs in steps:
            operands = [self._operand(a, b, known) for a, b in zip(mine.invars, theirs.invars, strict=True)]
            known.update(zip(mine.outvars, self._results(mine, theirs, operands), strict=True))
        return [self._operand(a, b, known) for a, b in zip(first.outvars, second.outvars, strict=True)]

    def _operand(self, mine: Any, theirs: Any, known: dict[Any, Relation]) -> Relation:
        """Return the value of an operand, by `known` if it is a variable; `CONST` if it is not there.

        A scalar literal that is `parts` times as large in `mine` is `COUNT`, one `parts` times as small `SHARE`. Equal
        ones are `CONST`, others `OTHER`.
        """
        if not hasattr(mine, "val"):
            return known.get(mine, Relation(Reduction.CONST))
        if mine.aval.shape or not hasattr(theirs, "val"):
            return Relation(Reduction.CONST)
        if mine.val == theirs.val or mine.val != mine.val:  # NaN differs from itself
            return Relation(Reduction.CONST)
        if isinstance(mine.val, complex):
            return Relation(Reduction.OTHER, False, _CONSTANT)
        value, other = float(mine.val), float(theirs.val)
        if math.isclose(value, other * self.parts, rel_tol=1e-2):  # constants may be in bf16
            return Relation(Reduction.COUNT)
        if math.isclose(value * self.parts, other, rel_tol=1e-2):
            return Relation(Reduction.SHARE)
        return Relation(Reduction.OTHER, False, _CONSTANT)

    def _constant(self, mine: Any, theirs: Any) -> Relation:
        """Return the value of an array constant of the two traces.

        It is `EACH` if one dim alone grows, by the number of parts, and all elements along it are equal.
        """
        import numpy as np

        shape, smaller = np.shape(mine), np.shape(theirs)
        if shape == smaller:
            return Relation(Reduction.CONST)
        grown = [dim for dim, (m, n) in enumerate(zip(shape, smaller, strict=False)) if m != n]
        if len(shape) == len(smaller) and len(grown) == 1 and shape[grown[0]] == self.parts * smaller[grown[0]]:
            first = np.asarray(theirs).take([0], grown[0])
            if all((np.asarray(each) == first).all() for each in (mine, theirs)):
                return Relation(Reduction.EACH, place=ExampleDim(grown[0], alike=True))
        return Relation(Reduction.OTHER, False, _CONSTANT)

    def _results(self, mine: Any, theirs: Any, operands: list[Relation]) -> list[Relation]:
        """Return the values of the results of one equation; those of a call (no loop) by analysing its body."""
        inner = [(mine.params[key], theirs.params[key]) for key in _CALLS if key in mine.params]
        if mine.primitive.name == "scan":
            return self._scanned(mine, theirs, operands)
        if len(inner) == 1 and mine.primitive.name not in _NO_CALLS:
            calls = [_closed(each) for each in inner[0]]
            if len(calls[0].jaxpr.invars) == len(operands) and len(calls[0].jaxpr.outvars) == len(mine.outvars):
                values = self.read(calls[0], calls[1], operands, {})
                # JAX keeps the trace of a function for later calls, which stand on other lines.
                line = line_of(mine) if mine.primitive.name in ("jit", "pjit") else ""
                first = any(value.kind is Reduction.OTHER for value in operands)
                return values if first or not line else [dataclasses.replace(each, line=line) for each in values]
        trained = any(value.trained for value in operands)
        values = []
        for number, (a, b) in enumerate(zip(mine.outvars, theirs.outvars, strict=True)):
            if a.aval.shape == b.aval.shape:
                kind, why = self._reduced(mine, operands, a.aval)
                if kind is Reduction.OTHER:
                    values.append(self._other(mine, operands, why, trained))
                else:
                    values.append(Relation(kind, trained, why))
            else:
                values.append(self._each(mine, operands, number, b.aval, trained))
        return values

    def _scanned(self, mine: Any, theirs: Any, operands: list[Relation]) -> list[Relation]:
        """Return the values of the results of a scan: the carry's once a pass changes none of them, and the stacks'."""
        consts, carried = mine.params["num_consts"], mine.params["num_carry"]
        whole, less = (each.params["jaxpr"] for each in (mine, theirs))
        carry = operands[consts : consts + carried]
        slices = [self._shifted(mine, value, -1) for value in operands[consts + carried :]]
        for _ in range(_PASSES):
            after = self.read(whole, less, [*operands[:consts], *carry, *slices], {})
            joined = [self._joined(mine, first, then) for first, then in zip(carry, after, strict=False)]
            if joined == carry:
                return [*carry, *(self._shifted(mine, value, 1) for value in after[carried:])]
            carry = joined
        return [self._other(mine, ()) for _ in mine.outvars]

    def _shifted(self, eqn: Any, value: Relation, by: int) -> Relation:
        """Return the value of a slice of a scan (`by` -1) or of a stack of slices (1).

        A scan along examples mixes them.
        """
        if value.place is None:
            return value
        place = dataclasses.replace(value.place, dim=value.place.dim + by)
        return self._other(eqn, ()) if place.dim < 0 else dataclasses.replace(value, place=place)

    def _joined(self, eqn: Any, first: Relation, then: Relation) -> Relation:
        """Return the value of a carry before every pass of a scan, by that before and after one pass."""
        trained = first.trained or then.trained
        kinds = {first.kind, then.kind}
        if Reduction.OTHER in kinds:
            return first if first.kind is Reduction.OTHER else then
        if kinds == {Reduction.EACH}:
            place = common_position([first.place, then.place])
            return self._other(eqn, ()) if place is None else Relation(Reduction.EACH, trained, place=place)
        if len(kinds - {Reduction.CONST}) > 1:
            return self._other(eqn, ())
        return dataclasses.replace(then if first.kind is Reduction.CONST else first, trained=trained)

    def _each(self, eqn: Any, operands: Sequence[Relation], number: int, smaller: Any, trained: bool) -> Relation:
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
            return Relation(Reduction.EACH, trained, place=place)
        return self._other(eqn, operands, "", trained)

    def _other(self, eqn: Any, operands: Sequence[Relation], why: str = "", trained: bool = True) -> Relation:
        """Return a value of kind `OTHER`, with the first reason in the trace among its operands, else `why`.

        `why` is empty for an operation that mixes examples.
        """
        mixed = [value for value in operands if value.kind is Reduction.OTHER]
        if mixed:
            first = min(mixed, key=lambda value: value.order)
            return dataclasses.replace(first, trained=trained, why=why or first.why)
        self.mixing += 1
        name = eqn.primitive.name
        drawn = "random numbers of its own, which each part would draw alike" if name == "random_bits" else ""
        why = why or drawn or f"`{name}`, which mixes examples"
        return Relation(Reduction.OTHER, trained, why, line_of(eqn), self.mixing)

    def _reduced(self, eqn: Any, operands: Sequence[Relation], result: Any) -> tuple[Reduction, str]:
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
        weighed = name == "div" and kinds[0] in _WEIGHTED and not operands[1].trained
        if known and not (weighed and not operands[0].why and operands[1].why):
            return Reduction.OTHER, _DIVISOR if name == "div" and not operands[0].why else known
        if all(kind is Reduction.CONST for kind in kinds):
            return Reduction.CONST, ""
        combined = next((value.why for value in operands if value.kind is Reduction.COMBINED), "")
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
                return Reduction.COMBINED if weighed else Reduction.OTHER, _DIVISOR
        elif name in ("add", "sub", "add_any"):
            outcome = first if first is second and first is not Reduction.QUOTIENT else None
            if {first, second} == {Reduction.MEAN, Reduction.CONST}:
                outcome = Reduction.MEAN
            elif outcome is None and {first, second} <= _WEIGHTED:
                outcome = Reduction.COMBINED
        why = combined or f"`{name}` of what is reduced over examples"
        outcome = outcome or Reduction.OTHER
        return outcome, why if outcome in (Reduction.OTHER, Reduction.COMBINED) else ""


def line_of(eqn: Any) -> str:
    """Return the innermost line of the user's code that made an equation, as `model.py:12`; empty without one."""
    frames = eqn.source_info.traceback.frames if eqn.source_info.traceback is not None else ()
    return next((f"{Path(f.file_name).name}:{f.line_num}" for f in frames if is_users_file(f.file_name)), "")


def _closed(jaxpr: Any) -> Any:
    """Return a jaxpr as a closed one, without constants if it was open."""
    from jax.extend.core import ClosedJaxpr

    return jaxpr if hasattr(jaxpr, "jaxpr") else ClosedJaxpr(jaxpr, ())
