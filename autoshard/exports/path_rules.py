"""Export of a plan to rules: patterns of the paths of parameters, and the spec for each pattern."""

import itertools
import os
import re
from collections import defaultdict
from collections.abc import Sequence

from autoshard.exports.export_text import MAKE_MESH, head, order_text, partition, unpinned
from autoshard.exports.form_writers import writes
from autoshard.planning import Plan, Spec


_RULES = '''
import re

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

{mesh}
{order}
# (pattern of a path such as `params/encoder/kernel`, spec), of which the first that matches counts. State of optimizers
# that is called like its parameter is matched with it.
RULES = [
{rules}]
# The same as `config.sharding_strategy` of big_vision, with `config.mesh = list(MESH.items())`.
STRATEGY = [
{strategy}]
# The specs of what the step takes beside them.
{inputs}

{make_mesh}

def specs(tree):
    """The `PartitionSpec` of every leaf of a pytree, by its path."""

    def spec(path, leaf):
        keys = [str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", "")))) for key in path]
        name = "/".join(keys[:-1] if keys[-1:] in (["value"], ["raw_value"]) else keys)
        found = next((spec for pattern, spec in RULES if re.fullmatch(pattern, name)), P())
        return found if len(found) <= np.ndim(leaf) else P()

    return jax.tree_util.tree_map_with_path(spec, tree)
'''

_BETWEEN = "[/.]"
"""Pattern between the parts of a path. A dict's key may contain dots, which look like separators in a plan's names."""
_NUMBERED = r"(?:^|(?<=_))\d+$"
"""Pattern of a layer's number at the end of a part of a path: `3`, or `3` in `encoderblock_3`."""
_NUMBER = "\0"
"""Placeholder for any number; no name contains it."""
_STATE = "optimizer state of its own; it is split like its parameter."


@writes("rules")
def rules_text(plan: Plan, sentence: str) -> str:
    """Return the plan's code, with rules for weights and for inputs of the role `other`, if they have at least one dim.

    Inputs of the role `batch` get a table. Optimizer state has no rules: in the code it matches the rule of a
    parameter of the same name. `sentence` is the line on the predicted step.
    """
    specs = {
        name: spec
        for name, spec in plan.arguments.items()
        if (plan.is_weight(name) or plan.roles[name] == "other") and spec.dims
    }
    rules = _rules(_paths(specs))
    others = {name: partition(spec) for name, spec in plan.arguments.items() if plan.roles[name] == "batch"}
    return head(plan, (*unpinned(plan), _STATE), sentence) + _RULES.format(
        mesh=f"MESH = {plan.mesh!r}",
        order=f"DEVICE_ORDER = {order_text(plan)}",
        rules="".join(f"    ({pattern!r}, {partition(spec)}),\n" for pattern, spec in rules),
        strategy="".join(f"    ({pattern!r}, {_tactic(spec)!r}),\n" for pattern, spec in rules if spec.axes),
        inputs=f"INPUTS = {{{', '.join(f'{name!r}: {spec}' for name, spec in others.items())}}}\n",
        make_mesh=MAKE_MESH,
    )


def _paths(specs: dict[str, Spec]) -> dict[tuple[str, ...], Spec]:
    """Return specs by path, without the parts that all paths share at their beginning; a path's last part
    always stays.
    """
    parts = {name: tuple(name.split(".")) for name in specs}
    start = len(os.path.commonprefix([path[:-1] for path in parts.values()]))
    return {path[start:]: specs[name] for name, path in parts.items()}


def _rules(specs: dict[tuple[str, ...], Spec]) -> list[tuple[str, Spec]]:
    """Return patterns with their specs, those with most parts first, so that the first match is the right one.

    Numbered layers with equal specs share one pattern. An unsplit parameter has a rule only if a later rule matches its
    path.
    """
    specs_of: dict[tuple[str, ...], set[Spec]] = defaultdict(set)
    for path, spec in specs.items():
        for form in _forms(path):
            specs_of[form].add(spec)
    groups: dict[tuple[str, ...], list[tuple[str, ...]]] = defaultdict(list)
    for path in specs:
        groups[next(form for form in _forms(path) if len(specs_of[form]) == 1)].append(path)
    patterns = [
        (len(form), _BETWEEN.join(map(_part, form, zip(*paths, strict=True))), specs[paths[0]])
        for form, paths in groups.items()
    ]
    patterns.sort(key=lambda each: (-each[0], each[1]))
    rules = [(f"^(.*/)?{pattern}$", spec) for _, pattern, spec in patterns]
    # A whole parameter needs a rule only if the rule of a shorter path would match it.
    paths = ["/".join(path) for path in specs]
    return [
        (pattern, spec)
        for number, (pattern, spec) in enumerate(rules)
        if spec.axes
        or any(
            re.fullmatch(pattern, path) and any(re.fullmatch(other, path) for other, _ in rules[number + 1 :])
            for path in paths
        )
    ]


def _part(form: str, parts: Sequence[str]) -> str:
    """Return the pattern of one part of paths: `form` if the paths' `parts` differ there, else the literal part they
    share.
    """
    return re.escape(form if len({*parts}) > 1 else parts[0]).replace(_NUMBER, r"\d+")


def _forms(path: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the path with placeholders for every subset of its numbers: most placeholders first, the path unchanged
    last.
    """
    numbered = [at for at, part in enumerate(path) if re.search(_NUMBERED, part)]
    subsets = [each for count in range(len(numbered), -1, -1) for each in itertools.combinations(numbered, count)]
    return [
        tuple(re.sub(_NUMBERED, _NUMBER, part) if at in subset else part for at, part in enumerate(path))
        for subset in subsets
    ]


def _tactic(spec: Spec) -> str:
    """Return big_vision's tactic that splits the same dims by the same axes, such as `shard_dim('data', 0)|...`; empty
    for an unsplit spec.
    """
    return "|".join(
        f"shard_dim({(axes[0] if len(axes) == 1 else axes)!r}, {dim})" for dim, axes in enumerate(spec.dims) if axes
    )
