"""A plan's recomputation as a policy of jax or torch, for programs whose layers autoshard does not own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard.errors import UserError
from autoshard.planning.record.plan_record import Plan
from autoshard.program import Policy, Remat, jax_policy, parse_remat, torch_contexts


def planned_remat(plan: Plan) -> Remat | None:
    """Return the recomputation of the layers in a plan: the recipe's choice, else the option `remat` of the program's
    source.

    None if the plan has neither, as for programs made in Python. Raises `UserError` if the program's own choice `remat`
    is no policy.
    """
    options = plan.source.options if plan.source is not None else {}
    chosen = plan.recipe.chosen if plan.recipe is not None else {}
    text = chosen.get("remat", options.get("remat", "none" if options.get("train") else None))
    return None if text is None else parse_remat(str(text))


def remat_policy(
    plan: Plan, *, names: Mapping[str, str | Sequence[str]] | None = None, layer: int | None = None
) -> Callable[..., Any] | None:
    """Return the policy for `jax.checkpoint(layer, policy=...)` with which a layer recomputes as the plan chose.

    - `names`: the layer's names of values, one or several for each of the plan's: `{"q_proj": "query"}`.
    - `layer`: number of the layer, from 0. A mixture such as `full:12+dots` needs it.

    The layer marks its values by `jax.ad_checkpoint.checkpoint_name`. The names are the plan's (`q_proj`, `context`,
    `input`) unless `names` gives others. Return None if nothing is recomputed (`none`): the layer is best left without
    `jax.checkpoint`.

    Raises `UserError` for a plan without a policy of its layers, for a mixture without `layer`, and for unknown values
    in `names`.
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
    """Return the `context_fn` with which a torch layer recomputes as the plan chose.

    It is for `torch.utils.checkpoint.checkpoint(layer, ..., use_reentrant=False, context_fn=...)`.

    - `module`: the layer, or a module that contains the layers.
    - `names`: module names for the plan's values, one or several for each: `{"q_proj": "wq"}`.
    - `layer`: number of the layer, from 0. A mixture such as `full:12+dots` needs it.

    Values that the plan saves by name are the matmuls of the modules with that name (`q_proj`, `self_attn.q_proj`).
    `context` is the result of fused attention (`scaled_dot_product_attention`, not its written-out form). Every
    checkpoint saves `input`. `dots` saves matmuls without batch dims. Under `torch.compile` only policies of ops work
    (`full`, `dots`, `context`). Return None if nothing is recomputed (`none`): the layer is best left without a
    checkpoint.

    Raises `UserError` as `remat_policy` does, and for values that `module` does not compute or that are offloaded to
    the host.
    """
    policy, marks = _chosen(plan, names, layer)
    return torch_contexts(policy, module, marks)


def _chosen(
    plan: Plan, names: Mapping[str, str | Sequence[str]] | None, layer: int | None
) -> tuple[Policy, dict[str, tuple[str, ...]]]:
    """Return the policy of a layer, and the layer's own names for the plan's values as tuples.

    A `layer` of None is layer 0. Values of other layers' policies are allowed in `names`. Raises `UserError` as
    `remat_policy` does.
    """
    remat = planned_remat(plan)
    if remat is None:
        raise UserError(
            f"the plan of {plan.program_name} does not say what its layers compute again: plan `hf:CONFIG`, a torch "
            "module or a program with a choice `remat`."
        )
    if layer is None and len(remat.parts) > 1:
        raise UserError(
            f"the plan of {plan.program_name} has another policy for its first layers ({remat}); ask for one by "
            "`layer=`."
        )
    policy: Policy = remat.of(layer or 0)
    marks = {name: (own,) if isinstance(own, str) else tuple(own) for name, own in (names or {}).items()}
    unknown = next((name for name in marks if name not in policy.names), None)
    if unknown is not None and unknown not in remat.names:
        values = ", ".join(remat.names) or "none at all"
        raise UserError(f"`names` has `{unknown}`, but the plan's policy ({remat}) names {values}.")
    return policy, marks
