"""What a plan's layers compute again, for programs that are not autoshard's own: as a policy of jax's or torch's."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard.errors import UserError
from autoshard.planning.record.plan_record import Plan
from autoshard.program import Policy, Remat, jax_policy, parse_remat, torch_contexts


def planned_remat(plan: Plan) -> Remat | None:
    """What the layers of a plan's program compute again; None if the plan does not say, as of programs made in Python.

    Raises `UserError` for a choice of a program's own that is called so and is no policy.
    """
    options = plan.source.options if plan.source is not None else {}
    chosen = plan.recipe.chosen if plan.recipe is not None else {}
    text = chosen.get("remat", options.get("remat"))
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
    policy, marks = _chosen(plan, names, layer)
    return jax_policy(policy, marks)


def torch_remat_policy(
    plan: Plan,
    module: Any,
    *,
    names: Mapping[str, str | Sequence[str]] | None = None,
    layer: int | None = None,
) -> Callable[[], Any] | None:
    """The `context_fn` with which a layer in torch computes again what the plan chose.

    It is for `torch.utils.checkpoint.checkpoint(layer, ..., use_reentrant=False, context_fn=...)`. `module` is the
    layer, or whatever holds the layers. Values that the plan keeps by name are the matmuls of the modules that are
    called so (`q_proj`, `self_attn.q_proj`), or as `names` says, one or several: `{"q_proj": "wq"}`; `context` is what
    fused attention gives (`scaled_dot_product_attention`, not its written-out form), and `input` is kept by every
    checkpoint. `dots` keeps matmuls without batch dims. Of a mixture such as `full:12+dots` it is the policy of one
    `layer`, counted from 0. None if nothing is computed again (`none`), where the layer is best left without a
    checkpoint. Under `torch.compile` only policies of ops alone work (`full`, `dots`, `context`).

    Raises `UserError` as `remat_policy` does, and for values that `module` does not make or that go to the host.
    """
    policy, marks = _chosen(plan, names, layer)
    return torch_contexts(policy, module, marks)


def _chosen(
    plan: Plan, names: Mapping[str, str | Sequence[str]] | None, layer: int | None
) -> tuple[Policy, dict[str, tuple[str, ...]]]:
    """A layer's policy, and what `names` gives for the values that the plan names."""
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
    return policy, marks
