"""Layers that repeat, as one call: a scan over them, or a pipeline of stages where a recipe says so.

`pipelined` says for what is traced inside of it in how many stages, microbatches and turns every `stack` is computed.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from autoshard.errors import UserError, reason_of
from autoshard.program import model_flops
from autoshard.program.jax.stage_pipeline import run_pipeline
from autoshard.program.program_record import Program


GPIPE = "gpipe"
CIRCULAR = "circular"


@dataclasses.dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages that a stack of layers is cut into, and how a batch goes through them."""

    stages: int
    microbatches: int
    """Parts of the batch, which follow one another through the stages."""
    schedule: str = GPIPE
    """`gpipe`: once through the stages, each of which holds layers that follow one another; `circular:R`: R times
    round, each stage with R chunks of layers; `circular`: as often as there are layers for, one in each chunk."""

    def rounds(self, layers: int) -> int:
        """How often a microbatch goes round the stages."""
        if self.schedule == GPIPE:
            return 1
        _, _, rounds = self.schedule.partition(":")
        return int(rounds) if rounds else layers // self.stages

    def outside(self, layers: int) -> int:
        """The first layers, which stand before the stages, as the others are those that divide into their chunks."""
        return layers % (self.stages * max(1, self.rounds(layers)))

    def ticks(self, layers: int) -> int:
        """Times that all stages compute a chunk of their layers, of which each needs only some."""
        return self.microbatches * self.rounds(layers) + self.stages - 1

    def bubble(self, layers: int) -> float:
        """Share of the ticks in which a stage computes what nobody uses."""
        return (self.stages - 1) / self.ticks(layers)

    def words(self, layers: int) -> str:
        """As a report says it."""
        share, outside = self.bubble(layers), self.outside(layers)
        before = f", {outside} of {layers} layers before them" if outside else ""
        return (
            f"{self.stages} stages, {self.schedule}, {self.microbatches} microbatches, "
            f"{share:.1%} of the ticks bubble{before}"
        )


@dataclasses.dataclass(slots=True)
class _Asked:
    """A pipeline for every stack, or none, and the layers of those that were found."""

    pipeline: Pipeline | None
    layers: list[int]


_asked: contextvars.ContextVar[_Asked | None] = contextvars.ContextVar("pipeline", default=None)


@functools.cache
def _jax_context() -> Any:
    """What JAX keeps traced functions apart by: a jitted part of a program is traced anew for each pipeline."""
    import jax

    return jax.make_user_context(None)


@contextlib.contextmanager
def _asking(asked: _Asked | None) -> Iterator[None]:
    token = _asked.set(asked)
    try:
        with contextlib.nullcontext() if asked is None or asked.pipeline is None else _jax_context()(asked.pipeline):
            yield
    finally:
        _asked.reset(token)


def check_schedule(schedule: str) -> str:
    """The schedule as it is always written. Raises `UserError` for one that there is not."""
    name, colon, rounds = schedule.partition(":")
    if (
        schedule == GPIPE
        or name == CIRCULAR
        and (not colon or rounds.isdecimal() and len(rounds) < 10 and int(rounds) > 1)
    ):
        return f"{name}:{int(rounds)}" if rounds else name
    raise UserError(
        f"schedule `{schedule}` is not known; use gpipe, circular, or circular:2 for two chunks of layers in a stage."
    )


def read_pipeline(stages: int | None, microbatches: int | None, schedule: str | None) -> Pipeline | None:
    """The pipeline that options say; None for none. As many microbatches as stages if nothing is said of them.

    Raises `UserError` for a schedule without stages, for one that is not known, and for numbers that cannot be.
    """
    if schedule is not None:
        check_schedule(schedule)
    if stages is None or stages == 1:
        if schedule is not None and stages is None:
            raise UserError(f"--schedule {schedule} is for stages; add --stages 2 or more, or leave it out.")
        return None
    if stages < 1:
        raise UserError(f"{stages} stages cannot be; 1 is no pipeline.")
    pipeline = Pipeline(stages, stages if microbatches is None else microbatches, check_schedule(schedule or GPIPE))
    _check_groups(pipeline)
    return pipeline


def _check_groups(pipeline: Pipeline) -> None:
    """Raises `UserError` if the schedule needs other numbers of microbatches."""
    stages, count = pipeline.stages, pipeline.microbatches
    if pipeline.schedule != GPIPE and count % stages:
        raise UserError(
            f"schedule `{pipeline.schedule}` sends microbatches round in groups of as many as there are stages, so "
            f"{stages} stages need {stages} microbatches or a multiple of it, not {count}; use gpipe, or "
            f"{stages * max(1, round(count / stages))} microbatches."
        )


def check_pipeline(pipeline: Pipeline, layers: int, what: str) -> None:
    """Raises `UserError` if `layers` of `what` are too few to be cut so."""
    stages, rounds = pipeline.stages, pipeline.rounds(layers)
    if stages > layers:
        usable = f"use {layers} or fewer, or none" if layers > 1 else "leave --stages out"
        raise UserError(f"{stages} stages are more than the {layers} layers of {what}; {usable}.")
    if pipeline.schedule == GPIPE or rounds > 1 and stages * rounds <= layers:
        return
    most = layers // stages
    instead = f"circular:{most}, or gpipe" if most > 1 else "gpipe"
    raise UserError(
        f"schedule `{pipeline.schedule}` cannot be: {stages} stages with {max(2, rounds)} chunks each are more than "
        f"the {layers} layers of {what}; use {instead}."
    )


def check_batch(pipeline: Pipeline, batch: int, what: str) -> None:
    """Raises `UserError` if the batch of `what` does not divide into the microbatches."""
    count = pipeline.microbatches
    if count < 1:
        raise UserError(f"{count} microbatches cannot be; 1 is the whole batch at once.")
    if batch % count:
        raise UserError(f"{count} microbatches do not divide the batch: {what} has {batch} examples.")


@contextlib.contextmanager
def pipelined(pipeline: Pipeline | None) -> Iterator[list[int]]:
    """While inside, every `stack` is computed by the pipeline, if there is one; gives the layers of each stack."""
    asked = _Asked(pipeline, [])
    with _asking(asked):
        yield asked.layers


def in_stages(program: Program, stacks: tuple[int, ...], pipeline: Pipeline | None) -> Program:
    """The program with what is known of its stacks of layers; a note says how a pipeline computes the largest."""
    if not stacks:
        return program
    if pipeline is None:
        return dataclasses.replace(program, stacks=stacks)
    told = f"The layers are a pipeline: {pipeline.words(max(stacks))}."
    said = dataclasses.asdict(pipeline) | {"rounds": pipeline.rounds(max(stacks)), "layers": max(stacks)}
    return dataclasses.replace(program, stacks=stacks, pipeline=said, notes=(*program.notes, told))


def as_asked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that computes its stacks, whenever it is traced, as is asked where this is called."""
    asked = _asked.get()
    if asked is None or asked.pipeline is None:
        return fn

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        with _asking(asked):
            return fn(*args)

    return run


def stack(
    layer: Callable[[Any, Any], Any],
    stacked: Any,
    x: Any,
    *,
    stages: int | None = None,
    microbatches: int | None = None,
    schedule: str | None = None,
) -> Any:
    """`x` after all layers of a stack, one after the other: what is otherwise written as `jax.lax.scan` over them.

    ::

        hidden = autoshard.stack(layer, params["layers"], hidden)  # layer(hidden, one) gives hidden

    `stacked` is a pytree of arrays [layers, ...], one entry for each layer; `x`, an array or a pytree of them, is what
    `layer(x, weights)` takes and gives, with the same shapes and dtypes. This is that scan, unless stages are asked
    for: by `autoshard plan --stages N --microbatches M --schedule S`, or here. The layers are then cut into `stages` of
    equal size, whose parameters stand side by side in one dim, `x` into `microbatches` along its first dim, the batch
    (as many as stages if not said), and the result of a stage goes to the next one; results and gradients are those of
    the scan. Layers that are left over, the first ones, are computed before the stages. `schedule` is `gpipe` (once
    through all stages; the default), or `circular:R`, where every stage has R chunks of layers and microbatches go
    round R times (`circular`: with one layer in each chunk). Layers must treat examples apart: a mean over
    the batch inside of a layer would be one over a microbatch.

    Raises `UserError` for more stages than layers, if the microbatches do not divide the batch, if a circular schedule
    has no multiple of its stages in microbatches, and if a layer does not keep shapes or needs the whole batch.
    """
    import jax

    leaves = jax.tree.leaves(stacked)
    sizes = sorted({leaf.shape[0] if leaf.ndim else 0 for leaf in leaves})
    if len(sizes) != 1:
        found = f"their first dims are {', '.join(map(str, sizes))}" if sizes else "there are none"
        raise UserError(f"autoshard.stack takes parameters with one entry for each layer in front, but {found}.")
    asked = _asked.get()
    pipeline = read_pipeline(stages, microbatches, schedule) if stages is not None else asked and asked.pipeline
    if asked is not None:
        asked.layers.append(sizes[0])
    return run_stack(layer, stacked, x, pipeline, sizes[0], "this stack")


def run_stack(
    layer: Callable[[Any, Any], Any], stacked: Any, x: Any, pipeline: Pipeline | None, layers: int, what: str
) -> Any:
    """`x` after `layers` layers, of `what`; by the pipeline if there is one. FLOPs of all are counted."""
    import jax

    if pipeline is None:
        with model_flops.counting() as scope:
            result, _ = jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, stacked)
        model_flops.record_count(scope, layers)
        return result
    check_pipeline(pipeline, layers, what)
    for leaf in jax.tree.leaves(x):
        check_batch(pipeline, leaf.shape[0] if leaf.ndim else 0, what)
    outside = pipeline.outside(layers)
    if outside:
        # Of a split, other than of two slices, the gradient is the gradients one after the other.
        leaves, tree = jax.tree.flatten(stacked)
        parts = [jax.lax.split(leaf, (outside, layers - outside)) for leaf in leaves]
        first, stacked = (tree.unflatten([part[k] for part in parts]) for k in (0, 1))
        x = run_stack(layer, first, x, None, outside, what)
        layers -= outside
    count = pipeline.microbatches
    part = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0] // count, *leaf.shape[1:]), leaf.dtype), x)
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stacked)
    with model_flops.counting() as scope:
        _check_layer(layer, part, one, what)
    with model_flops.counting():  # stages compute more than is used
        result = run_pipeline(layer, stacked, x, pipeline.stages, count, pipeline.rounds(layers))
    model_flops.record_count(scope, layers * count)
    return result


def _check_layer(layer: Callable[[Any, Any], Any], part: Any, one: Any, what: str) -> None:
    """Raises `UserError` if a layer does not give what it takes of a microbatch."""
    import jax

    batch = jax.tree.leaves(part)[0].shape[0]
    try:
        out = jax.eval_shape(layer, part, one)
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        raise UserError(
            f"a layer of {what} cannot be computed on a microbatch of {batch} examples "
            f"({reason_of(error) or type(error).__name__}); hand it what belongs to the batch as part "
            "of `x`, not from outside of it."
        ) from error
    given, got = ([(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)] for tree in (part, out))
    if given != got or jax.tree.structure(part) != jax.tree.structure(out):
        raise UserError(
            f"a layer of {what} gives {_shapes(out)} for a microbatch of {_shapes(part)}; a layer of a pipeline gives "
            "what it takes, and what belongs to the batch is part of `x`."
        )


def _shapes(tree: Any) -> str:
    import jax

    leaves = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(tree)]
    return ", ".join(leaves) or "nothing"
