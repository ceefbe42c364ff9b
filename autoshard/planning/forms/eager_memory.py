"""Memory of an eager step under FSDP2, from the figures of the same step compiled by XLA, and comparisons of steps."""

import collections
import math
import re
from typing import Any

from autoshard.base.providers import provider
from autoshard.base.units import dtype_bits, format_bytes
from autoshard.planning.record.plan_parts import Prediction
from autoshard.planning.record.plan_record import Plan
from autoshard.planning.record.spec import is_stacked


_LOSS_BYTES = 3 * 4
"""Bytes for each logit in the backward pass of a cross-entropy in float32, without the logits themselves.

`log_softmax` keeps its result, `nll_loss` makes its gradient, and `log_softmax` the gradient of the logits.
transformers and torchtitan both widen logits before the loss. Loops that keep the model's outputs keep the logits too.
"""


EAGER_SHARE = 0.9
"""Share of a device's memory that tensors of eager torch may fill (assumed).

Blocks that its allocator keeps and NCCL's buffers have the rest.
"""


def chosen_options(plan: Plan) -> dict[str, Any]:
    """Return the options of the plan's source, with the choices of its recipe; empty without both."""
    options = {} if plan.source is None else dict(plan.source.options)
    return options | ({} if plan.recipe is None else dict(plan.recipe.chosen))


def eager_peak(plan: Plan, prediction: Prediction) -> int | None:
    """Return the bytes of one device that an eager training step under FSDP2 needs at its peak.

    None for a program that trains no configuration with labels, since its loss and dtype of compute are not known.

    - Embedding, head and final norm are FSDP's root unit. It stays gathered until the backward pass ends, and from the
      loss on the head's gradient is whole too. XLA gathers each of them for its matmul alone.
    - A block is gathered while the one before it computes.
    - The loss keeps logits in float32 (`_LOSS_BYTES`), most of which XLA fuses. Logits of a split head are gathered,
      since DTensor and styles compute the loss of all of them on every device.
    - When the backward pass ends, the root unit has gradients and their copy for the sum. All others are in parts.
    - Before, a table that is the head too has its gradient as head, that as table, and their sum.
    - AdamW over lists of tensors makes one more array of all parameters, as large as the gradients.

    Evidence: docs/export.md, "fsdp2".

    - `prediction`: figures of the step as XLA compiles it, with kinds of memory at its peak.
    """
    source, labels = plan.source, plan.shapes.get("batch.labels")
    if source is None or not source.is_configuration or not labels or "optimizer_state" not in plan.roles.values():
        return None
    options = chosen_options(plan)
    itemsize = dtype_bits(str(options.get("dtype") or "bfloat16")) // 8
    root, trained = 0, 0
    tables: list[tuple[int, int]] = []
    blocks: dict[str, int] = collections.Counter()
    for name, role in plan.roles.items():
        if role not in ("parameter", "frozen"):
            continue
        shape, dims = plan.shapes[name], plan.arguments[name].dims
        kept_apart = [math.prod(plan.mesh[a] for a in axes if a not in plan.batch_axes) for axes in dims]
        size = math.prod(shape) * itemsize // math.prod(kept_apart)
        block = re.match(r".*?\.(?:\*|\[[^.]*\]|\d+)(?=\.)", name)
        if block is not None:
            blocks[block[0]] += size // (shape[0] if is_stacked(name) else 1)
        else:
            root, trained = root + size, trained + size * (role == "parameter")
            tables += [(shape[0], size)] if len(shape) == 2 else []
    block_bytes = max(blocks.values(), default=0)
    vocabulary, table = max(tables, default=(0, 0))
    tied = [rows for rows, _ in tables].count(vocabulary) == 1
    kinds = prediction.memory
    stored = kinds.get("parameters", 0)
    kept = stored + sum(kinds.get(kind, 0) for kind in ("frozen_parameters", "optimizer_state", "batch"))
    parts = int(options.get("microbatches") or 1) * math.prod(plan.mesh[axis] for axis in plan.batch_axes)
    logits = math.ceil(math.prod(labels) * vocabulary / parts)
    at_loss = root + block_bytes + kinds.get("activations", 0) + logits * (_LOSS_BYTES + itemsize)
    in_layers = kinds.get("activations", 0) + root + trained + 2 * block_bytes
    splitting = {axis for name in plan.arguments if plan.is_weight(name) for axis in plan.arguments[name].axes}
    sharing = math.prod(plan.mesh[axis] for axis in set(plan.batch_axes) & splitting or plan.batch_axes)
    at_end = stored + max(2 * trained + trained // sharing, (root + 3 * table) * tied)
    # Eager torch fuses less than XLA, so that no op there needs less.
    return max(kept + max(at_loss, in_layers, at_end, 2 * stored), prediction.peak_bytes)


def needed_by_eager_torch(plan: Plan, limit: int) -> str:
    """Return the bytes in words that eager torch needs for a plan, if they exceed its share of `limit`; else empty.

    Empty, too, for a plan that does not fit as XLA compiles it.
    """
    eager = eager_peak(plan, plan.prediction)
    if eager is None or eager <= EAGER_SHARE * limit or plan.prediction.peak_bytes > limit:
        return ""
    return format_bytes(eager)


def eager_seconds(plan: Plan) -> float | None:
    """Return the seconds of a plan's step in eager torch; None for forms and programs without such a price."""
    return provider("eager_price")(plan)


def eager_excess(plan: Plan, other: Plan) -> float | None:
    """Return the share by which a plan's step in eager torch is longer than another plan's, negative if it is shorter.

    It is infinite if only this plan exceeds the memory that eager torch has, and None if a time is not known.
    """
    fits, other_fits = (not needed_by_eager_torch(each, each.memory_limit_bytes) for each in (plan, other))
    seconds, other_s = eager_seconds(plan), eager_seconds(other)
    if seconds is None or other_s is None:
        return None
    if fits != other_fits:
        return -math.inf if fits else math.inf
    return seconds / other_s - 1


def refused_by_eager_torch(recipe: str, form: str | None, needed: str, limit: int) -> str:
    """Return the sentence that refuses a recipe for a form, of which eager torch needs more than its share."""
    return (
        f"no recipe fits that the {form} form holds: eager torch needs {needed} of one device for {recipe}, more than "
        f"{EAGER_SHARE:.0%} of {format_bytes(limit)}. It keeps logits in float32, and embedding and head gathered. Use "
        "a smaller --batch or more devices, or plan without --for."
    )
