"""The repeated layers of a torch module as the stages of a pipeline."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

from autoshard.errors import UserError, reason_of
from autoshard.program.jax.layer_stack import Pipeline, check_pipeline, run_stack
from autoshard.program.torch.repeated_layers import Block


Layer = Callable[[Any, Any, Sequence[Any]], Any]
"""Function from a hidden state, weights and other tensors of the batch to the next hidden state."""


def block_words(block: Block) -> str:
    """Return the name of a block of layers for use in sentences, in backticks: `model.layers`.

    A part of a list keeps its slice. Groups of several layers add their length in brackets.
    """
    if block.period > 1:
        return f"`{block.owner}` (in groups of {block.period})"
    return f"`{block.label(0).removesuffix('.*')}`"


def staged_blocks(
    blocks: Sequence[Block], pipeline: Pipeline, label: str, notes: list[str]
) -> dict[Block, tuple[Block, ...]]:
    """Map each block that can be cut to its parts: the leftover layers, if they form a block, then the staged layers.

    Leftover layers are the first ones of a block, which do not divide evenly into the stages. The block with most
    layers is cut into stages, and every other block that can be. A block that stays whole is no key, and `notes`
    receives a sentence for it.

    - `label`: name of the module in errors.

    Raises `UserError` if there is no block (with the reasons in `notes`), or if the largest block has too few groups.
    """
    if not blocks:
        why = " ".join(note for note in notes if "not scanned" in note)
        raise UserError(
            f"`{label}` has no layers that repeat, so it cannot be cut into {pipeline.stages} stages; leave --stages "
            f"out. {why or 'Layers are looked for in lists of equal ones that are called one after the other.'}"
        )
    largest = max(blocks, key=lambda block: block.repeats * block.period)
    check_pipeline(pipeline, largest.repeats, block_words(largest))
    staged: dict[Block, tuple[Block, ...]] = {}
    for block in blocks:
        if block is largest or _can_be(pipeline, block):
            staged[block] = _without_first(block, pipeline.outside(block.repeats))
        else:
            notes.append(f"The {block.repeats * block.period} layers {block_words(block)} stay outside of the stages.")
    return staged


def _without_first(block: Block, count: int) -> tuple[Block, ...]:
    """Return the first `count` groups and the rest of a block as two blocks.

    With a `count` of 0 or 1 only the rest is returned: one group alone forms no block, and its layers run unscanned.
    """
    rest = dataclasses.replace(block, start=block.start + count * block.period, repeats=block.repeats - count)
    return (dataclasses.replace(block, repeats=count), rest) if count > 1 else (rest,)


def _can_be(pipeline: Pipeline, block: Block) -> bool:
    """Return True if a block has enough groups for the pipeline's stages and schedule."""
    try:
        check_pipeline(pipeline, block.repeats, block_words(block))
    except UserError:
        return False
    return True


def run_in_stages(
    block: Block,
    layer: Layer,
    stacked: Any,
    hidden: Any,
    shared_inputs: Sequence[Any],
    along: Collection[int],
    pipeline: Pipeline,
) -> Any:
    """Run a block as pipeline stages, and return the hidden state after it.

    Leftover groups run first, outside of the stages.

    - `layer`: one layer, or one group of layers.
    - `stacked`, `hidden`: stacked weights, and the hidden state before the block.
    - `shared_inputs`: other tensors that every layer is called with.
    - `along`: numbers of the tensors in `shared_inputs` that belong to the batch, and are cut into microbatches with
      it.

    Raises `UserError` if JAX cannot map over the layers' ops, or if the microbatches do not divide the batch.
    """

    def run(state: Any, weights: Any) -> Any:
        """Return the state after one layer; the tensors of the batch pass through unchanged."""
        now, *moving = state
        given = list(shared_inputs)
        for k, value in zip(along, moving, strict=True):
            given[k] = value
        return (layer(now, weights, given), *moving)

    state = (hidden, *(shared_inputs[k] for k in along))
    try:
        return run_stack(run, stacked, state, pipeline, block.repeats, block_words(block))[0]
    except NotImplementedError as error:
        raise UserError(
            f"layers of {block_words(block)} cannot be computed side by side in {pipeline.stages} stages: "
            f"{reason_of(error) or 'they hold what JAX cannot map over'}."
        ) from error


Firsts = dict[Block, tuple[int, ...]]
"""First dims of each block's hidden state, followed by those of the other tensors that its layers are called with."""


def find_along(note: Callable[[Any], Firsts], batch: Any) -> dict[Block, tuple[int, ...]]:
    """Return, for each block, the numbers of the layers' other inputs that belong to the batch.

    An input belongs to the batch if its first dim equals that of the hidden state and exceeds 1. It must also change
    when every first dim of `batch` is doubled. If no input has such a first dim, the result is an empty dict, without a
    second run.

    - `note`: function that runs the module abstractly on a batch of shapes, and returns the first dims.
    """
    import jax

    first = note(batch)
    sizes = {block: [k for k, n in enumerate(dims[1:]) if n == dims[0] > 1] for block, dims in first.items()}
    if not any(sizes.values()):
        return {}
    twice = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((2 * leaf.shape[0], *leaf.shape[1:]) if leaf.shape else (), leaf.dtype), batch
    )
    then = note(twice)
    return {
        block: tuple(k for k in numbers if then[block][1 + k] != first[block][1 + k])
        for block, numbers in sizes.items()
    }
