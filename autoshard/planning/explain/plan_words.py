"""The chosen sharding in words, and the dim groups that each mesh axis splits."""

import re
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.base.units import format_bytes
from autoshard.planning.price.evaluate import argument_bytes_on_host, tensor_spec
from autoshard.planning.price.replicated_work import shares_of
from autoshard.planning.record.spec import axis_words
from autoshard.planning.space.attention_exchange import exchange_words, exchanges
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.dim_groups import Groups, tensor_groups
from autoshard.program import WEIGHTS, Role


MOST = 0.5
"""Share of the bytes of activations with a dim group above which an axis counts as splitting the group."""


def axis_roles(model: Model, groups: Groups, choices: NDArray[np.int64]) -> dict[str, tuple[str, ...]]:
    """Return for each mesh axis the named dim groups that it splits in most activations, then the exchanges of
    attentions over it.

    Most means a share above `MOST` of the bytes; each name is listed once.
    """
    shares = _activation_shares(model, groups, choices)
    roles = {
        axis: [name for group, name in groups.names.items() if name and shares.get((group, axis), 0.0) > MOST]
        for axis in model.axis_names
    }
    for ways in exchanges(model, choices):
        for exchange, axes in ways:
            for axis in axes:
                roles[axis].append(exchange)
    return {axis: tuple(dict.fromkeys(names)) for axis, names in roles.items()}


def _activation_shares(model: Model, groups: Groups, choices: NDArray[np.int64]) -> dict[tuple[int, str], float]:
    """Return (dim group, axis) -> share of the bytes of activations with that group in which the axis splits it.

    Activations are materialised values outside of the clusters of weights, optimizer state and results that replace
    arguments.
    """
    cluster_of = model.structure.cluster_of
    roles = {t: a.role for t, a in zip(model.graph.arguments, model.program.arguments, strict=True)}
    stored = {cluster_of[t] for t, r in roles.items() if r in (*WEIGHTS, Role.OPTIMIZER_STATE)}
    stored |= {cluster_of[r] for r, _ in model.structure.ties}
    values = [t for t in sorted(model.liveness.materialised) if cluster_of[t] not in stored]
    return shares_of(model, groups, choices, values)


def describe(model: Model, groups: Groups, choices: NDArray[np.int64]) -> tuple[str, ...]:
    """Return a plan in sentences such as `batch over data`, `ffn and heads over model`, `parameters also over data`.

    Sentences on activations by axes come first, then exchanges of attentions and further axes of parameters and
    optimizer state. State on the hosts and unused axes end the list. Optimizer state has a sentence only if its further
    axes differ from those of parameters. A plan without any sentence is `everything on every device`.
    """
    roles = {t: a.role for t, a in zip(model.graph.arguments, model.program.arguments, strict=True)}
    activations = _activation_shares(model, groups, choices)
    parameters = shares_of(model, groups, choices, [t for t, r in roles.items() if r in WEIGHTS])
    state = shares_of(model, groups, choices, [t for t, r in roles.items() if r is Role.OPTIMIZER_STATE])
    lines = []
    by_axes: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for group, name in groups.names.items():
        axes = tuple(a for a in model.axis_names if activations.get((group, a), 0.0) > MOST)
        if name and axes and name not in by_axes[axes]:
            by_axes[axes].append(name)
    for axes, names in by_axes.items():
        if names:
            lines.append(f"{_join(_ranked(names))} over {_over(axes)}")
    lines.extend(exchange_words(model, choices))
    named = {(g, a) for (g, a), share in activations.items() if share > MOST and groups.names.get(g)}
    lines.extend(_other_inputs(model, groups, choices, named))
    explained = {(g, a) for (g, a), share in activations.items() if share > MOST}
    for what, shares in (("parameters", parameters), ("optimizer state", state)):
        extra = _extra_axes(model, shares, explained)
        if extra and not (what == "optimizer state" and extra == _extra_axes(model, parameters, explained)):
            lines.append(f"{what} also over {_over(extra)}")
    lines.extend(_host_words(model, choices))
    # Splitting at most a twentieth of the bytes, such as of one small tensor, does not count as use of an axis.
    used = {a for shares in (activations, parameters, state) for (_, a), share in shares.items() if share > 0.05}
    idle = [a for a in model.axis_names if a not in used and model.mesh.axes[a] > 1]
    if idle:
        lines.append(f"nothing over {_over(idle)}: its devices repeat the same work")
    return tuple(lines) or ("everything on every device",)


def _other_inputs(
    model: Model, groups: Groups, choices: NDArray[np.int64], explained: set[tuple[int, str]]
) -> list[str]:
    """Return words on the inputs that are split otherwise than most activations.

    An input is listed if its batch dim lacks an axis that splits most of the batch. It is also listed if an axis splits
    a dim of it that the axis splits in few activations. `explained` has the pairs of dim group and axis of most
    activations that have words.
    """
    batch = {axis for group, axis in explained if group == groups.batch}
    places = defaultdict[str, list[str]](list)
    for argument, tensor in zip(model.program.arguments, model.graph.arguments, strict=True):
        if argument.role is not Role.BATCH or model.structure.cluster_of[tensor] < 0:
            continue
        near = tensor_groups(model.structure, groups.of_factor, tensor)
        spec = tensor_spec(model, choices, tensor)
        dims = list(zip(near, spec.dims, strict=True))
        lacks = any(group == groups.batch and not batch.issubset(own) for group, own in dims if group is not None)
        further = any((group, axis) not in explained for group, own in dims for axis in own)
        if lacks or further:
            split = [
                f"{(groups.names.get(group, '') if group is not None else '') or f'dim {number}'} over {_over(own)}"
                for number, (group, own) in enumerate(dims)
                if own
            ]
            places[f"split by {_join(split)}" if split else "whole on every device"].append(argument.name)
    return [f"{_join(_ranked(names))} {place}" for place, names in places.items()]


def _host_words(model: Model, choices: NDArray[np.int64]) -> list[str]:
    """Return words on the bytes of a device's arguments in its host's memory, optimizer state apart; nothing if there
    are none.
    """
    parts = defaultdict[str, int](int)
    for role, size in argument_bytes_on_host(model, choices).items():
        parts["optimizer state" if role is Role.OPTIMIZER_STATE else "arguments"] += size
    return [f"{what} on the hosts, {format_bytes(size)} for each device" for what, size in parts.items()]


def _extra_axes(model: Model, shares: dict[tuple[int, str], float], explained: set[tuple[int, str]]) -> tuple[str, ...]:
    """Return the axes, in mesh order, that split above 0.3 of the bytes of tensors with a dim group.

    Pairs of group and axis in `explained` do not count.
    """
    # A third of the bytes is worth a sentence, even if small or odd tensors are whole.
    axes = {a for (g, a), share in shares.items() if share > 0.3 and (g, a) not in explained}
    return tuple(a for a in model.axis_names if a in axes)


def _ranked(names: Sequence[str]) -> list[str]:
    """Return names of dim groups for a sentence, plain words first.

    The first three names such as `dim 0 of NAME` are stated, or the first one next to plain words. The rest are
    counted. The channels of several layers are one name.
    """
    layers = [n for n in names if n.startswith("channels of ")]
    if len(layers) > 1:
        first = layers[0].removeprefix("channels of ")
        names = [*(n for n in names if n not in layers), f"channels of {len(layers)} layers such as {first}"]
    rest = [n for n in names if re.match(r"dim \d+ of ", n)]
    plain = [n for n in names if n not in rest]
    named, more = rest[: 1 if plain else 3], len(rest[1 if plain else 3 :])
    return [*plain, *named, *([f"{more} more dim{'s' if more > 1 else ''}"] if more else [])]


def _over(axes: Sequence[str]) -> str:
    """Return mesh axes as an enumeration in words."""
    return _join(axis_words(axes))


def _join(words: Sequence[str]) -> str:
    """Return words, at least one, as an enumeration: `a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
