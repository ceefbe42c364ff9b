"""What a plan's layers compute again, for programs that are not autoshard's own: as a policy of jax's."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard.errors import UserError
from autoshard.plan.record._plan import Plan
from autoshard.program import Policy, Remat, jax_policy, parse_remat


def planned_remat(plan: Plan) -> Remat | None:
    """What the layers of a plan's program compute again; None if the plan does not say, as of programs made in Python.

    Raises `UserError` for a choice of a program's own that is called so and is no policy.
    """
    source = plan.provenance.get("source") or {}
    chosen = (plan.provenance.get("recipe") or {}).get("chosen", {})
    text = chosen.get("remat", source.get("options", {}).get("remat"))
    return None if text is None else parse_remat(str(text))


def remat_policy(
    plan: Plan, *, names: Mapping[str, str | Sequence[str]] | None = None, layer: int | None = None
) -> Callable[..., Any] | None:
    """The policy for `jax.checkpoint(layer, policy=...)` with which a layer computes again what the plan chose.

    The layer marks its values by `jax.ad_checkpoint.checkpoint_name` with the names that the plan has for them
    (`q_proj`, `context`, `input`), or with those that `names` gives for them, one or several: `{"q_proj": "query"}`. Of
    a mixture such as `full:12+dots` it is the policy of one `layer`, counted from 0. None if nothing is computed again
    (`none`), where the layer is best left without `jax.checkpoint`.

    Raises `UserError` for a plan that says nothing of its layers, for a mixture without `layer`, and for `names` of
    values that the plan does not name.
    """
    found = planned_remat(plan)
    if found is None:
        raise UserError(
            f"the plan of {plan.program_name} does not say what its layers compute again: plan `hf:CONFIG`, a torch "
            "module or a program with a choice `remat`."
        )
    if layer is None and len(found.parts) > 1:
        raise UserError(
            f"the plan of {plan.program_name} has another policy for its first layers ({found}); ask for one by "
            "`layer=`."
        )
    policy: Policy = found.of(layer or 0)
    marks = {name: (own,) if isinstance(own, str) else tuple(own) for name, own in (names or {}).items()}
    unknown = next((name for name in marks if name not in policy.names), None)
    if unknown is not None and unknown not in found.names:
        values = ", ".join(found.names) or "none at all"
        raise UserError(f"`names` has `{unknown}`, but the plan's policy ({found}) names {values}.")
    return jax_policy(policy, marks)
