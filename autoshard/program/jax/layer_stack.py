"""Repeated layers as one call: a scan over them, or a pipeline of stages if a recipe requests one.

`pipelined` sets the stages, microbatches and rounds of every `stack` that is traced inside it.
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
"""The schedule with one chunk of layers a stage."""
CIRCULAR = "circular"
"""Name of the schedules with several chunks a stage, which may be followed by their number."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages of a stack of layers, and the schedule of a batch through them."""

    stages: int
    """Number of parts of the layers, each on devices of its own."""
    microbatches: int
    """Number of parts of the batch that pass through the stages in sequence."""
    schedule: str = GPIPE
    """`gpipe`, `circular:R` or `circular`.

    With `gpipe` a microbatch passes the stages once, and each stage has consecutive layers. With `circular:R` it goes
    round R times, and each stage has R chunks of layers. With `circular` each chunk has one layer.
    """

    def rounds(self, layers: int) -> int:
        """Return how many times a microbatch goes round the stages: 1, R, or for `circular` whole layers a stage.

        The latter is 0 if there are fewer layers than stages.
        """
        if self.schedule == GPIPE:
            return 1
        _, _, rounds = self.schedule.partition(":")
        return int(rounds) if rounds else layers // self.stages

    def outside(self, layers: int) -> int:
        """Return the number of first layers that run before the stages; the others divide evenly into chunks."""
        return layers % (self.stages * max(1, self.rounds(layers)))

    def ticks(self, layers: int) -> int:
        """Return the number of ticks, at each of which all stages compute a chunk; some of the results are unused.

        There is a tick for each microbatch and round, and `stages - 1` more.
        """
        return self.microbatches * self.rounds(layers) + self.stages - 1

    def bubble(self, layers: int) -> float:
        """Return the share, from 0 to 1, of the ticks in which a stage computes values that are not used."""
        return (self.stages - 1) / self.ticks(layers)

    def words(self, layers: int) -> str:
        """Describe the pipeline for a report."""
        share, outside = self.bubble(layers), self.outside(layers)
        before = f", {outside} of {layers} layers before them" if outside else ""
        return (
            f"{self.stages} stages, {self.schedule}, {self.microbatches} microbatches, "
            f"{share:.1%} of the ticks bubble{before}"
        )


@dataclasses.dataclass(slots=True)
class _ActivePipeline:
    """A pipeline for every stack, or none, and the numbers of layers of the stacks traced so far."""

    pipeline: Pipeline | None
    layers: list[int]
    """Receives the number of layers of each stack."""


_asked: contextvars.ContextVar[_ActivePipeline | None] = contextvars.ContextVar("pipeline", default=None)


@functools.cache
def _jax_context() -> Any:
    """Return a context that is part of JAX's tracing cache key, so that jitted parts are retraced for each pipeline."""
    import jax

    return jax.make_user_context(None)


@contextlib.contextmanager
def _activate(asked: _ActivePipeline | None) -> Iterator[None]:
    """Set the pipeline of stacks while inside, for traces and for JAX's cache of traces."""
    token = _asked.set(asked)
    try:
        with contextlib.nullcontext() if asked is None or asked.pipeline is None else _jax_context()(asked.pipeline):
            yield
    finally:
        _asked.reset(token)


def check_schedule(schedule: str) -> str:
    """Return the schedule in its canonical spelling, without leading zeros: `gpipe`, `circular` or `circular:R`.

    Raises `UserError` for an unknown one, and for R below 2.
    """
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
    """Return the pipeline given by options; None if `stages` is None or 1, which ignores `microbatches`.

    By default there are as many microbatches as stages, and the schedule is `gpipe`. Raises `UserError` for a schedule
    with `stages` None, for an unknown schedule, and for numbers of stages or microbatches that cannot be.
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
    """Raise `UserError` if a circular schedule's microbatches are no multiple of its stages."""
    stages, count = pipeline.stages, pipeline.microbatches
    if pipeline.schedule != GPIPE and count % stages:
        raise UserError(
            f"schedule `{pipeline.schedule}` sends microbatches round in groups of as many as there are stages, so "
            f"{stages} stages need {stages} microbatches or a multiple of it, not {count}; use gpipe, or "
            f"{stages * max(1, round(count / stages))} microbatches."
        )


def check_pipeline(pipeline: Pipeline, layers: int, what: str) -> None:
    """Raise `UserError` if `what`, a name, has too few `layers`: one a stage, or with a circular schedule one a chunk.

    A circular schedule needs at least two chunks a stage.
    """
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
    """Raise `UserError` if the `batch` examples of `what`, a name, do not divide into at least one microbatch."""
    count = pipeline.microbatches
    if count < 1:
        raise UserError(f"{count} microbatches cannot be; 1 is the whole batch at once.")
    if batch % count:
        raise UserError(f"{count} microbatches do not divide the batch: {what} has {batch} examples.")


@contextlib.contextmanager
def pipelined(pipeline: Pipeline | None) -> Iterator[list[int]]:
    """Compute every `stack` by the pipeline while inside, by scans if it is None.

    Yield the list of the stacks' layer counts, which grows as stacks are traced.
    """
    active = _ActivePipeline(pipeline, [])
    with _activate(active):
        yield active.layers


def in_stages(program: Program, stacks: tuple[int, ...], pipeline: Pipeline | None) -> Program:
    """Return the program with the layer counts of its stacks, and with the pipeline, which a note describes.

    Rounds and note are those of the largest stack. Without a pipeline only the counts are added; without stacks the
    program is unchanged.
    """
    if not stacks:
        return program
    if pipeline is None:
        return dataclasses.replace(program, stacks=stacks)
    note = f"The layers are a pipeline: {pipeline.words(max(stacks))}."
    fields = dataclasses.asdict(pipeline) | {"rounds": pipeline.rounds(max(stacks)), "layers": max(stacks)}
    return dataclasses.replace(program, stacks=stacks, pipeline=fields, notes=(*program.notes, note))


def with_active_pipeline(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` bound to the pipeline active now, no matter when it is traced; unchanged if none is active."""
    active = _asked.get()
    if active is None or active.pipeline is None:
        return fn

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        with _activate(active):
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
    """Return `x` after all layers of a stack in sequence, otherwise written as `jax.lax.scan` over them.

    ::

        hidden = autoshard.stack(layer, params["layers"], hidden)  # layer(hidden, one) gives hidden

    The call is that scan unless stages are requested, here or by the options of `autoshard plan` (`--stages`,
    `--microbatches`, `--schedule`). The layers are then cut into `stages` of equal size, whose parameters lie along one
    dim. `x` is cut into `microbatches` along its first dim, the batch. The result of each stage goes to the next one.
    Results and gradients are those of the scan. Left-over layers, the first ones, run before the stages. Layers must
    not mix examples: a mean over the batch inside a layer would be one over a microbatch.

    - `layer`: function of `x` and one layer's parameters that returns `x` with the same shapes and dtypes.
    - `stacked`: pytree of arrays [layers, ...], one entry for each layer.
    - `x`: an array or a pytree of arrays.
    - `stages`: number of stages; None for those that the caller's context requests. 1 is the scan.
    - `microbatches`: number of microbatches; None for as many as stages. The scan of one stage ignores it.
    - `schedule`: `gpipe` (once through all stages; the default), `circular:R` or `circular`. With `circular:R` each
      stage has R chunks of layers, and microbatches go round R times. With `circular` each chunk has one layer.

    Raises `UserError` for microbatches or a schedule without `stages`, for more stages than layers, and if the
    microbatches do not divide the batch. A circular schedule raises it unless the microbatches are a multiple of its
    stages. A layer raises it if it changes shapes or needs the whole batch.
    """
    import jax

    leaves = jax.tree.leaves(stacked)
    sizes = sorted({leaf.shape[0] if leaf.ndim else 0 for leaf in leaves})
    if len(sizes) != 1:
        problem = f"their first dims are {', '.join(map(str, sizes))}" if sizes else "there are none"
        raise UserError(f"autoshard.stack takes parameters with one entry for each layer in front, but {problem}.")
    given = [name for name, value in (("microbatches", microbatches), ("schedule", schedule)) if value is not None]
    if stages is None and given:
        raise UserError(
            f"autoshard.stack takes {' and '.join(given)} only with stages; add stages=2 or more, or leave "
            f"{'both' if len(given) > 1 else 'it'} out."
        )
    active = _asked.get()
    pipeline = None if active is None else active.pipeline
    if stages is not None:
        pipeline = read_pipeline(stages, microbatches, schedule)
    if active is not None:
        active.layers.append(sizes[0])
    return run_stack(layer, stacked, x, pipeline, sizes[0], "this stack")


def run_stack(
    layer: Callable[[Any, Any], Any], stacked: Any, x: Any, pipeline: Pipeline | None, layers: int, what: str
) -> Any:
    """Return `x` after the layers, by the pipeline if there is one, else by a scan; record the FLOPs of all layers.

    The first `pipeline.outside(layers)` layers run as a scan. Computations of the bubble do not count as FLOPs. Raises
    `UserError` if layers or batch do not fit the pipeline.

    - `layer`: function of `x` and one layer's parameters.
    - `stacked`: pytree of arrays [layers, ...].
    - `layers`: number of layers.
    - `what`: name of the model in errors.
    """
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
        # The gradient of a split is a concatenation of gradients, unlike that of two slices.
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
    with model_flops.counting():  # stages also compute the bubble, which does not count
        result = run_pipeline(layer, stacked, x, pipeline.stages, count, pipeline.rounds(layers))
    model_flops.record_count(scope, layers * count)
    return result


def _check_layer(layer: Callable[[Any, Any], Any], part: Any, one: Any, what: str) -> None:
    """Raise `UserError` if a layer's result for a microbatch differs from its input in structure, shape or dtype.

    An error of the layer's trace, `TypeError` or `ValueError`, raises it too. `part` are the shapes of a microbatch,
    `one` those of a layer's parameters.
    """
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
    """Return dtypes and shapes of a tree's leaves in words; `nothing` without leaves."""
    import jax

    leaves = [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(tree)]
    return ", ".join(leaves) or "nothing"
