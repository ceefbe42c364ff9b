"""Remat policies of a layer, value by value: parsed from text, and converted to jax's policy.

`full,keep=q_proj/k_proj,offload=input` recomputes everything except the results of the two matmuls and the layer's
input. The results stay on the device; the input is offloaded to the host's memory.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard.errors import UserError


BASES = ("none", "dots", "full")
"""Policies for the values of a layer that are not named.

`none` recomputes nothing, `dots` all but the results of matmuls without batch dims, `full` everything.
"""

_LISTS = ("keep", "offload")
"""Names of the lists of values in a policy's text, and of the fields of `Policy`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """The values that one layer recomputes, saves and offloads to its host."""

    base: str
    """The policy for values that are not named, one of `BASES`."""
    keep: tuple[str, ...] = ()
    """Names of values that stay on the device."""
    offload: tuple[str, ...] = ()
    """Names of values that are offloaded to the host's memory."""

    @property
    def names(self) -> tuple[str, ...]:
        """The values that the policy names."""
        return (*self.keep, *self.offload)

    def __str__(self) -> str:
        """Return the text that `read_policy` parses into this policy."""
        lists = [f"{key}={'/'.join(getattr(self, key))}" for key in _LISTS if getattr(self, key)]
        return ",".join([self.base, *lists])


@functools.cache
def read_policy(text: str) -> Policy:
    """Parse `full`, `dots,keep=context` or `full,keep=up_proj/gate_proj,offload=input`.

    Raises `UserError` for any other form and for a value that is named twice. It also does for names after `none`,
    which recomputes nothing.
    """
    base, *lists = (part.strip() for part in text.split(","))
    if base not in BASES:
        raise unknown_remat(text)
    values: dict[str, tuple[str, ...]] = {}
    for part in lists:
        key, equals, names = part.partition("=")
        listed = tuple(name.strip() for name in names.split("/"))
        if key.strip() not in _LISTS or key.strip() in values or not equals or not all(listed):
            raise unknown_remat(text)
        values[key.strip()] = listed
    named = [name for listed in values.values() for name in listed]
    twice = next((name for name in named if named.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"remat `{text}` names `{twice}` twice; a value stays on the device or goes to the host, once.")
    if base == "none" and named:
        raise UserError(
            f"remat `{text}`: `none` recomputes nothing, so every value stays on the device; write `full` or `dots` "
            "before values to keep or to offload."
        )
    return Policy(base, **values)


def unknown_remat(text: str) -> UserError:
    """Return the error for a text that is no remat policy."""
    return UserError(
        f"remat `{text}` does not exist; use `none`, `dots` or `full`, with values as in "
        "`full,keep=q_proj/k_proj,offload=input`, or one choice for the first layers and another for the rest, as "
        "`full:20+none`."
    )


def jax_policy(
    policy: Policy, names: Mapping[str, Sequence[str]] | None = None, mapped: int = 0
) -> Callable[..., Any] | None:
    """Return the policy for `jax.checkpoint`; None for `none`, whose layers need no checkpoint.

    - `names`: for a value, the names that the program marks it with by `checkpoint_name`; by default the value's own
      name.
    - `mapped`: number of dims that are mapped over (`jax.vmap`) from outside, such as the stages of a pipeline. They do
      not count as batch dims.
    """
    import jax

    policies = jax.checkpoint_policies
    if policy.base == "none":
        return None
    rest = policies.dots_with_no_batch_dims_saveable if policy.base == "dots" else policies.nothing_saveable
    if policy.base == "dots" and mapped:
        rest = _dots_with(mapped)
    if not policy.names:
        return rest
    marks = names or {}
    saved, offloaded = (
        [mark for name in each for mark in marks.get(name, (name,))] for each in (policy.keep, policy.offload)
    )
    if offloaded:
        named = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=saved,
            names_which_can_be_offloaded=offloaded,
            offload_src="device",
            offload_dst="pinned_host",
        )
    else:
        named = policies.save_only_these_names(*saved)
    if policy.base == "full":
        return named

    def both(primitive: Any, *values: Any, **params: Any) -> Any:
        mine = named if params.get("name") in {*saved, *offloaded} and primitive.name == "name" else rest
        return mine(primitive, *values, **params)

    return both


def _dots_with(mapped: int) -> Callable[..., bool]:
    """Return a policy that saves matmul results with at most `mapped` batch dims."""
    from jax import lax

    def saveable(primitive: Any, *_: Any, **params: Any) -> bool:
        return primitive is lax.dot_general_p and len(params["dimension_numbers"][1][0]) <= mapped

    return saveable
