"""Export of a plan to a `keras.distribution.LayoutMap`."""

import re

from autoshard.exports.export_text import head, order_text, table, unpinned
from autoshard.exports.form_writers import writes
from autoshard.planning import Plan, Spec, expressible_specs, form_named, inputs_axis


_KERAS = '''
import keras

{mesh}
{order}
{batch}

# Patterns of the paths of Keras's variables; what matches none is whole on every device.
{layouts}
# The shape of every variable that was planned, by its path.
{shapes}
# The same of one batch.
{inputs}

def make_mesh(devices=None):
    """The plan's mesh over the names of devices as `keras.distribution.list_devices` gives them."""
    devices = keras.distribution.list_devices() if devices is None else devices
    ordered = [devices[number] for number in DEVICE_ORDER]
    sizes = {{**MESH, BATCH_AXIS: MESH.get(BATCH_AXIS, 1)}}
    return keras.distribution.DeviceMesh(tuple(sizes.values()), tuple(sizes), ordered)


def layout_map(mesh):
    """The `LayoutMap` of the plan's variables."""
    layouts = keras.distribution.LayoutMap(mesh)
    for pattern, axes in LAYOUTS.items():
        layouts[pattern] = axes
    return layouts


def distribution(devices=None):
    """Give it to `keras.distribution.set_distribution` before the model is made."""
    return keras.distribution.ModelParallel(layout_map=layout_map(make_mesh(devices)), batch_dim_name=BATCH_AXIS)


def check(model):
    """Raise ValueError where variables of a model have other paths or shapes than were planned."""
    found = {{variable.path: tuple(variable.shape) for variable in model.variables}}
    wrong = [path for path, shape in SHAPES.items() if found.get(path) != shape]
    if wrong:
        raise ValueError(
            f"the plan is for variables {{wrong[:3]}} that this model has not, or of another shape; it has "
            f"{{list(found)[:3]}}. Keras numbers the layers of a process: name them, or make the model first."
        )
'''
"""Template of the exported code."""


@writes("keras")
def keras_text(plan: Plan, sentence: str) -> str:
    """Return the plan's code for Keras: layouts of split weights and other variables, without metrics, and the batch
    axis.

    `sentence` is the line on the predicted step. The batch axis is the first that splits a batch input. If none does,
    it is an extra axis of one device.
    """
    form = form_named("keras")
    layouts = expressible_specs(form, plan.arguments, plan.shapes, plan.roles, plan.mesh)
    names = [
        name
        for name in plan.arguments
        if (plan.is_weight(name) or plan.roles[name] == "other") and not name.startswith("metrics.")
    ]
    axes = inputs_axis(plan.arguments, plan.roles)
    inputs = {name: repr(tuple(plan.shapes[name])) for name in plan.arguments if plan.roles[name] == "batch"}
    rows = {re.escape(name): _axes(spec) for name in names if (spec := layouts[name]) is not None and spec.axes}
    return head(plan, (*unpinned(plan), *_lacks(plan)), sentence) + _KERAS.format(
        mesh=f"MESH = {plan.mesh!r}",
        order=f"DEVICE_ORDER = {order_text(plan)}",
        # Keras always splits the batch. If the plan does not, the code splits it over an axis of one device.
        batch=f"BATCH_AXIS = {(axes or (_unused(plan),))[0]!r}",
        layouts=table("LAYOUTS", rows),
        shapes=table("SHAPES", {name: repr(tuple(plan.shapes[name])) for name in names}),
        inputs=table("INPUTS", inputs),
    )


def _lacks(plan: Plan) -> tuple[str, ...]:
    """Return sentences on the parts of the plan that a `LayoutMap` cannot represent; two of them always apply."""
    several = [name for name, spec in plan.arguments.items() if any(len(axes) > 1 for axes in spec.dims)]
    lacks = ["optimizer state of its own; Keras splits it like its variable."]
    if several:
        lacks.append(
            f"dims that several axes split ({', '.join(several[:3])}{', ...' if len(several) > 3 else ''}): a layout "
            "of Keras takes one axis for a dim, and has the first of them."
        )
    lacks.append("inputs that are split otherwise than all in their first dim, by one axis.")
    return tuple(lacks)


def _axes(spec: Spec) -> str:
    """Return the code of a layout's axes: for each dim its first axis, or None."""
    return repr(tuple(axes[0] if axes else None for axes in spec.dims))


def _unused(plan: Plan) -> str:
    """Return a name that no axis of the plan's mesh has: `batch`, with underscores appended as needed."""
    name = "batch"
    while name in plan.mesh:
        name += "_"
    return name
