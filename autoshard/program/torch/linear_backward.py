"""Backward passes that are not linear in the gradient they receive, as one that clamps it.

A process with a part of the batch passes back larger gradients of its own mean. Their average over all processes is
the gradient of the whole batch only if each backward pass is linear.
"""

from collections.abc import Callable, Sequence
from typing import Any

from autoshard.program.jax.gradient_groups import Reduced, Reduction
from autoshard.program.kernels.pallas_grid import inner_jaxprs
from autoshard.program.torch_ops.torch_gradients import applied_functions


_NONLINEAR = {
    *("max", "min", "clamp", "abs", "sign", "round", "floor", "ceil", "rem", "is_finite", "nextafter"),
    *("exp", "exp2", "expm1", "log", "log1p", "logistic", "erf", "erfc", "tanh", "sin", "cos", "tan", "atan2"),
    *("sqrt", "rsqrt", "cbrt", "pow", "integer_pow", "square"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
    *("reduce_max", "reduce_min", "reduce_prod", "argmax", "argmin", "sort", "top_k", "cummax", "cummin", "cumprod"),
}
"""Primitives that are linear in no operand."""
_PRODUCTS = {"mul", "dot_general", "conv_general_dilated"}
"""Primitives that are linear in one operand if the others do not depend on the gradient."""


def checked_reduction(read: Callable[[], Reduced], loss: Callable[..., Any], args: Sequence[Any]) -> Reduced:
    """Return the reduction that `read` finds in traces of a loss, or `OTHER` for a `backward` that is not linear.

    - `loss`: function of `args` with the loss as its first result.
    """
    import jax

    def first(*given: Any) -> Any:
        """Return the loss alone."""
        return jax.tree.leaves(loss(*given))[0]

    with applied_functions() as functions:
        found = read()
        nonlinear = _nonlinear_op(first, args) if functions and found.kind is not Reduction.OTHER else ""
    if not nonlinear:
        return found
    names = " or ".join(f"`{name}`" for name in dict.fromkeys(functions))
    return Reduced(Reduction.OTHER, f"`{nonlinear}` of gradients in the `backward` of {names}, which is not linear")


def _nonlinear_op(loss: Callable[..., Any], args: Sequence[Any]) -> str:
    """Return the name in JAX of the first nonlinear operation in the backward pass of a loss; empty without one.

    - `loss`: function whose one result is differentiated.
    - `args`: shapes of its operands. Gradients are those of `args[0]`.

    A loss that cannot be traced, or is no floating-point number, has none.
    """
    import jax
    import jax.numpy as jnp

    def backward(gradient: Any, *given: Any) -> list[Any]:
        """Return the gradients of the parameters in floating point."""
        pulled = jax.vjp(lambda first: loss(first, *given[1:]), given[0])[1](gradient)
        return [each for each in jax.tree.leaves(pulled) if each.dtype != jax.dtypes.float0]

    try:
        result = jax.eval_shape(loss, *args)
        if not jnp.issubdtype(result.dtype, jnp.floating):
            return ""
        whole = jax.make_jaxpr(backward)(jax.ShapeDtypeStruct(result.shape, result.dtype), *args)
    except Exception:  # the trace of the step raises it again as an error of the user's code
        return ""
    reader = _Linearity()
    reader.read(whole.jaxpr, [True, *[False] * (len(whole.jaxpr.invars) - 1)])
    return reader.found


class _Linearity:
    """A search for the first operation that is not linear in the values that depend on the gradient."""

    def __init__(self) -> None:
        """Start without a finding."""
        self.found = ""
        """Name of the first such operation so far."""

    def read(self, jaxpr: Any, given: Sequence[bool]) -> list[bool]:
        """Return, for each result of a jaxpr, True if it depends on the gradient, as the operands `given` do."""
        depends = {var for var, each in zip(jaxpr.invars, given, strict=True) if each}
        for eqn in jaxpr.eqns:
            used = [not hasattr(var, "val") and var in depends for var in eqn.invars]
            if any(used):
                results = self._results(eqn, used)
                depends.update(var for var, each in zip(eqn.outvars, results, strict=True) if each)
        return [not hasattr(var, "val") and var in depends for var in jaxpr.outvars]

    def _results(self, eqn: Any, used: list[bool]) -> list[bool]:
        """Return, for each result of an equation, True if it depends on the gradient; calls are read inside."""
        name, inner = eqn.primitive.name, list(inner_jaxprs(eqn))
        if name == "scan":
            return self._scanned(inner[0], used, eqn.params["num_consts"], eqn.params["num_carry"])
        if name == "cond":
            taken = [self.read(each, used[1:]) for each in inner]
            return [any(each) for each in zip(*taken, strict=True)]
        if len(inner) == 1 and len(inner[0].invars) == len(used) and len(inner[0].outvars) == len(eqn.outvars):
            return self.read(inner[0], used)
        divides = name == "div" and used[1]
        if name in _NONLINEAR or divides or (name in _PRODUCTS and sum(used) > 1):
            self.found = self.found or name
        return [True] * len(eqn.outvars)

    def _scanned(self, body: Any, used: list[bool], consts: int, carried: int) -> list[bool]:
        """Return the same for a scan, whose carry is read until no more of it depends on the gradient."""
        carry = used[consts : consts + carried]
        while True:
            after = self.read(body, [*used[:consts], *carry, *used[consts + carried :]])
            joined = [before or then for before, then in zip(carry, after, strict=False)]
            if joined == carry:
                return [*carry, *after[carried:]]
            carry = joined
