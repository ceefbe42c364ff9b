"""Roles of arguments, and the result that is the updated value of an argument."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

from autoshard import mlir
from autoshard.errors import UserError
from autoshard.program.program_record import Role


Roles = Mapping[str, Role | str] | Callable[[str], Role | str | None]
"""Roles by prefix of arguments' names, or a function from a name to a role or None."""

_OPTIMIZER = re.compile(
    r"(^|[._])(opt|optim|optimizer|opt_state|mu|nu|adam|momentum|moments?|velocity|trace)([._]|$|_?state)",
    re.IGNORECASE,
)
"""Names of optimizer state."""
_CACHE = re.compile(
    r"(^|[._])(cache|kv|carry|key|rng|step|count|buffers?|batch_stats|non_?trainable|metrics?)([._]|$|_)",
    re.IGNORECASE,
)
"""Names of caches, counters and other state."""
_BATCH = re.compile(
    r"^(x|y|batch|inputs?|input_ids|tokens?|ids|labels?|targets?|images?|pixel_values|data|mask|attention_mask"
    r"|position_ids|segment_ids|example|features?|xs|ys)([._]|$|\d)",
    re.IGNORECASE,
)
"""Names of data."""
_PARAMETER = re.compile(
    r"(^|[._])(params?|weights?|kernel|bias|scale|embedding|theta|model|variables|w|b|w\d|b\d|w_.*|b_.*)([._]|$|\d)",
    re.IGNORECASE,
)
"""Names of parameters."""
_WEIGHT = re.compile(r"(^|\.)(key|kv|carry)\.(kernel|bias|weight|embedding)(\.value)?$")
"""Names of weights in modules that are called like a cache (`kv.kernel`)."""


def user_role(roles: Roles | None, name: str) -> Role | None:
    """Return the role that the user gives to `name`: that of the longest matching prefix, or the callable's result.

    A prefix ends at a dot or at the name's end; an empty one matches all names. None is for a name without a role.
    Raises `UserError` for a role that does not exist, and for roles in another form.
    """
    if roles is None:
        return None
    if callable(roles):
        return checked(roles(name), name)
    if not isinstance(roles, Mapping) or not all(isinstance(prefix, str) for prefix in roles):
        raise UserError(f"roles is {roles!r}; expected a dict of names and roles, or a function from a name to a role.")
    hits = [
        p for p in roles if p == "" or name == p or name.startswith(p + ".") or (p.endswith(".") and name.startswith(p))
    ]
    return checked(roles[max(hits, key=len)], name) if hits else None


def check_used(roles: Roles | None, names: Sequence[str]) -> None:
    """Raise `UserError` for a prefix that matches none of the arguments' `names`, nearly always a typing mistake.

    A callable or None is not checked.
    """
    if not isinstance(roles, Mapping):
        return  # `user_role` checks a callable
    for prefix in roles:
        if not any(user_role({prefix: roles[prefix]}, name) for name in names):
            shown = ", ".join(f"`{n}`" for n in names[:8]) + (", ..." if len(names) > 8 else "")
            raise UserError(f"roles: no argument is called `{prefix}` or starts with it; the arguments are {shown}.")


def is_telling(name: str) -> bool:
    """Return True if a name tells the purpose of an argument.

    For parameters and batches only the first part of the name counts, for other state all parts do. `state.scale` does
    not tell it, because optimizers name their state after the parameters.
    """
    first = name.partition(".")[0]
    return any(p.search(first) for p in (_PARAMETER, _BATCH)) or any(p.search(name) for p in (_OPTIMIZER, _CACHE))


def is_numbered(name: str, position_name: str) -> bool:
    """Return True for a leaf of nested tuples or lists whose argument's own name does not tell its content.

    `position_name` is the name of the argument, and `name` that of the leaf: the former and numbers.
    """
    path = name.removeprefix(position_name).strip(".")
    return bool(path) and path.replace(".", "").isdecimal() and not is_telling(position_name)


def by_use(names: Sequence[str], leaves: Sequence[Any], uses: Mapping[int, mlir.Use]) -> dict[int, Role]:
    """Return leaf number -> role of updated leaves that only have numbers, as far as the ops that use them tell.

    `names` and `leaves` are those of all arguments, and `uses` has the leaves in question. Only floats with dims count.

    A leaf that is only combined with values of its own shape is optimizer state if a weight of that shape is in its
    list. A list of only such leaves is optimizer state if it mirrors all weights, else other state. Keras passes a
    tuple of lists of parameters, other variables (running statistics), optimizer state and metrics.
    """
    floating = {i for i in uses if leaves[i].shape and str(leaves[i].dtype).startswith(("float", "bfloat"))}
    weights = {i for i in floating if uses[i] is mlir.Use.WEIGHT}
    wanted = Counter(tuple(leaves[i].shape) for i in weights)
    groups: dict[str, list[int]] = {}
    for i in floating:
        groups.setdefault(names[i].rpartition(".")[0], []).append(i)
    roles: dict[int, Role] = {}
    for members in groups.values():
        peers = [i for i in members if uses[i] is mlir.Use.PEER]
        own = {tuple(leaves[i].shape) for i in weights.intersection(members)}
        if own:
            roles |= {i: Role.OPTIMIZER_STATE for i in peers if tuple(leaves[i].shape) in own}
        elif wanted and len(peers) == len(members):
            mirrors = not wanted - Counter(tuple(leaves[i].shape) for i in members)
            roles |= dict.fromkeys(peers, Role.OPTIMIZER_STATE if mirrors else Role.OTHER)
    return roles


def guess(
    name: str, position_name: str, leaf: Any, *, optax: bool, tied: bool, any_state: bool, container: bool
) -> Role:
    """Return the role of one leaf, guessed from its position, name and dtype.

    - `name`, `position_name`: names of the leaf and of its positional argument.
    - `optax`: True if the leaf is inside an optax state.
    - `tied`: True if the function returns it updated. Float arrays are then parameters or optimizer state, by name.
    - `any_state`: True if some argument is tied, so that any other is data unless its position has a weight's name.
    - `container`: True if the leaf is part of a pytree, False if it is a positional argument.

    Random keys, caches, counters and scalars are `OTHER`. The first rule that applies counts, in the order of the code.
    """
    dtype = str(leaf.dtype)
    floating = dtype.startswith(("float", "bfloat", "complex"))
    if optax or (tied and _OPTIMIZER.search(name)):
        return Role.OPTIMIZER_STATE
    # A generator's raw key has two numbers, or four (`rbg`), and is never split.
    if dtype.startswith("key<") or (dtype == "uint32" and leaf.shape in ((2,), (4,))):
        return Role.OTHER
    # Under `params` a part called `kv` or `key` is a weight, and so is one whose leaf has a weight's name.
    weights = re.match(r"(?i)(params?|weights?)([._]|$)", position_name) or (floating and _WEIGHT.search(name))
    cache = _CACHE.search(name) and not weights
    if tied:
        return Role.PARAMETER if floating and leaf.shape != () and not cache else Role.OTHER
    if cache and not _BATCH.match(position_name):
        return Role.OTHER
    if any_state and not re.match(r"(?i)^(params?|weights?|model|variables|frozen)", position_name):
        return Role.BATCH if leaf.shape else Role.OTHER
    if leaf.shape == ():
        return Role.OTHER
    if _BATCH.match(position_name) or not floating:
        return Role.BATCH
    if container or _PARAMETER.search(name):
        return Role.PARAMETER
    return Role.BATCH


def checked(role: Any, name: str) -> Role | None:
    """Return `role`, a `Role` or its text, as a `Role`; None for None.

    Raises `UserError`, with the argument's `name`, for a role that does not exist.
    """
    if role is None:
        return None
    try:
        return Role(role)
    except ValueError:
        allowed = ", ".join(f"`{r.value}`" for r in Role)
        raise UserError(
            f"roles: `{name}` is given the role `{role}`, which does not exist; use one of {allowed}."
        ) from None


_STATE_NAME = re.compile(r"^(param|weight|state|opt|theta|model|variables|cache|carry|w$|w\d)", re.IGNORECASE)
"""Names of arguments that count as state even if they are single arrays."""

Aval = tuple[tuple[int, ...], str]
"""Shape and dtype of a leaf."""


def subtrees(treedef: Any, start: int = 0) -> list[tuple[int, Any]]:
    """Return every subtree of `treedef`, itself included, as (index of its first leaf, subtree), outermost first.

    `start` is the index of the first leaf of `treedef`.
    """
    trees = [(start, treedef)]
    offset = start
    for child in treedef.children():
        trees.extend(subtrees(child, offset))
        offset += child.num_leaves
    return trees


def check_ties(ties: Any, argument_avals: Sequence[Aval], result_avals: Sequence[Aval]) -> None:
    """Raise `UserError` for a tie to a leaf that does not exist, that is tied already, or that has another shape.

    Dtypes may differ. Ties that are no mapping raise it too.
    """
    if not isinstance(ties, Mapping):
        raise UserError(f"ties is {ties!r}; expected a dict from leaves of the arguments to leaves of the results.")
    for leaf, result in ties.items():
        for number, avals, what in ((leaf, argument_avals, "argument"), (result, result_avals, "result")):
            if not isinstance(number, Integral) or isinstance(number, bool) or not 0 <= int(number) < len(avals):
                raise UserError(f"ties: {number!r} is no {what}; the leaves of the {what}s are 0 to {len(avals) - 1}.")
        if argument_avals[leaf][0] != result_avals[result][0]:
            shapes = [list(avals[number][0]) for avals, number in ((argument_avals, leaf), (result_avals, result))]
            raise UserError(
                f"ties: leaf {leaf} has the shape {shapes[0]}, result {result} {shapes[1]}; they are no pair."
            )
    if len(set(ties.values())) < len(ties):
        raise UserError(f"ties is {dict(ties)!r}; a result takes the place of one leaf only.")


def tie(
    positions: Sequence[str],
    treedefs: Sequence[Any],
    donated: Sequence[bool],
    argument_avals: Sequence[Aval],
    result_tree: Any,
    result_avals: Sequence[Aval],
) -> dict[int, int]:
    """Return argument index -> result index for state that the function returns updated.

    A positional argument is tied to the first free part of the result with the same tree structure, shapes and dtypes.
    A single array counts as state only if it is donated, has a name of state or is a random key. The output of a layer
    often has the shape of its input. Donated leaves that no structure explains are tied by shape and dtype, as XLA
    aliases them.

    - `positions`: names of the positional arguments.
    - `treedefs`: their tree structures.
    - `donated`: True for each donated positional argument.
    - `argument_avals`, `result_avals`: shape and dtype of every leaf.
    - `result_tree`: tree structure of the result.
    """
    ties: dict[int, int] = {}
    tied: set[int] = set()
    parts = subtrees(result_tree)
    start = 0
    loose: list[int] = []
    for position, treedef in enumerate(treedefs):
        count = treedef.num_leaves
        own = range(start, start + count)
        start += count
        if count == 0:
            continue
        single = not treedef.children()
        named = _STATE_NAME.match(positions[position]) or is_key(argument_avals[start - 1])
        if single and not donated[position] and not named:
            continue
        match = _match(treedef, [argument_avals[i] for i in own], parts, result_avals, tied)
        if match is not None:
            ties.update(zip(own, match, strict=True))
            tied.update(match)
        elif donated[position]:
            loose.extend(own)
    for index in loose:
        for candidate, aval in enumerate(result_avals):
            if candidate not in tied and aval == argument_avals[index]:
                ties[index] = candidate
                tied.add(candidate)
                break
    return ties


def is_key(aval: Aval) -> bool:
    """Return True for the shape and dtype of keys of `jax.random.PRNGKey`, of `threefry2x32` or `rbg`."""
    return aval in (((2,), "uint32"), ((4,), "uint32"))


def _match(
    treedef: Any, avals: list[Aval], parts: Sequence[tuple[int, Any]], result_avals: Sequence[Aval], taken: set[int]
) -> range | None:
    """Return the leaves of the first free part of the result with the same structure, shapes and dtypes; None without.

    - `treedef`, `avals`: structure and leaves of the argument.
    - `parts`: subtrees of the result with the index of their first leaf.
    - `taken`: leaves of the result that are tied already.
    """
    for first, part in parts:
        if part != treedef:
            continue
        own = range(first, first + part.num_leaves)
        if taken.isdisjoint(own) and [result_avals[i] for i in own] == avals:
            return own
    return None
