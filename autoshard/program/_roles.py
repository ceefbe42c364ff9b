"""What each argument is for: said by the user, or guessed from structure and names."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard import mlir
from autoshard.errors import UserError
from autoshard.program._program import Role


Roles = Mapping[str, Role | str] | Callable[[str], Role | str | None]

_OPTIMIZER = re.compile(
    r"(^|[._])(opt|optim|optimizer|opt_state|mu|nu|adam|momentum|moments?|velocity|trace)([._]|$|_?state)",
    re.IGNORECASE,
)
_CACHE = re.compile(
    r"(^|[._])(cache|kv|carry|key|rng|step|count|buffers?|batch_stats|non_?trainable|metrics?)([._]|$|_)",
    re.IGNORECASE,
)
_BATCH = re.compile(
    r"^(x|y|batch|inputs?|input_ids|tokens?|ids|labels?|targets?|images?|pixel_values|data|mask|attention_mask"
    r"|position_ids|segment_ids|example|features?|xs|ys)([._]|$|\d)",
    re.IGNORECASE,
)
_PARAMETER = re.compile(
    r"(^|[._])(params?|weights?|kernel|bias|scale|embedding|theta|model|variables|w|b|w\d|b\d|w_.*|b_.*)([._]|$|\d)",
    re.IGNORECASE,
)
_WEIGHT = re.compile(r"(^|\.)(key|kv|carry)\.(kernel|bias|weight|embedding)(\.value)?$")


def said(roles: Roles | None, name: str) -> Role | None:
    """The role the user gives to `name`: the longest matching prefix of a mapping, or what a callable returns.

    Raises `UserError` for a role that does not exist.
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
    """Refuse a prefix that names no argument: it is nearly always a typing mistake."""
    if not isinstance(roles, Mapping):
        return  # `said` reads it
    for prefix in roles:
        if not any(said({prefix: roles[prefix]}, name) for name in names):
            shown = ", ".join(f"`{n}`" for n in names[:8]) + (", ..." if len(names) > 8 else "")
            raise UserError(f"roles: no argument is called `{prefix}` or starts with it; the arguments are {shown}.")


def is_telling(name: str) -> bool:
    """True if a name says what an argument is for: in its first part, or with all of it about no parameter.

    `state.scale` does not: optimizers name their state after the parameters.
    """
    first = name.partition(".")[0]
    return any(p.search(first) for p in (_PARAMETER, _BATCH)) or any(p.search(name) for p in (_OPTIMIZER, _CACHE))


def is_numbered(name: str, position_name: str) -> bool:
    """True for a leaf of nested tuples or lists whose argument's own name does not say what is in them."""
    path = name.removeprefix(position_name).strip(".")
    return bool(path) and path.replace(".", "").isdecimal() and not is_telling(position_name)


def by_use(names: Sequence[str], leaves: Sequence[Any], uses: Mapping[int, mlir.Use]) -> dict[int, Role]:
    """Roles of updated leaves that only have numbers, where what the program does with them (`uses`) tells.

    What only ever meets values of its own shape is optimizer state beside a weight of that shape. A list of nothing
    else is optimizer state if it mirrors all weights, else other state: Keras hands over lists of parameters, of other
    variables (running statistics), of the optimizer's and of metrics', in a tuple.
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
    """The role of one leaf, from where it stands.

    `optax`: inside an optax state; `tied`: the function returns it updated; `any_state`: some argument is tied,
    so what is not tied is data; `container`: it is part of a pytree, not a positional argument by itself.
    """
    dtype = str(leaf.dtype)
    floating = dtype.startswith(("float", "bfloat", "complex"))
    if optax or (tied and _OPTIMIZER.search(name)):
        return Role.OPTIMIZER_STATE
    # A generator's raw key has two numbers, or four (`rbg`), which nobody splits.
    if dtype.startswith("key<") or (dtype == "uint32" and leaf.shape in ((2,), (4,))):
        return Role.OTHER
    # Under `params` a part called `kv` or `key` is a weight, and so is a module's whose leaf is called like one.
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
    """Return the role that is written; None for None. Raises `UserError` for one that does not exist."""
    if role is None:
        return None
    try:
        return Role(role)
    except ValueError:
        allowed = ", ".join(f"`{r.value}`" for r in Role)
        raise UserError(
            f"roles: `{name}` is given the role `{role}`, which does not exist; use one of {allowed}."
        ) from None
