"""What a plan's layers keep, compute again and send to the host, in MaxText's configuration."""

from autoshard.errors import UserError
from autoshard.plan import Plan, planned_remat
from autoshard.program import Policy
from autoshard.report._names import clean


MAXTEXT: dict[str, tuple[str, ...]] = {
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
"""MaxText's name of a tensor that its custom policy places, and the values of other models that stand for it."""

_DOTS = tuple(name for name in MAXTEXT if name not in ("decoder_layer_input", "context"))
"""Results of matmuls with a weight."""


def maxtext_remat(plan: Plan) -> tuple[str, list[str]]:
    """Lines of the configuration, none if the plan does not say what is computed again; and what they cannot hold.

    MaxText places a tensor on the `device` or its host (`offload`), or computes it again (`remat`), in all layers.
    """
    try:
        found = planned_remat(plan)
    except UserError:  # a choice of the program's own, which means what it likes
        found = None
    if found is None:
        return "", []
    policy, lacks = found.of(0), []
    if len(found.parts) > 1:
        lacks.append(f"what only the first layers do ({clean(str(found))}); here all do as the first one.")
    if not policy.names and policy.base != "dots":
        return f"remat_policy: {policy.base}\n", lacks
    places = {name: _place(policy, name, values) for name, values in MAXTEXT.items()}
    known = {value for values in MAXTEXT.values() for value in values}
    strange = [name for name in policy.names if not any(_means(name, value) for value in known)]
    if strange:
        lacks.append(f"where {', '.join(clean(name) for name in strange)} wait; MaxText has no such tensor.")
    return "remat_policy: custom\n" + "".join(f"{name}: {place}\n" for name, place in places.items()), lacks


def _means(name: str, value: str) -> bool:
    """Whether a name in a policy is that of a value, or its end, or longer than it."""
    return name == value or name.endswith(f".{value}") or value.endswith(f".{name}")


def _place(policy: Policy, name: str, values: tuple[str, ...]) -> str:
    for names, place in ((policy.keep, "device"), (policy.offload, "offload")):
        if any(_means(own, value) for own in names for value in values):
            return place
    if name == "decoder_layer_input" or (policy.base == "dots" and name in _DOTS):
        return "device"
    return "remat"
