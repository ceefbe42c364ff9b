"""Digests of traced computations, and the operands of scans."""

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def computation_digest(fn: Callable[..., Any], args: Sequence[Any]) -> str:
    """Trace `fn` on `args`, arrays or shapes, and return a digest of its ops, their parameters and all constants.

    Names of variables do not count. Values of an outer trace are distinguished by identity. A function with a custom
    gradient rule is traced with its gradients too, since such a rule is no part of the forward computation.
    """
    import jax

    closed = jax.make_jaxpr(fn)(*args)
    digest = _of_closed(closed)
    if any(equation.primitive.name.startswith("custom_vjp_call") for equation in equations(closed.jaxpr)):
        digest += _of_closed(jax.make_jaxpr(functools.partial(_gradients, fn))(*args))
    return digest


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of an open jaxpr and of all jaxprs inside it; an equation precedes those of its bodies."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns"):
                    yield from equations(inner)
                elif hasattr(inner, "jaxpr"):
                    yield from equations(inner.jaxpr)


def _gradients(fn: Callable[..., Any], *args: Any) -> Any:
    """Return the gradients of all float leaves of `args`, for gradients of ones of all float results of `fn`."""
    import jax
    import jax.numpy as jnp

    leaves, tree = jax.tree.flatten(args)
    places = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    def of_floats(*given: Any) -> list[Any]:
        filled = list(leaves)
        for i, value in zip(places, given, strict=True):
            filled[i] = value
        results = jax.tree.leaves(fn(*tree.unflatten(filled)))
        return [each for each in results if jnp.issubdtype(each.dtype, jnp.inexact)]

    results, pull = jax.vjp(of_floats, *(leaves[i] for i in places))
    return pull([jnp.ones_like(each) for each in results])


def _of_closed(closed: Any) -> str:
    """Return the SHA-256 digest, in hexadecimal, of a closed jaxpr and its constants."""
    words = [_of_jaxpr(closed.jaxpr), *(_of_constant(each) for each in closed.consts)]
    return hashlib.sha256("|".join(words).encode()).hexdigest()


def _of_jaxpr(jaxpr: Any) -> str:
    """Return the digest of a jaxpr, in which variables are numbered by first use."""
    from jax.extend.core import Literal

    numbers: dict[Any, int] = {}

    def var(each: Any) -> str:
        if isinstance(each, Literal):
            return f"{_of_constant(each.val)}:{each.aval}"
        return f"{numbers.setdefault(each, len(numbers))}:{each.aval}"

    words = [",".join(map(var, (*jaxpr.constvars, *jaxpr.invars)))]
    for equation in jaxpr.eqns:
        params = ",".join(f"{key}={_of_parameter(value)}" for key, value in sorted(equation.params.items()))
        given, results = (",".join(map(var, each)) for each in (equation.invars, equation.outvars))
        words.append(f"{results}={equation.primitive.name}[{params}]({given})")
    words.append(",".join(map(var, jaxpr.outvars)))
    return hashlib.sha256(";".join(words).encode()).hexdigest()


def _of_parameter(value: Any) -> str:
    """Return a text that identifies an equation's parameter, without addresses; a function counts by its name."""
    if hasattr(value, "eqns"):
        return _of_jaxpr(value)
    if hasattr(value, "jaxpr") and hasattr(value, "consts"):
        return _of_closed(value)
    if isinstance(value, tuple | list):
        return f"({','.join(map(_of_parameter, value))})"
    if hasattr(value, "dtype") and hasattr(value, "shape") and hasattr(value, "__array__"):
        return _of_constant(value)
    if isinstance(value, functools.partial):
        return f"partial{_of_parameter((value.func, value.args, *sorted(value.keywords.items())))}"
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return re.sub(r"0x[0-9a-f]+", "", repr(value))


def _of_constant(value: Any) -> str:
    """Return shape, dtype and digest of a constant; the identity of a value of an outer trace."""
    import numpy as np
    from jax import core

    if isinstance(value, core.Tracer):
        return f"value {id(value)}"
    array = np.asarray(value)
    return f"{array.shape}{array.dtype}{hashlib.sha256(array.tobytes()).hexdigest()}"


def scan_operands(equation: Any) -> tuple[int, int]:
    """Return the number of constant operands of a scan and that of carried ones; the others are sliced.

    The equation has numbers in jax 0.10, and a tree of all operands in 0.11.
    """
    params = equation.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    constant, carried, _ = params["ft_in"].unpack()
    return len(constant), len(carried)
