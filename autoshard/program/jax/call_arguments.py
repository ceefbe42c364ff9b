"""Arguments of a call as `jax.jit` takes them: by position or keyword, static ones bound, with their donation."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard.errors import UserError, reason_of


@dataclasses.dataclass(frozen=True, slots=True)
class PositionalCall:
    """A function and the arguments of one call, all by position."""

    fn: Callable[..., Any]
    """Function of these arguments; the given one if no argument is static or has a name alone."""
    args: tuple[Any, ...]
    """Arguments by position, None in place of a static one; those that have no position follow, sorted by name."""
    key: tuple[Any, ...] = ()
    """Static values and names without a position, equal for calls of one program."""
    named: tuple[str, ...] = ()
    """Names of the last arguments, which have no position."""
    donated: tuple[int, ...] | None = None
    """Positions that the `jax.jit` function donates; None for another function."""


def by_position(fn: Callable[..., Any], args: Sequence[Any], named: Mapping[str, Any] | None = None) -> PositionalCall:
    """Return a call of `fn` with all its arguments by position; defaults are not filled in.

    Arguments that a `jax.jit` function declares as static keep their values. Raises `UserError` for arguments that the
    function does not accept.
    """
    args, kwargs = tuple(args), dict(named or {})
    if kwargs:
        try:
            bound = inspect.signature(fn).bind(*args, **kwargs)
        except (TypeError, ValueError) as error:
            name = getattr(fn, "__name__", "the function")
            raise UserError(f"`{name}` cannot be called so: {reason_of(error)}.") from None
        args, kwargs = bound.args, bound.kwargs
    count, options = len(args), _options(fn)
    values = {at: args[at] for at in _positions(options, "static", fn, count)}
    names = set(options.get("static_argnames", ()))
    fixed = {name: value for name, value in kwargs.items() if name in names}
    free = tuple(sorted(name for name in kwargs if name not in fixed))
    donated = None
    if options:
        by_name = [count + free.index(name) for name in options.get("donate_argnames", ()) if name in free]
        donated = (*_positions(options, "donate", fn, count), *by_name)
    if not values and not kwargs:
        return PositionalCall(fn, args, donated=donated)
    # With static positions given too, JAX reads another static name as such only where it is passed by name.
    numbers = {at % count for at in options.get("static_argnums", ()) if -count <= at < count}
    start = min((at for at in values if at not in numbers), default=count)
    parameters = list(inspect.signature(fn).parameters)[:count] if start < count else []

    @functools.wraps(fn)
    def run(*given: Any, **more: Any) -> Any:
        # This function may be called by another of its kind, which passes the last arguments by name.
        whole = [*given[:count], *(more.pop(name, None) for name in parameters[len(given) :])]
        whole = [values[at] if at in values and each is None else each for at, each in enumerate(whole)]
        last = dict(zip(parameters[start:], whole[start:], strict=True))
        others = fixed | dict(zip(free, given[count:], strict=False)) | more
        return fn(*whole[: count - len(last)], **last, **others)

    run.__dict__["call_options"] = options
    arrays = (*(None if at in values else each for at, each in enumerate(args)), *(kwargs[name] for name in free))
    # Equal values of two types (2 and 2.0) make two programs.
    key = (tuple((at, type(value), value) for at, value in sorted(values.items())), free)
    key += tuple((name, type(value), value) for name, value in sorted(fixed.items()))
    return PositionalCall(run, arrays, key, free, donated)


def _options(fn: Any) -> dict[str, tuple[Any, ...]]:
    """Return static and donated arguments of a `jax.jit` function by option (`static_argnums`); {} for another.

    For an `nnx.jit` function they are its donated arguments alone.
    """
    kept = getattr(fn, "call_options", None)
    if kept is not None:
        return kept
    if isinstance(fn, functools.partial):
        shift, inner = len(fn.args), _options(fn.func)
        return {
            option: tuple(at - shift for at in items if at >= shift) if option.endswith("argnums") else items
            for option, items in inner.items()
        }
    inner = getattr(fn, "jitted_fn", None)
    info = getattr(fn if inner is None else inner, "_jit_info", None)
    kinds = ("static", "donate") if inner is None else ("donate",)
    names = [f"{kind}_{what}" for kind in kinds for what in ("argnums", "argnames")]
    return {name: tuple(getattr(info, name, ())) for name in names} if info is not None else {}


def _positions(options: Mapping[str, Sequence[Any]], kind: str, fn: Callable[..., Any], count: int) -> list[int]:
    """Return the positions below `count` of the arguments that are static or donated (`kind`), ascending."""
    names = options.get(f"{kind}_argnames", ())
    numbers = {at % count if at < 0 else at for at in options.get(f"{kind}_argnums", ()) if count}
    if names:
        parameters = list(inspect.signature(fn).parameters.values())
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        numbers |= {at for at, each in enumerate(parameters) if each.name in names and each.kind in by_place}
    return sorted(at for at in numbers if at < count)
