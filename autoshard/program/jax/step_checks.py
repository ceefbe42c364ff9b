"""Checks that microbatches of a step, each with a backward pass of its own, make the step of the whole batch."""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from autoshard.errors import UserError
from autoshard.program.jax.gradient_groups import line_of
from autoshard.program.jax.jaxprs import equations as all_equations
from autoshard.program.jax.jaxprs import scan_operands
from autoshard.program.jax.update_part import is_var
from autoshard.program.segments import segment_of


_LINEAR = frozenset(
    "neg reshape broadcast_in_dim squeeze expand_dims transpose copy copy_p convert_element_type reduce_sum rev slice "
    "concatenate pad cumsum dynamic_slice dynamic_update_slice gather scatter-add scatter_add split "
    "fft scatter reduce_window_sum psum reduce_precision stop_gradient optimization_barrier sharding_constraint "
    "real imag complex conj select_and_scatter_add select_and_gather_add symbolic_zeros zeros_like".split()
)
"""Primitives that are linear in all their operands of floats together; indices and predicates apart."""
_FORMS = frozenset({"broadcast_in_dim", "reshape", "convert_element_type", "copy", "transpose", "squeeze"})
"""Primitives whose result has the numbers of their operand."""
_SUMS = frozenset({"add", "sub", "add_any"})
"""Primitives that are linear if each operand depends on the gradient or is zero."""
_PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general"})
"""Primitives that are linear in one operand."""
_BODIES = ("jaxpr", "call_jaxpr", "fun_jaxpr", "branches")
"""Names of the parameter in which an equation has a body, or several."""


def check_equations(less: Sequence[Any], whole: Sequence[Any]) -> None:
    """Raise `UserError` for equations that no microbatch may have, or that hide segments.

    - `less`, `whole`: equations of the step on a microbatch and on the whole batch; they must be the same ones.
    """
    for eqn in all_in(less):
        if "callback" in eqn.primitive.name and "debug" not in eqn.primitive.name:
            raise UserError(f"the step calls Python on the host, which may mix examples{_at(eqn)}.")
        if eqn.primitive.name == "sharding_constraint":
            raise UserError(
                f"the step states a sharding{_at(eqn)}, on devices that no stage has: leave it out, or pin arguments."
            )
    for eqn in less:
        inside = eqn.params.get("jaxpr") is not None and segment_of(str(eqn.source_info.name_stack)) is None
        if inside and any(segment_of(str(each.source_info.name_stack)) is not None for each in all_in([eqn])):
            raise UserError(
                f"`{eqn.primitive.name}` around several segments hides them{_at(eqn)}: put it inside of each segment."
            )
    pairs = list(zip(less, whole, strict=False))
    other = next((a for a, b in pairs if a.primitive is not b.primitive or len(a.invars) != len(b.invars)), None)
    if other is None and len(less) != len(whole):
        other = max(less, whole, key=len)[len(pairs)]
    if other is not None:
        raise UserError(
            f"the ops of the step depend on the number of examples{_at(other)}, so microbatches do not make it; leave "
            "--stages out."
        )


def all_in(eqns: Iterable[Any]) -> Iterable[Any]:
    """Yield equations and those of their bodies."""
    for eqn in eqns:
        yield eqn
        for key in _BODIES:
            bodies = eqn.params.get(key)
            for body in bodies if isinstance(bodies, tuple | list) else (bodies,):
                if body is not None:
                    yield from all_equations(getattr(body, "jaxpr", body))


def check_constants(
    less: Sequence[Any], whole: Sequence[Any], results: Sequence[Any], other_results: Sequence[Any]
) -> None:
    """Raise `UserError` if the update, or a result, has a constant that depends on the number of examples.

    - `less`, `whole`: equations of the update for a microbatch and for the whole batch.
    - `results`, `other_results`: results of the step for both.
    """
    for mine, theirs in zip(less, whole, strict=True):
        shapes = [[v.aval.shape for v in each.outvars] for each in (mine, theirs)]
        if _numbers(mine.invars) != _numbers(theirs.invars) or shapes[0] != shapes[1]:
            raise UserError(f"the update uses the number of examples{_at(mine)}, which a microbatch has fewer of.")
    if _numbers(results) != _numbers(other_results):
        raise UserError("a result of the step is the number of examples, which a microbatch has fewer of.")


def _numbers(values: Sequence[Any]) -> list[Any]:
    """Return the scalar constants among operands, in order; NaN as a text."""
    scalars = [v.val for v in values if not is_var(v) and not v.aval.shape]
    return ["nan" if each != each else each for each in scalars]


def check_linear(eqns: Sequence[Any], backward: Collection[int]) -> None:
    """Raise `UserError` for a backward pass that is not linear in the gradient of the loss.

    Gradients of microbatches do not add up to that of the batch then. An example is a custom gradient that clips.

    - `eqns`: equations of the step.
    - `backward`: ids of those of the backward pass.
    """
    zeros = {v for eqn in eqns if _is_zero(eqn, set()) for v in eqn.outvars}
    _linear([eqn for eqn in eqns if id(eqn) in backward], set(), zeros)


def _is_zero(eqn: Any, zeros: Collection[Any]) -> bool:
    """Return True if an equation only changes the form of zeros."""
    return eqn.primitive.name in _FORMS and all(_is_none(v, zeros) for v in eqn.invars)


def _is_none(value: Any, zeros: Collection[Any]) -> bool:
    """Return True for an operand that is zero: one of `zeros`, or a literal."""
    return value in zeros if is_var(value) else not value.aval.shape and value.val == 0


def _linear(eqns: Sequence[Any], depends: set[Any], zeros: set[Any]) -> set[Any]:
    """Return the variables that depend on the gradient of the loss, given those among operands.

    The gradient enters as a constant of the backward pass. Recomputed values do not depend on it. `zeros` are variables
    that are zero.
    """
    for eqn in eqns:
        scope, name = str(eqn.source_info.name_stack), eqn.primitive.name
        if _is_zero(eqn, zeros):
            zeros.update(eqn.outvars)
            continue
        on = [is_var(v) and v in depends for v in eqn.invars]
        enters = not any(is_var(v) for v in eqn.invars) and "transpose(" in scope and "rematted" not in scope
        if not any(on) and not enters:
            continue
        floats = [v for v in eqn.outvars if v.aval.dtype.kind in "fcV" or "float" in str(v.aval.dtype)]
        bodies = [eqn.params[key] for key in _BODIES if key in eqn.params]
        if bodies and any(on):
            _in_bodies(eqn, bodies[0], on)
        elif any(on) and floats:
            none = [_is_none(v, zeros) for v in eqn.invars]
            if not _is_linear(eqn, on, none):
                raise UserError(
                    f"a backward pass is not linear in the gradient of the loss: `{name}`{_at(eqn)}, as in a custom "
                    "gradient that clips; gradients of microbatches do not add up to it."
                )
        depends.update(floats)
    return depends


def _is_linear(eqn: Any, on: Sequence[bool], none: Sequence[bool]) -> bool:
    """Return True if an equation is linear in the operands that depend on the gradient of the loss.

    - `on`: True for these operands.
    - `none`: True for operands that are zero.
    """
    name = eqn.primitive.name
    if name in _PRODUCTS:
        return sum(on) == 1
    if name == "div":
        return list(on) == [True, False]
    if name in _SUMS:
        return all(a or b for a, b in zip(on, none, strict=True))
    if name == "select_n":
        return not on[0] and all(a or b for a, b in zip(on[1:], none[1:], strict=True))
    return name in _LINEAR


def _in_bodies(eqn: Any, bodies: Any, on: Sequence[bool]) -> None:
    """Check the bodies of a call, a loop or a conditional, whose operands depend on the gradient where `on` is True."""
    for body in bodies if isinstance(bodies, tuple | list) else (bodies,):
        jaxpr = getattr(body, "jaxpr", body)
        flags = list(on)[len(on) - len(jaxpr.invars) :]
        if eqn.primitive.name == "scan":  # carried floats of a backward pass are gradients
            fixed, carried = scan_operands(eqn)
            of_floats = ["float" in str(v.aval.dtype) for v in jaxpr.invars[fixed : fixed + carried]]
            flags[fixed : fixed + carried] = of_floats
        _linear(jaxpr.eqns, {v for v, flag in zip(jaxpr.invars, flags, strict=True) if flag}, set())


def _at(eqn: Any) -> str:
    """Return the line of an equation in words, with a space before; empty if it is unknown."""
    line = line_of(eqn)
    return f" at {line}" if line else ""


class Scales:
    """The scale of each gradient of a step: that of the batch is the mean of the microbatches' gradients, or their sum.

    A backward pass is linear in its first constants. For a mean, one of them shrinks as the batch grows, whichever loss
    the step returns.
    """

    def __init__(self, less: Sequence[Any], whole: Sequence[Any], batch: Collection[Any], parts: int) -> None:
        """Find how the results of the equations scale with the number of examples.

        - `less`, `whole`: equations of the step for a microbatch and for the whole batch.
        - `batch`: arguments with examples.
        - `parts`: number of microbatches.
        """
        self.parts = parts
        self.of_batch = set(batch)
        """Variables that depend on examples."""
        self.degrees: dict[Any, int | None] = {}
        """Power of the number of examples in variables; None where terms differ, 0 for variables that are not here."""
        self.zeros = {v for eqn in less if _is_zero(eqn, set()) for v in eqn.outvars}
        for mine, theirs in zip(less, whole, strict=True):
            if any(is_var(v) and v in self.of_batch for v in mine.invars):
                self.of_batch.update(mine.outvars)
            degree = self._degree(mine, theirs)
            if degree != 0:
                self.degrees.update(dict.fromkeys(mine.outvars, degree))

    def is_mean(self, gradient: Any) -> bool | None:
        """Return True for a gradient whose microbatches are averaged, False for a sum, None where neither is right."""
        degree = self.degrees.get(gradient, 0)
        if degree == 0:
            return gradient not in self.of_batch
        return True if degree == -1 and gradient in self.of_batch else None

    def _degree(self, mine: Any, theirs: Any) -> int | None:
        """Return the power of the number of examples in an equation's results; None if its terms differ."""
        name = mine.primitive.name
        powers = [self._power(a, b) for a, b in zip(mine.invars, theirs.invars, strict=True)]
        if name in ("mul", "dot_general", "conv_general_dilated"):
            return None if None in powers else sum(power for power in powers if power is not None)
        if name == "div" and None not in powers:
            first, second = powers
            return (first or 0) - (second or 0)
        terms = {
            (power, is_var(v) and v in self.of_batch)
            for power, v in zip(powers, mine.invars, strict=True)
            if not _is_none(v, self.zeros) and "float" in str(v.aval.dtype)
        }
        if any(key in mine.params for key in _BODIES):
            # A body is linear in the gradient, whose power is that of its results; other operands have none.
            inner = [[_numbers(eqn.invars) for eqn in all_in([each]) if eqn is not each] for each in (mine, theirs)]
            own = {power for power in powers if power != 0}
            return None if inner[0] != inner[1] or len(own) > 1 else next(iter(own), 0)
        # A term without examples is equal in all microbatches, so their mean has it once.
        large = {power for power, of_batch in terms if of_batch} or {power for power, _ in terms}
        small = {power for power, of_batch in terms if not of_batch}
        if name in _SUMS and large == {-1} and small <= {0, -1}:
            return None if -1 in small else -1
        if (
            name in _SUMS
            and large == small == {0}
            and len(terms) > 1
            and "transpose(" in str(mine.source_info.name_stack)
        ):
            return None  # a sum over microbatches would have it once for each
        every = {power for power, _ in terms}
        return None if len(every) > 1 else next(iter(every), 0)

    def _power(self, mine: Any, theirs: Any) -> int | None:
        """Return the power of the number of examples in an operand; None if it is not known."""
        if is_var(mine):
            return self.degrees.get(mine, 0)
        if mine.aval.shape or mine.val == theirs.val or mine.val != mine.val:
            return 0
        for power in (1, -1):
            if abs(theirs.val * self.parts**-power - mine.val) <= 0.01 * abs(mine.val):
                return power
        return None


@contextlib.contextmanager
def without_custom_gradients() -> Iterator[None]:
    """Refuse functions with a gradient of the user's own while inside, since it may mix examples.

    Functions of JAX treat examples apart. Raises `UserError` where such a function is called.
    """
    import jax

    own = jax.custom_vjp.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function of JAX; refuse any other."""
        if not getattr(self.fun, "__module__", "").startswith(("jax.", "jax_", "optax.", "flax.")):
            name = getattr(self.fun, "__name__", "a function")
            raise UserError(
                f"`{name}` has a gradient of its own (jax.custom_vjp), which may mix examples: stages cannot compute "
                "it by microbatch."
            )
        return own(self, *args, **kwargs)

    jax.custom_vjp.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        jax.custom_vjp.__call__ = own  # type: ignore[method-assign]
