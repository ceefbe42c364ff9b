"""Export of a plan to settings of MaxText: parallelism, pipeline and recomputation."""

import math

from autoshard.cost import Topology
from autoshard.errors import FormError, UserError
from autoshard.exports.export_text import comment, head, unpinned
from autoshard.exports.form_writers import writes
from autoshard.planning import Plan, Rest, maxtext_uses, planned_remat
from autoshard.program import Policy, read_config
from autoshard.report.display import clean


@writes("maxtext")
def maxtext_text(plan: Plan, sentence: str) -> str:
    """Return the parallelism settings of MaxText's base.yml that are nearest to the plan's uses of axes.

    Axes are assigned to slices (`dcn_...`) in mesh order, and the rest of each size to `ici_...`. Axes of one use
    multiply. The lines of pipeline and recomputation follow. `sentence` is the line on the predicted step.
    """
    slices = Topology.parse(plan.topology).slices
    settings: dict[str, int] = {}
    notes = []
    uses = maxtext_uses(plan)
    dcn = slices
    for axis, size in plan.mesh.items():
        use = uses[axis]
        notes.append(f"{axis}={size} is used as {use} parallelism.")
        outer = math.gcd(size, dcn)
        dcn //= outer
        for prefix, part in (("dcn", outer), ("ici", size // outer)):
            if part > 1:
                key = f"{prefix}_{use}_parallelism"
                settings[key] = settings.get(key, 1) * part
    _check_heads(plan, math.prod(size for key, size in settings.items() if key.endswith("_tensor_parallelism")))
    remat, missing = _remat(plan)
    piped, unpiped = _pipeline(plan, math.prod(plan.mesh[axis] for axis, use in uses.items() if use == "pipeline"))
    lacks = (
        *unpinned(plan, rest=Rest.MAXTEXT),
        "single tensors that are split in another way than the rest; MaxText's own rules split by kind of dim.",
        "the device order.",
        *missing,
        *unpiped,
    )
    body = "".join(f"{key}: {value}\n" for key, value in settings.items()) + piped + remat
    return head(plan, lacks, sentence) + "".join(map(comment, notes)) + body


def _check_heads(plan: Plan, degree: int) -> None:
    """Raise `FormError` if MaxText's tensor parallelism of that degree does not divide the heads of keys of a decoder.

    MaxText splits heads of queries and of keys by one degree, replicates none, and refuses others when it starts. The
    number of heads is known for programs of a configuration only.
    """
    if plan.source is None or not plan.source.is_configuration:
        return
    try:
        fields = read_config(plan.source.program.removeprefix("hf:"))[1]
    except UserError:  # the file has moved, and the plan does not state the number
        return
    heads = fields.get("num_key_value_heads") or fields.get("num_attention_heads")
    if heads and heads % degree:
        raise FormError(
            f"MaxText splits whole heads of keys, and {heads} cannot be split over {degree} devices of tensor "
            f"parallelism; --mesh with an axis of {math.gcd(heads, degree)} in its place can be exported."
        )


def _pipeline(plan: Plan, parts: int) -> tuple[str, list[str]]:
    """Return the pipeline lines of MaxText's configuration, and sentences on the parts of the pipeline that they omit.

    `parts` is the number of parts of the devices with stages. MaxText has one stage on each part. Its decoder layers
    are stages x layers per stage x repeats, and its microbatches a multiple of its stages (the comments of its
    base.yml). Lines and sentences are empty without a pipeline of layers. With one part there are no lines. Layers that
    do not divide are rounded down.
    """
    pipeline = plan.pipeline
    if pipeline is None or not pipeline.layers:
        return "", []
    if parts == 1:
        return "", [f"the {pipeline.stages} stages of the layers; no axis of the mesh splits them."]
    lacks = []
    if parts != pipeline.stages:
        lacks.append(f"{pipeline.stages} stages on {parts} parts of the devices; here there are {parts} stages.")
    if pipeline.microbatches % parts:
        lacks.append(f"{pipeline.microbatches} microbatches; MaxText takes multiples of the {parts} stages alone.")
    layers, left = divmod(pipeline.layers, parts * pipeline.rounds)
    if left:
        lacks.append(f"{pipeline.layers} layers in {parts} stages; they do not divide.")
    settings = {
        "num_layers_per_pipeline_stage": layers,
        "num_pipeline_repeats": pipeline.rounds,
        "num_pipeline_microbatches": pipeline.microbatches,
    }
    return "".join(f"{key}: {value}\n" for key, value in settings.items()), lacks


_TENSORS: dict[str, tuple[str, ...]] = {
    "decoder_layer_input": ("input",),
    "query_proj": ("q_proj", "query"),
    "key_proj": ("k_proj", "key"),
    "value_proj": ("v_proj", "value"),
    "qkv_proj": ("c_attn", "qkv_proj", "query_key_value"),
    "context": ("context",),
    "out_proj": ("o_proj", "out", "attn.c_proj"),
    "mlpwi_0": ("gate_proj", "gate"),
    "mlpwi_1": ("up_proj", "up"),
    "mlpwi": ("c_fc", "fc1"),
    "mlpwo": ("down_proj", "down", "mlp.c_proj", "fc2"),
}
"""MaxText's name of a tensor that its custom policy places, and the names of that value in other models."""

_DOTS = tuple(name for name in _TENSORS if name not in ("decoder_layer_input", "context"))
"""Results of matmuls with a weight."""


def _remat(plan: Plan) -> tuple[str, list[str]]:
    """Return the remat lines of MaxText's configuration, and sentences on the parts of the policy that they omit.

    Both are empty if the plan names no remat policy, or only the program's own. A policy without names of tensors
    becomes MaxText's policy of that name, except for `dots`. Any other becomes `custom`: each tensor is on the `device`
    or its host (`offload`), or recomputed (`remat`), in all layers. If layers differ, all get the policy of the first
    layer.
    """
    try:
        planned = planned_remat(plan)
    except UserError:  # a policy of the program's own has no known meaning
        planned = None
    if planned is None:
        return "", []
    policy, lacks = planned.of(0), []
    if len(planned.parts) > 1:
        lacks.append(f"recomputation in the first layers alone ({clean(str(planned))}); here all follow the first one.")
    if not policy.names and policy.base == "none":
        lacks.append("layers that recompute nothing: MaxText's `none` recomputes all, and this policy all but matmuls.")
        return "remat_policy: minimal_with_context\n", lacks
    if not policy.names and policy.base != "dots":
        return f"remat_policy: {policy.base}\n", lacks
    places = {name: _place(policy, name, values) for name, values in _TENSORS.items()}
    known = {value for values in _TENSORS.values() for value in values}
    unknown = [name for name in policy.names if not any(_means(name, value) for value in known)]
    if unknown:
        lacks.append(f"the places of {', '.join(clean(name) for name in unknown)}; MaxText has no such tensor.")
    return "remat_policy: custom\n" + "".join(f"{name}: {place}\n" for name, place in places.items()), lacks


def _means(name: str, value: str) -> bool:
    """Return True if two names are equal, or if the dotted parts of one are the last parts of the other."""
    return name == value or name.endswith(f".{value}") or value.endswith(f".{name}")


def _place(policy: Policy, name: str, values: tuple[str, ...]) -> str:
    """Return MaxText's place of a tensor under a policy: `device`, `offload` or `remat`.

    - `name`: MaxText's name of the tensor.
    - `values`: names of that value in other models.

    The policy's own lists decide first, `keep` before `offload`. Otherwise a layer's input stays on the `device`, and
    so do results of matmuls under the base `dots`; all else is `remat`.
    """
    for names, place in ((policy.keep, "device"), (policy.offload, "offload")):
        if any(_means(own, value) for own in names for value in values):
            return place
    if name == "decoder_layer_input" or (policy.base == "dots" and name in _DOTS):
        return "device"
    return "remat"
