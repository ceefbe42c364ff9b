"""Sharding rules that users give for opaque calls: their notation, and the binding of a rule to a call's shapes.

The notation is that of `jax.experimental.custom_partitioning`. Commas separate the groups of factors, one group for
each operand and result. Spaces separate the factors, one for each dim. `"b h s d, b h t d, b h t d -> b h s d"` means
that the first dims of all four tensors are split together. `(x y)` is a dim of two factors, major first. A leading
`...` stands for any number of dims that all tensors share. An empty group is a scalar.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from autoshard.errors import UserError


Dims = tuple[tuple[str, ...], ...]
"""Factors (major first) of each dim of one tensor."""

REST = "..."
"""Factor that stands for the leading dims."""

PARALLEL, REDUCTION, NEED_REPLICATION, PERMUTATION = "parallel", "reduction", "need_replication", "permutation"
"""Kinds of factors.

A parallel factor may be split freely. A split reduction factor leaves partial sums in the results. A factor that needs
replication stays whole, and one of a permutation is exchanged if it is split.
"""

_TOKEN = re.compile(r"\s*(\.\.\.|[A-Za-z]\w*|[()])")
"""Next factor, parenthesis or `...` of a group."""


@dataclasses.dataclass(frozen=True, slots=True)
class CallRule:
    """Sharding rule of a call, before it is bound to shapes."""

    name: str
    """Target of the calls to which the rule applies."""
    text: str
    """The rule in the notation of this module, as given."""
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    kinds: tuple[tuple[str, str], ...] = ()
    """Pairs (factor, kind) of the factors that are not parallel."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Pairs (factor, size) of the factors whose sizes do not follow from shapes alone."""
    flops: tuple[tuple[int, tuple[str, ...]], ...] = ()
    """Terms of a sum, each a number times the sizes of some factors; empty if the call does no matrix work."""


@dataclasses.dataclass(frozen=True, slots=True)
class BoundRule:
    """Sharding rule bound to one call's shapes; factors are numbered."""

    sizes: tuple[int, ...]
    """Size of each factor, by its number."""
    kinds: tuple[str, ...]
    """Kind of each factor, by its number."""
    operands: tuple[tuple[tuple[int, ...], ...], ...]
    """Numbers of the factors (major first) of each dim of each operand."""
    results: tuple[tuple[tuple[int, ...], ...], ...]
    flops: int = 0
    """Floating-point operations of the whole call; 0 if it does no matrix work."""


_registered: dict[str, CallRule] = {}
"""Rule of each registered name."""
_log: list[str] = []
"""Names of registered rules, in the order of registration."""


def remember(rule: CallRule) -> None:
    """Register a rule for calls of its name and log the name; a later rule of the same name replaces it."""
    _registered[rule.name] = rule
    _log.append(rule.name)


def registrations() -> int:
    """Return the number of registrations in this process, including rules that were replaced or dropped."""
    return len(_log)


def forget(name: str) -> None:
    """Drop the rule of a name, if there is one."""
    _registered.pop(name, None)


def registered(name: str) -> CallRule | None:
    """Return the rule registered for a name, or None."""
    return _registered.get(name)


def parse_call_rule(
    name: str,
    text: str,
    *,
    reduction: Sequence[str] = (),
    need_replication: Sequence[str] = (),
    permutation: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    flops: str | None = None,
) -> CallRule:
    """Parse a rule from its notation, which has exactly one `->`; nothing before it means no operands.

    - `name`: target of the calls to which the rule applies; errors mention it.
    - `text`: operands and results in the notation of this module.
    - `reduction`, `need_replication`, `permutation`: factors of each kind, as a list or as text with spaces between.
      The others are parallel.
    - `sizes`: sizes of factors that shapes do not determine.
    - `flops`: work of the call, such as `4 b h s t d`; None or empty for no matrix work.

    Raises `UserError` that names the rule and the wrong part of it: bad notation, an unknown factor or a factor of two
    kinds. A reduction factor in a result is refused too.
    """
    sides = text.split("->")
    if len(sides) != 2:
        raise UserError(
            f"the rule of `{name}` is {text!r}; expected operands -> results, such as 'b s d, d f -> b s f'."
        )
    operands, results = ([_tensor(name, text, part) for part in side.split(",")] for side in sides)
    if sides[0].strip() == "":
        operands = []
    inner = {f for dims in operands for dim in dims for f in dim}
    outer = {f for dims in results for dim in dims for f in dim}
    kinds: dict[str, str] = {}
    for kind, factors in ((REDUCTION, reduction), (NEED_REPLICATION, need_replication), (PERMUTATION, permutation)):
        if isinstance(factors, str):
            factors = factors.split()
        for factor in factors:
            if factor not in inner | outer:
                raise UserError(
                    f"the rule of `{name}` calls `{factor}` a {kind} factor, but {text!r} has no `{factor}`."
                )
            if kinds.setdefault(factor, kind) != kind:
                raise UserError(f"the rule of `{name}` gives `{factor}` two kinds: {kinds[factor]} and {kind}.")
            if kind == REDUCTION and factor in outer:
                raise UserError(
                    f"the rule of `{name}` calls `{factor}` a reduction factor, but a result has it as a dim; "
                    "what is summed is gone from the results."
                )
    known = dict(sizes or {})
    unknown = sorted(set(known) - inner - outer)
    if unknown:
        raise UserError(f"the rule of `{name}` has a size for `{unknown[0]}`, but {text!r} has no `{unknown[0]}`.")
    terms = _flops(name, flops, inner | outer) if flops else ()
    return CallRule(name, text, tuple(operands), tuple(results), tuple(kinds.items()), tuple(known.items()), terms)


def _tensor(name: str, text: str, part: str) -> Dims:
    """Parse the group of one tensor, `part` of the rule `text`; an empty part is a scalar without dims.

    Raises `UserError` for other tokens, unbalanced or nested parentheses, a repeated factor, and a `...` that is not
    first.
    """
    dims: list[tuple[str, ...]] = []
    group: list[str] | None = None
    position = 0
    part = part.rstrip()
    while position < len(part):
        match = _TOKEN.match(part, position)
        if match is None:
            raise UserError(
                f"the rule of `{name}` has {part[position:].strip()[:1]!r} in {text!r}; "
                "expected names of factors, `(x y)` for a dim of two factors, or a leading `...`."
            )
        token, position = match[1], match.end()
        if token == "(" and group is None:
            group = []
        elif token == ")" and group:
            dims.append(tuple(group))
            group = None
        elif token in "()" or (token == REST and (dims or group is not None)):
            raise UserError(f"the rule of `{name}` has a {token!r} where none can be, in {text!r}.")
        elif group is not None:
            group.append(token)
        else:
            dims.append((token,))
    if group is not None:
        raise UserError(f"the rule of `{name}` has a '(' that is not closed, in {text!r}.")
    factors = [f for dim in dims for f in dim]
    twice = next((f for f in factors if factors.count(f) > 1), None)
    if twice is not None:
        raise UserError(f"the rule of `{name}` has `{twice}` twice in one tensor, in {text!r}.")
    return tuple(dims)


def _flops(name: str, text: str, known: set[str]) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Parse a sum of products such as `4 b h s t d + 2 b s` into pairs (number, factors); `*` may stand between words.

    The numbers of a term are multiplied, and a term without numbers has 1. Raises `UserError` for an empty term and for
    a factor that is not in `known` or is `...`.
    """
    terms = []
    for term in text.split("+"):
        words = term.replace("*", " ").split()
        number = math.prod(int(word) for word in words if word.isdigit())
        factors = tuple(word for word in words if not word.isdigit())
        strange = [f for f in factors if f not in known or f == REST]
        if strange or not words:
            raise UserError(
                f"the rule of `{name}` has flops {text!r}; expected numbers and factors of the rule, "
                "such as '4 b h s t d'."
            )
        terms.append((number, factors))
    return tuple(terms)


def bind(
    rule: CallRule, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]], where: str = ""
) -> BoundRule:
    """Bind a rule to the shapes of one call: number its factors by first use, and determine their sizes and the FLOPs.

    The first tensor with a `...` determines how many dims it stands for. Each such dim is a factor of the kind that the
    rule gives `...`, parallel by default.

    - `operands`, `results`: shape of each.
    - `where`: name of the call in error messages; may be empty.

    Raises `UserError` if the shapes do not fit the rule.
    """
    call = f"the call {where}" if where else "a call"
    for what, dims, shapes in (("operand", rule.operands, operands), ("result", rule.results, results)):
        if len(dims) != len(shapes):
            raise UserError(
                f"the rule of `{rule.name}`, {rule.text!r}, has {len(dims)} {what}s, but {call} has {len(shapes)}; "
                f"give one group of factors for each {what}."
            )
    rest: int | None = None
    sizes = dict(rule.sizes)
    tensors: list[list[tuple[str, ...]]] = []
    labelled = [("operand", k, d, s) for k, (d, s) in enumerate(zip(rule.operands, operands, strict=True))]
    labelled += [("result", k, d, s) for k, (d, s) in enumerate(zip(rule.results, results, strict=True))]
    for what, k, dims, shape in labelled:
        expanded = list(dims)
        if dims and dims[0] == (REST,):
            extra = len(shape) - (len(dims) - 1)
            # The first tensor with `...` determines how many leading dims it stands for.
            if rest is None and extra >= 0:
                rest = extra
            expanded = [(f"{REST}{i}",) for i in range(rest if rest is not None else 0)] + list(dims[1:])
        if len(expanded) != len(shape):
            raise UserError(
                f"the rule of `{rule.name}` gives {what} {k} {len(expanded)} dims in {rule.text!r}, "
                f"but {call} has the shape {list(shape)} there; give one factor for each dim."
            )
        tensors.append(expanded)
        for dim, size in zip(expanded, shape, strict=True):
            _fit(rule, sizes, dim, size, f"{what} {k} of {call}")
    # Dims of several factors come second: all sizes that single dims determine are known by now.
    compound = [
        (dim, size, f"{what} {k} of {call}")
        for (what, k, _, shape), expanded in zip(labelled, tensors, strict=True)
        for dim, size in zip(expanded, shape, strict=True)
        if len(dim) > 1
    ]
    while compound:
        # A dim with one unknown factor may determine a factor of the dims before it.
        dim, size, where = min(compound, key=lambda each: sum(f not in sizes for f in each[0]) > 1)
        compound.remove((dim, size, where))
        _fit_compound(rule, sizes, dim, size, where)
    index = {f: i for i, f in enumerate(dict.fromkeys(f for tensor in tensors for dim in tensor for f in dim))}
    kinds = dict(rule.kinds)
    maps = [tuple(tuple(index[f] for f in dim) for dim in tensor) for tensor in tensors]
    flops = sum(number * math.prod(sizes[f] for f in factors) for number, factors in rule.flops)
    return BoundRule(
        tuple(sizes[f] for f in index),
        tuple(kinds.get(REST if f.startswith(REST) else f, PARALLEL) for f in index),
        tuple(maps[: len(operands)]),
        tuple(maps[len(operands) :]),
        flops,
    )


def _fit(rule: CallRule, sizes: dict[str, int], dim: tuple[str, ...], size: int, where: str) -> None:
    """Record the size of a dim of one factor; raise `UserError` if that factor has another size already.

    Leave dims of several factors to `_fit_compound`.
    """
    if len(dim) == 1 and sizes.setdefault(dim[0], size) != size:
        raise UserError(
            f"the rule of `{rule.name}`, {rule.text!r}, does not fit: `{dim[0]}` is {sizes[dim[0]]} elsewhere, "
            f"but {size} in {where}; give dims of different sizes different factors."
        )


def _fit_compound(rule: CallRule, sizes: dict[str, int], dim: tuple[str, ...], size: int, where: str) -> None:
    """Derive the one missing size of a dim of several factors, and record it in `sizes`.

    Raise `UserError` if more than one size is missing, or if the sizes do not multiply to the dim.
    """
    known = math.prod(sizes[f] for f in dim if f in sizes)
    missing = [f for f in dim if f not in sizes]
    if len(missing) > 1:
        raise UserError(
            f"the rule of `{rule.name}` does not say how {size} is made of `({' '.join(dim)})` in {where}; "
            f"give the size of `{missing[0]}` with sizes={{...}}."
        )
    if missing and known and size % known == 0:
        sizes[missing[0]] = size // known
    elif missing or known != size:
        raise UserError(
            f"the rule of `{rule.name}`, {rule.text!r}, does not fit: the factors `({' '.join(dim)})` "
            f"make up {known}, but {where} has a dim of {size}."
        )
