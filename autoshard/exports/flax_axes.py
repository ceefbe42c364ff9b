"""Export of a plan to Flax's logical axes, and the rules that map them to mesh axes."""

from autoshard.exports.export_text import head, table, unpinned
from autoshard.exports.form_writers import writes
from autoshard.planning import Plan, axis_words


_FLAX = '''
from flax.linen import logical_to_mesh_axes

{mesh}
{rules}
{parameters}
{inputs}

def partition_specs(axes=LOGICAL_AXES):
    """The `PartitionSpec` of each parameter (or of `INPUT_AXES`), as Flax makes it of names and rules."""
    return {{name: logical_to_mesh_axes(names, RULES) for name, names in axes.items()}}
'''
"""Template of the exported code."""


@writes("flax")
def flax_text(plan: Plan, sentence: str) -> str:
    """Return the plan's logical axes for Flax, one name for each tuple of axes that splits a dim, with its rule.

    `sentence` is the line on the predicted step. Optimizer state is omitted.
    """
    rules: dict[tuple[str, ...], str] = {}
    rows, inputs = {}, {}
    for name, spec in plan.arguments.items():
        if plan.roles[name] != "optimizer_state":
            into = rows if plan.is_weight(name) else inputs
            into[name] = repr(tuple(_rule(rules, axes) if axes else None for axes in spec.dims))
    listed = "".join(f"    ({name!r}, {(axes[0] if len(axes) == 1 else axes)!r}),\n" for axes, name in rules.items())
    lacks = (*unpinned(plan), "optimizer state; state made like its parameter is split like it.", "the device order.")
    return head(plan, lacks, sentence) + _FLAX.format(
        mesh=f"MESH = {plan.mesh!r}\n",
        rules=f"# For flax.linen.logical_axis_rules, or nnx.logical_axis_rules.\nRULES = (\n{listed})\n",
        parameters="# Names for nn.with_logical_partitioning, or nnx.with_partitioning, of each parameter.\n"
        + table("LOGICAL_AXES", rows),
        inputs="# The same for the step's other inputs.\n" + table("INPUT_AXES", inputs),
    )


def _rule(rules: dict[tuple[str, ...], str], axes: tuple[str, ...]) -> str:
    """Return the logical name for these mesh axes, such as `over_data_model`; add it to `rules` if it is new.

    Underscores are appended until no other axes have the name.
    """
    name = f"over_{'_'.join(axis_words(axes))}"
    while axes not in rules and name in rules.values():
        name += "_"
    return rules.setdefault(axes, name)
