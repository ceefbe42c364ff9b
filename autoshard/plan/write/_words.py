"""A plan in words, by dim group."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.plan.model._exchange import exchange_words
from autoshard.plan.model._groups import Groups
from autoshard.plan.model._model import Model
from autoshard.plan.price._predict import argument_bytes_on_host
from autoshard.plan.price._shares import shares_of
from autoshard.plan.record._spec import axis_words
from autoshard.program import WEIGHTS, Role
from autoshard.units import format_bytes


def describe(model: Model, groups: Groups, choices: NDArray[np.int64]) -> tuple[str, ...]:
    """Sentences such as `batch over data`, `ffn and heads over model`, `parameters also over data`."""
    roles = {t: a.role for t, a in zip(model.graph.arguments, model.program.arguments, strict=True)}
    stored = {model.structure.cluster_of[t] for t, r in roles.items() if r in (*WEIGHTS, Role.OPTIMIZER_STATE)}
    stored |= {model.structure.cluster_of[r] for r, _ in model.structure.ties}
    activations = shares_of(model, groups, choices, [
        t for t in sorted(model.liveness.materialised) if model.structure.cluster_of[t] not in stored
    ])  # fmt: skip
    parameters = shares_of(model, groups, choices, [t for t, r in roles.items() if r in WEIGHTS])
    state = shares_of(model, groups, choices, [t for t, r in roles.items() if r is Role.OPTIMIZER_STATE])
    lines = []
    by_axes: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for group, name in groups.names.items():
        axes = tuple(a for a in model.axis_names if activations.get((group, a), 0.0) > 0.5)
        if name and axes and name not in by_axes[axes]:
            by_axes[axes].append(name)
    for axes, names in by_axes.items():
        if names:
            lines.append(f"{_join(_ranked(names))} over {_over(axes)}")
    lines.extend(exchange_words(model, choices))
    explained = {(g, a) for (g, a), share in activations.items() if share > 0.5}
    for what, shares in (("parameters", parameters), ("optimizer state", state)):
        extra = _extra_axes(model, shares, explained)
        if extra and not (what == "optimizer state" and extra == _extra_axes(model, parameters, explained)):
            lines.append(f"{what} also over {_over(extra)}")
    lines.extend(_host_words(model, choices))
    used = {a for shares in (activations, parameters, state) for (_, a), share in shares.items() if share > 0.05}
    idle = [a for a in model.axis_names if a not in used and model.mesh.axes[a] > 1]
    if idle:
        lines.append(f"nothing over {_over(idle)}: its devices repeat the same work")
    return tuple(lines) or ("everything on every device",)


def _host_words(model: Model, choices: NDArray[np.int64]) -> list[str]:
    """How much of a device's arguments waits in its host's memory; nothing where none does."""
    parts = defaultdict[str, int](int)
    for role, size in argument_bytes_on_host(model, choices).items():
        parts["optimizer state" if role is Role.OPTIMIZER_STATE else "arguments"] += size
    return [f"{what} on the hosts, {format_bytes(size)} for each device" for what, size in parts.items()]


def _extra_axes(model: Model, shares: dict[tuple[int, str], float], explained: set[tuple[int, str]]) -> tuple[str, ...]:
    axes = {a for (g, a), share in shares.items() if share > 0.3 and (g, a) not in explained}
    return tuple(a for a in model.axis_names if a in axes)


def _ranked(names: Sequence[str]) -> list[str]:
    """Plain words; dims known only by a parameter's name are counted beside those, else at most three are named."""
    plain = [n for n in names if not n.startswith("dim of ")]
    rest = [n for n in names if n.startswith("dim of ")]
    if plain and rest:
        rest = [f"{len(rest)} more dim{'s' if len(rest) > 1 else ''}"]
    elif len(rest) > 3:
        rest = [*rest[:3], f"{len(rest) - 3} more dims"]
    return [*plain, *rest]


def _over(axes: Sequence[str]) -> str:
    return _join(axis_words(axes))


def _join(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
