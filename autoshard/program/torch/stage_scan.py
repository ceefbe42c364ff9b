"""Running the repeated layers of a torch module as the stages of a pipeline."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

from autoshard.errors import UserError, reason_of
from autoshard.program.jax.layer_stack import Pipeline, check_pipeline, run_stack
from autoshard.program.torch.repeated_layers import Block


Layer = Callable[[Any, Any, Sequence[Any]], Any]
"""Of hidden state, weights, and what else belongs to the batch: the next hidden state."""


def block_words(block: Block) -> str:
    """A block of layers as sentences name it."""
    if block.period > 1:
        return f"`{block.owner}` (in groups of {block.period})"
    return f"`{block.label(0).removesuffix('.*')}`"


def staged_blocks(
    blocks: Sequence[Block], pipeline: Pipeline, label: str, notes: list[str]
) -> dict[Block, tuple[Block, ...]]:
    """What becomes of each block: its layers in stages last, those that are left over, if they are several, before.

    The block with most layers is cut into stages, and all others that can be. `notes` gets the rest, which become what
    they were. Raises `UserError` if there is no block, with what `notes` says of that, or if the largest cannot be cut.
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
    """The first groups of a block, if they are a block too, and the rest."""
    rest = dataclasses.replace(block, start=block.start + count * block.period, repeats=block.repeats - count)
    return (dataclasses.replace(block, repeats=count), rest) if count > 1 else (rest,)


def _can_be(pipeline: Pipeline, block: Block) -> bool:
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
    beside: Sequence[Any],
    along: Collection[int],
    pipeline: Pipeline,
) -> Any:
    """The hidden state after a block, whose layers are given the tensors `beside` each time.

    Those that are numbered in `along` belong to the batch, and go along with its parts.
    """

    def run(state: Any, weights: Any) -> Any:
        now, *moving = state
        given = list(beside)
        for k, value in zip(along, moving, strict=True):
            given[k] = value
        return (layer(now, weights, given), *moving)

    state = (hidden, *(beside[k] for k in along))
    try:
        return run_stack(run, stacked, state, pipeline, block.repeats, block_words(block))[0]
    except NotImplementedError as error:
        raise UserError(
            f"layers of {block_words(block)} cannot be computed side by side in {pipeline.stages} stages: "
            f"{reason_of(error) or 'they hold what JAX cannot map over'}."
        ) from error


Firsts = dict[Block, tuple[int, ...]]
"""First dims of a block's hidden state, and of all other tensors that its layers are given."""


def find_along(note: Callable[[Any], Firsts], batch: Any) -> dict[Block, tuple[int, ...]]:
    """Which of the tensors that layers are given belong to the batch: those that grow with it.

    `note` runs the module abstractly on a batch.
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
        block: tuple(k for k in found if then[block][1 + k] != first[block][1 + k]) for block, found in sizes.items()
    }
