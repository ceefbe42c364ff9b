"""Export of a plan to Haliax's mappings of axis names, which Levanter's configuration accepts as well."""

import json
import math
import re
from collections.abc import Mapping

from autoshard.cost import Topology
from autoshard.exports.export_text import MAKE_MESH, comment, head, order_text, unpinned
from autoshard.exports.form_writers import writes
from autoshard.planning import Mappings, Plan, Spec, by_name, spec_text
from autoshard.program import Program


_HALIAX = """
import jax
import numpy as np
from jax.sharding import Mesh

{mesh}
{order}
# Of parameters and their optimizer state: for `haliax.shard(model, PARAMETERS)`, and `in_axis_resources` and
# `out_axis_resources` of `haliax.named_jit`.
{parameters}
# Of all that is computed: for `axis_resources` of `haliax.named_jit`, or `haliax.axis_mapping(COMPUTE)`.
{compute}

{make_mesh}"""
"""Template of the exported code."""

_SHARED = ("mlp", "heads")
"""Names, in addition to the batch, that Levanter maps by default if its configuration does not."""
_IDLE = "replica"
"""An axis of one device that every mesh of Levanter has."""


@writes("haliax")
def haliax_text(plan: Plan, sentence: str, program: Program | None = None) -> str:
    """Return the plan's mappings for Haliax, followed by the lines of Levanter's configuration in comments.

    `sentence` is the line on the predicted step. `program` must be given: it has the names of the dims.
    """
    assert program is not None  # `check_names` requires it
    mappings, specs = by_name(plan, program)
    names = list(dict.fromkeys(name for dims in program.dims.values() for name in dims))
    return (
        head(plan, (*unpinned(plan, "COMPUTE splits them by the names of their dims"), *_lacks(plan, specs)), sentence)
        + _HALIAX.format(
            mesh=f"MESH = {plan.mesh!r}",
            order=f"DEVICE_ORDER = {order_text(plan)}",
            parameters=f"PARAMETERS = {_mapping(mappings.held)!r}",
            compute=f"COMPUTE = {_mapping(mappings.computed)!r}",
            make_mesh=MAKE_MESH,
        )
        + _levanter(plan, names, mappings)
    )


def _lacks(plan: Plan, specs: Mapping[str, Spec]) -> tuple[str, ...]:
    """Return sentences on tensors that one mapping for all names does not split as the plan does.

    `specs` has the spec by argument that the mapping gives; split arguments missing there have no named axes.
    """
    others = []
    for name, mapped in specs.items():
        if mapped != plan.arguments[name]:
            ours, theirs = (spec_text(each, plan.shapes[name]) for each in (plan.arguments[name], mapped))
            others.append(f"{name} ({ours}; the mapping has {theirs})")
    unnamed = [name for name, spec in plan.arguments.items() if name not in specs and spec.axes]
    lacks = []
    if others:
        lacks.append(
            f"specs of {len(others)} tensors, whose dims the plan splits otherwise than others of the same name: "
            f"{', '.join(others[:3])}{', ...' if len(others) > 3 else ''}."
        )
    if unnamed:
        lacks.append(f"arrays without named axes: {', '.join(unnamed[:3])}{', ...' if len(unnamed) > 3 else ''}.")
    return tuple(lacks)


def _mapping(axes: Mapping[str, tuple[str, ...]]) -> dict[str, str | tuple[str, ...]]:
    """Return a mapping from names to axes, with a single axis as a plain string."""
    return {name: own[0] if len(own) == 1 else own for name, own in axes.items()}


def _levanter(plan: Plan, names: list[str], mappings: Mappings) -> str:
    """Return the mappings as comment lines: a section of Levanter's configuration for dims named `names`.

    The leading mesh axes whose sizes multiply to the number of slices are its `dcn_axes`. If there are none such, one
    line states that Levanter cannot express the mesh.
    """
    slices = Topology.parse(plan.topology).slices
    across = [axis for k, axis in enumerate(plan.mesh) if math.prod([*plan.mesh.values()][: k + 1]) <= slices > 1]
    if math.prod(plan.mesh[axis] for axis in across) != slices:
        return "\n" + comment(f"Levanter's configuration has no axis of which a part is over the {slices} slices.")
    within = {axis: size for axis, size in plan.mesh.items() if axis not in across}
    lines = ["For Levanter, which lays out the devices itself:", "trainer:", "  mesh:", f"    axes: {_yaml(within)}"]
    if across:
        lines.append(f"    dcn_axes: {_yaml({axis: plan.mesh[axis] for axis in across})}")
    for key, axes, by_itself in (
        ("compute_mapping", mappings.computed, ("batch", *_SHARED)),
        ("param_mapping", mappings.held, _SHARED),
    ):
        own = {name: axes[name] for name in names if name in axes}
        if _IDLE not in plan.mesh:
            own |= {name: (_IDLE,) for name in by_itself if name in names and name not in axes}
        lines.append(f"    {key}: {_yaml(_mapping(own))}")
    return "\n" + "".join(map(comment, lines))


def _yaml(mapping: Mapping[str, object]) -> str:
    """Return a mapping of words, numbers or tuples of words in YAML's flow style; words with other characters are
    quoted.
    """

    def word(name: object) -> str:
        """Return a name as a YAML scalar, quoted if it has other characters than letters, digits and `_`."""
        return str(name) if re.fullmatch(r"\w+", str(name)) else json.dumps(name)

    def text(value: object) -> str:
        """Return a value as a YAML scalar, a tuple as a list."""
        return f"[{', '.join(map(word, value))}]" if isinstance(value, tuple) else word(value)

    return f"{{{', '.join(f'{word(name)}: {text(value)}' for name, value in mapping.items())}}}"
