"""Code for torch of a plan's recipe: the layers that recompute, the dtype of compute, and sentences on the rest."""

from autoshard.errors import UserError
from autoshard.planning import Plan, chosen_options, planned_remat
from autoshard.program import Remat
from autoshard.report.figures import largest_dtype


LAYER_LISTS = '''def layer_lists(model):
    """The lists of layers by name: each `ModuleList`, each `ModuleDict` of numbered keys, each `Sequential` of blocks
    that repeat."""

    def is_list(each):
        kinds = Counter(map(type, each.children()))
        blocks = any(True for child in each.children() for _ in child.children())
        repeats = isinstance(each, Sequential) and blocks and min(kinds.values()) > 1
        numbered = isinstance(each, ModuleDict) and len(each) > 0 and all(key[-1].isdigit() for key in each)
        return isinstance(each, ModuleList) or numbered or repeats

    return {name: each for name, each in model.named_modules() if is_list(each)}


'''
"""Code of a function that finds the layers which FSDP gathers one by one; the text has the names of `LIST_TYPES`."""
LIST_TYPES = ("ModuleDict", "ModuleList", "Sequential")
"""Classes of torch.nn that the code of `LAYER_LISTS` uses, besides `Counter`."""

RECOMPUTE = '''RECOMPUTED = {parts!r}
"""Layers that compute their values again in the backward pass: policy and number, 0 for all that remain."""


def recompute(model):
    """Checkpoint the layers of the outermost lists of blocks; `dots` saves the results of matmuls without a batch.

    The last one of a layer is not saved, unless the backward pass was seen to compute it again."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    matmuls, needed = {{}}, set()

    def contexts(kind):
        done, last = [0, 0], None if kind in needed else matmuls.get(kind)

        def saved(ctx, op, *args, **kwargs):
            if str(op) not in ("aten.mm.default", "aten.addmm.default"):
                return CheckpointPolicy.PREFER_RECOMPUTE
            done[ctx.is_recompute] += 1
            if not ctx.is_recompute:
                matmuls[kind] = max(matmuls.get(kind, 0), done[0])
            if done[ctx.is_recompute] != last:
                return CheckpointPolicy.MUST_SAVE
            if ctx.is_recompute:
                needed.add(kind)
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(saved)

    config = getattr(model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # a layer that runs again would fill its cache of keys again
    lists = layer_lists(model)
    outer = [each for name, each in lists.items() if not any(name.startswith(other + ".") for other in lists)]
    blocks = [block for each in outer for block in each.children()]
    policies = [policy for policy, count in RECOMPUTED for _ in range(count or len(blocks))]
    for block, policy in zip(blocks, policies):
        if policy != "none":
            options = {{"context_fn": functools.partial(contexts, type(block))}} if policy == "dots" else {{}}
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **options)


'''
"""Code of a function that checkpoints layers as the plan chose; the text has `functools` and `LAYER_LISTS`."""

_MIXED = """    # Parameters are stored in {stored}, and gathered and computed with in {compute}.
    options = {{"mp_policy": MixedPrecisionPolicy(param_dtype=torch.{compute})}} | options
"""


def recompute_code(plan: Plan) -> str:
    """Return the code of `recompute`; empty for a plan whose layers recompute nothing, or of which nothing is known."""
    parts = _parts(plan)
    return RECOMPUTE.format(parts=parts) if any(policy != "none" for policy, _ in parts) else ""


def mixed_code(plan: Plan) -> str:
    """Return the line of `shard` that makes FSDP compute in the plan's dtype; empty where that is the stored one."""
    compute, stored = dtypes(plan)
    return _MIXED.format(compute=compute, stored=stored) if compute and compute != stored else ""


def recipe_lacks(plan: Plan, *, recomputed: bool, mixed: bool) -> tuple[str, ...]:
    """Return a phrase for each decision of the recipe that the code leaves to the caller.

    - `recomputed`: True if layers recompute in the code.
    - `mixed`: True if the code computes in the plan's dtype.
    """
    lacks = []
    remat = planned_layers(plan)
    named = [] if remat is None else [name for name in remat.names if name != "input"]  # every checkpoint saves it
    if remat is not None and not recomputed and recompute_code(plan):
        lacks.append(
            f"recomputation, {remat}, which the figures count: `autoshard.torch_remat_policy(plan, layer)` makes the "
            "`context_fn` of `torch.utils.checkpoint.checkpoint`."
        )
    elif named:
        lacks.append(
            f"values that the plan saves by name ({', '.join(named)}): they are recomputed here, which the figures "
            "count; `autoshard.torch_remat_policy(plan, layer)` saves them."
        )
    if remat is not None and any("offload=" in policy for policy, _ in remat.parts):
        lacks.append("values of layers that wait in the hosts' memory: they stay on the devices.")
    compute, stored = dtypes(plan)
    if not mixed and compute and compute != stored:
        lacks.append(
            f"compute in {compute} with parameters in {stored}, which the figures count: autocast, or `bf16=True` of a "
            "Trainer."
        )
    microbatches = int(chosen_options(plan).get("microbatches") or 1)
    if microbatches > 1:
        lacks.append(
            f"{microbatches} microbatches, which the figures count: call `backward` on the loss of each part of the "
            f"batch divided by {microbatches}, then the optimizer."
        )
    if any("cudnn" in call.name for call in plan.calls):
        lacks.append(
            "attention by cuDNN: call the model under `sdpa_kernel(SDPBackend.CUDNN_ATTENTION)` of torch.nn.attention."
        )
    return tuple(lacks)


def planned_layers(plan: Plan) -> Remat | None:
    """Return the recomputation of the plan's layers; None where nothing is known of it."""
    try:
        return planned_remat(plan)
    except UserError:  # a choice of the program's own has no known meaning
        return None


def _parts(plan: Plan) -> tuple[tuple[str, int], ...]:
    """Return the policy without named values and the number of layers of each part of the plan's recomputation."""
    remat = planned_layers(plan)
    return () if remat is None else tuple((policy.split(",")[0], count) for policy, count in remat.parts)


def dtypes(plan: Plan) -> tuple[str, str]:
    """Return the dtypes of compute and of the largest parameter; ("", "") for a source whose dtype is not known.

    A module computes in its own dtypes, perhaps under an autocast of its own, unless the plan was asked for another.
    """
    asked = "" if plan.source is None else str(chosen_options(plan).get("dtype") or "")
    if plan.source is not None and plan.source.is_configuration:
        asked = asked or "bfloat16"
    return (asked, largest_dtype(plan, "parameter")) if asked else ("", "")
