"""A stack of layers as a pipeline in one SPMD program: stages lie along one dim, and their results are rolled along it.

At every tick all stages compute at once, each on its own microbatch. A roll along the dim of the stages then passes the
results on. It is a collective-permute if stages are on different devices. Stage `s` at tick `t` computes what stage 0
began at tick `t - s`. The ticks before the first microbatch arrives, and after the last has passed, compute unused
values. They are the bubble, so the program itself spends the time. The unused values are microbatches too, never zeros,
so that no layer divides by an impossible value.

With several rounds a stage has as many chunks of layers. Groups of as many microbatches as there are stages go round.
The first of a group leaves the last stage just when stage 0 is free again, so nothing has to wait. The chunk that a
stage needs depends on the tick, so the parameters of a tick are copied out of the stage's parameters. The backward pass
copies them again, and is written by hand. `jax.grad` of the loop would save them for every tick, and would add
gradients of all chunks although only one has changed.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


def run_pipeline(
    layer: Callable[[Any, Any], Any], stacked: Any, x: Any, stages: int, microbatches: int, rounds: int
) -> Any:
    """Return `x` [B, ...] after all layers of `stacked` [L, ...], with rows in the order of `x`.

    A microbatch has every `microbatches`-th row.

    - `layer`: function of a microbatch and one layer's parameters.
    - `stages`: number of stages; `stages * rounds` must divide L.
    - `microbatches`: number of microbatches, which must divide B. With several rounds, `stages` must divide it.
    - `rounds`: times that each microbatch goes round the stages.
    """
    import jax

    def by_stage(leaf: Any) -> Any:
        own = leaf.shape[0] // (stages * rounds)
        return leaf.reshape(rounds, stages, own, *leaf.shape[1:]).swapaxes(1, 2)

    weights = jax.tree.map(by_stage, stacked)  # [rounds, layers of a chunk, stages, ...]
    # A microbatch has strided examples of the batch, so that a batch that is split over devices does not move.
    parts = jax.tree.map(
        lambda leaf: leaf.reshape(leaf.shape[0] // microbatches, microbatches, *leaf.shape[1:]).swapaxes(0, 1), x
    )
    if rounds == 1:
        out = _run_once(layer, jax.tree.map(lambda leaf: leaf[0], weights), parts, stages, microbatches)
    else:
        out = _run_rounds(layer, weights, parts, stages, microbatches, rounds)
    return jax.tree.map(lambda leaf, like: leaf.swapaxes(0, 1).reshape(like.shape), out, x)


def _run_once(layer: Callable[[Any, Any], Any], weights: Any, parts: Any, stages: int, count: int) -> Any:
    """Return microbatches [count, ...] after all stages, whose weights are [layers of a stage, stages, ...]."""
    import jax
    import jax.numpy as jnp

    # While the last microbatch drains, the first stage receives it again.
    feed = jax.tree.map(
        lambda leaf: jnp.concatenate([leaf, jnp.broadcast_to(leaf[-1:], (stages - 1, *leaf.shape[1:]))]), parts
    )
    feed = jax.tree.map(lambda leaf: _only(leaf, stages, 0), feed)

    def tick(state: Any, fed: Any) -> tuple[Any, Any]:
        state = jax.tree.map(lambda leaf, new: _where(0, new, jnp.roll(leaf, 1, axis=0)), state, fed)
        state = _chunk(layer, weights, state)
        return state, state

    _, states = jax.lax.scan(tick, _begin(parts, stages), feed)
    # One sum over the stages at the end: the results of each stay on its devices until then.
    return jax.tree.map(lambda leaf: _of_last(leaf[stages - 1 :]), states)


def _run_rounds(
    layer: Callable[[Any, Any], Any], weights: Any, parts: Any, stages: int, count: int, rounds: int
) -> Any:
    """Return microbatches [count, ...] after all rounds; weights are [rounds, layers of a chunk, stages, ...]."""
    import jax
    from jax import core

    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), parts)
    own = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[3:], leaf.dtype), weights)
    closed = jax.make_jaxpr(layer)(one, own)  # values that the layer closes over become arguments
    tree = jax.tree.structure(parts)

    def flat(outside: Sequence[Any], x: Sequence[Any], w: Sequence[Any]) -> list[Any]:
        return core.eval_jaxpr(closed.jaxpr, outside, *x, *w)

    # A part of the state that no layer changes has a gradient only if the caller differentiates with respect to it.
    changed = [new is not old for new, old in zip(closed.jaxpr.outvars, closed.jaxpr.invars, strict=False)]
    run = _Rounds(flat, stages, count, rounds, changed)
    done = _differentiable(run)(jax.tree.leaves(weights), list(closed.consts), jax.tree.leaves(parts))
    return tree.unflatten(done)


class _Rounds:
    """The loop over the ticks of several rounds, and its gradient; trees are lists of leaves here."""

    def __init__(
        self, layer: Callable[..., list[Any]], stages: int, count: int, rounds: int, changed: Sequence[bool]
    ) -> None:
        """Store the loop's sizes.

        - `layer`: function of outside values, the leaves of a microbatch and those of a layer's weights.
        - `stages`, `count`, `rounds`: numbers of stages, microbatches and rounds.
        - `changed`: for each leaf of the state, True if a layer changes it.
        """
        self.layer, self.stages, self.count, self.rounds = layer, stages, count, rounds
        self.changed = changed
        self.ticks = count * rounds + stages - 1

    def chunk_weights(self, weights: Sequence[Any], tick: Any) -> list[Any]:
        """Return the weights of each stage at a tick: [layers of a chunk, stages, ...]."""
        import jax
        import jax.numpy as jnp

        now, before, late = self._chunks(tick)

        def of(leaf: Any) -> Any:
            newer, older = (jax.lax.dynamic_index_in_dim(leaf, chunk, 0, keepdims=False) for chunk in (now, before))
            return jnp.where(_along(late, 1, newer.ndim), newer, older)

        return [of(leaf) for leaf in weights]

    def _chunks(self, tick: Any) -> tuple[Any, Any, Any]:
        """Return the chunk of the stages that the current group has reached, the others' chunk, and the mask [stages].

        The mask is True for the former. Their chunk is `tick // stages % rounds`; the others' is the one before.
        """
        import jax.numpy as jnp

        turn = tick // self.stages
        reached = jnp.arange(self.stages) <= tick % self.stages
        return turn % self.rounds, (turn - 1) % self.rounds, reached

    def _place(self, begun: Any) -> Any:
        """Return the number of the microbatch that stage 0 processes at the tick `begun`, in any of its rounds.

        For ticks before the first or after the last it is any valid number.
        """
        import jax.numpy as jnp

        group = jnp.clip(begun // (self.rounds * self.stages), 0, self.count // self.stages - 1)
        return group * self.stages + begun % self.stages

    def _enters(self, tick: Any) -> Any:
        """Return True at ticks at which stage 0 begins a new microbatch; also after the last one, for unused values."""
        return tick % (self.rounds * self.stages) < self.stages

    def _leaves(self, tick: Any) -> Any:
        """Return True at ticks at which the last stage completes a microbatch's last round."""
        begun = tick - (self.stages - 1)
        last = (begun // self.stages) % self.rounds == self.rounds - 1
        return (begun >= 0) & last

    def moving(self, *asked: Sequence[bool]) -> "_GradientMasks":
        """Return masks of leaves with gradients from those (`asked`) of weights, outside values and microbatches.

        Leaves of the state have one if their microbatches do or if a layer changes them.
        """
        weights, outside, parts = map(tuple, asked)
        state = tuple(own or new for own, new in zip(parts, self.changed, strict=True))
        return _GradientMasks(weights, outside, parts, state)

    def forward(self, weights: Any, outside: Any, parts: Any, moving: "_GradientMasks | None") -> tuple[list[Any], Any]:
        """Return the results by microbatch, and each tick's residuals for gradients with their structure.

        - `weights`: leaves of all stages' weights.
        - `outside`: values that the layer closes over.
        - `parts`: leaves of the microbatches.
        - `moving`: leaves with gradients; None for no gradients.
        """
        import jax
        import jax.numpy as jnp

        feed = [_only(leaf, self.stages, 0) for leaf in parts]
        known: dict[str, Any] = {}

        def step(carried: Any, tick: Any) -> tuple[Any, Any]:
            state, out = carried
            given = [_take(leaf, self._place(tick)) for leaf in feed]
            state = [
                _where(0, new, rolled, self._enters(tick))
                for new, rolled in zip(given, [jnp.roll(leaf, 1, axis=0) for leaf in state], strict=True)
            ]
            own = self.chunk_weights(weights, tick)
            if moving is not None:
                state, residuals = self._recorded(own, outside, state, moving, known)
            else:
                state, residuals = self._computed(own, outside, state), None
            # Earlier rounds write to their microbatches' positions too; the last round overwrites them.
            place = self._place(tick - (self.stages - 1))
            out = [jax.lax.dynamic_update_index_in_dim(o, s, place, 0) for o, s in zip(out, state, strict=True)]
            return (state, out), residuals

        out = [jnp.zeros_like(leaf) for leaf in feed]
        (_, out), residuals = jax.lax.scan(step, (_begin(parts, self.stages), out), jnp.arange(self.ticks))
        return [_of_last(leaf) for leaf in out], (residuals, known)

    def _computed(self, own: Any, outside: Any, state: Any) -> list[Any]:
        """Return the state [stages, ...] after each stage has run its chunk, whose weights are `own`."""
        return _chunk(lambda x, w: self.layer(outside, x, w), own, state)

    def _recorded(
        self, own: Any, outside: Any, state: Any, moving: "_GradientMasks", known: dict[str, Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return the state after a tick, and the residuals of its gradient without the weights, which are read again.

        - `own`: weights of the tick.
        - `outside`: values that the layer closes over.
        - `state`: values of all stages.
        - `moving`: leaves with gradients.
        - `known`: receives the tree of the residuals and the positions of weights in it.
        """
        import jax

        leaves = (own, outside, state)
        masks = list(map(_and_float, leaves, (moving.weights, moving.outside, moving.state)))
        floats, others = zip(*map(_split, leaves, masks), strict=True)

        def run(*given: Any) -> tuple[list[Any], list[Any]]:
            return _split(self._computed(*map(_merged, masks, given, others)), masks[2])

        after, back, rest = jax.vjp(run, *floats, has_aux=True)
        residuals, tree = jax.tree.flatten(back)
        ids = {id(leaf): number for number, leaf in enumerate(own)}
        known["tree"], known["own"] = tree, [ids.get(id(leaf)) for leaf in residuals]
        saved = [leaf for leaf, number in zip(residuals, known["own"], strict=True) if number is None]
        return _merged(masks[2], after, rest), saved

    def backward(
        self, weights: Any, outside: Any, parts: Any, kept: Any, above: Any, moving: "_GradientMasks"
    ) -> tuple[Any, Any, Any]:
        """Return the gradients of weights, outside values and microbatches, for the leaves that have gradients.

        `kept` are the residuals of `forward`; `above` are the gradients of the results, for the leaves of the state in
        `moving`.
        """
        import jax
        import jax.numpy as jnp

        ticks, known = kept
        above = [_only(leaf, self.stages, self.stages - 1) for leaf in above]

        def step(carried: Any, given: Any) -> tuple[Any, None]:
            state, of_weights, of_outside, of_parts = carried
            tick, saved = given
            place = self._place(tick - (self.stages - 1))
            state = [
                s + jnp.where(self._leaves(tick), _take(leaf, place), 0).astype(s.dtype)
                for s, leaf in zip(state, above, strict=True)
            ]
            saved, own = iter(saved), self.chunk_weights(weights, tick)
            leaves = [next(saved) if number is None else own[number] for number in known["own"]]
            of_own, more, state = known["tree"].unflatten(leaves)(state)
            enters = self._enters(tick)
            # Ticks of later rounds write too, before the tick at which the microbatch entered overwrites them.
            of_parts = [
                jax.lax.dynamic_update_index_in_dim(p, _where(0, s, jnp.zeros_like(s)), self._place(tick), 0)
                for p, s in zip(of_parts, state, strict=True)
            ]
            state = [jnp.roll(_where(0, jnp.zeros_like(s), s, enters), -1, axis=0) for s in state]
            of_weights = [self._added(total, new, tick) for total, new in zip(of_weights, of_own, strict=True)]
            return (state, of_weights, [a + b for a, b in zip(of_outside, more, strict=True)], of_parts), None

        of_state = _split(parts, _and_float(parts, moving.state))[0]
        begin = (
            [jnp.zeros((self.stages, *leaf.shape[1:]), leaf.dtype) for leaf in of_state],
            [jnp.zeros_like(leaf) for leaf in _split(weights, _and_float(weights, moving.weights))[0]],
            [jnp.zeros_like(leaf) for leaf in _split(outside, _and_float(outside, moving.outside))[0]],
            [jnp.zeros((leaf.shape[0], self.stages, *leaf.shape[1:]), leaf.dtype) for leaf in of_state],
        )
        (_, of_weights, of_outside, of_parts), _ = jax.lax.scan(
            step, begin, (jnp.arange(self.ticks), ticks), reverse=True
        )
        return of_weights, of_outside, [leaf.sum(1) for leaf in of_parts]

    def _added(self, total: Any, new: Any, tick: Any) -> Any:
        """Return `total`, the gradients of all chunks, plus those of one tick at the positions of the tick's chunks."""
        import jax
        import jax.numpy as jnp

        now, before, late = self._chunks(tick)
        mask = _along(late, 1, new.ndim)
        for chunk, part in ((now, jnp.where(mask, new, 0)), (before, jnp.where(mask, 0, new))):
            old = jax.lax.dynamic_index_in_dim(total, chunk, 0, keepdims=False)
            total = jax.lax.dynamic_update_index_in_dim(total, old + part.astype(total.dtype), chunk, 0)
        return total


@dataclasses.dataclass(frozen=True, slots=True)
class _GradientMasks:
    """Masks of the leaves for which gradients are computed if they are floats."""

    weights: tuple[bool, ...]
    outside: tuple[bool, ...]
    parts: tuple[bool, ...]
    """Leaves of the microbatches that have gradients."""
    state: tuple[bool, ...]
    """Leaves passed from stage to stage; they also have gradients if only layers make them depend on others that do."""


def _differentiable(run: _Rounds) -> Callable[[list[Any], list[Any], list[Any]], list[Any]]:
    """Return the loop as a function of leaves of weights, outside values and microbatches, with the gradient of `run`.

    Its gradient is None for leaves that need none.
    """
    import jax
    import jax.numpy as jnp

    @jax.custom_vjp
    def rounds(weights: list[Any], outside: list[Any], parts: list[Any]) -> list[Any]:
        return run.forward(weights, outside, parts, None)[0]

    trees: dict[str, Any] = {}

    # Tables of positions and masks are floats too, but need no gradients, which would be summed over stages at every
    # tick.
    def forward(*asked: list[Any]) -> tuple[list[Any], Any]:
        moving = run.moving(*([leaf.perturbed for leaf in leaves] for leaves in asked))
        weights, outside, parts = ([leaf.value for leaf in leaves] for leaves in asked)
        out, (residuals, known) = run.forward(weights, outside, parts, moving)
        trees.update(known, moving=moving)
        return out, (weights, outside, parts, residuals)

    def backward(kept: Any, above: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        *given, ticks = kept
        moving, parts = trees["moving"], given[2]
        zero = jax.custom_derivatives.SymbolicZero
        above = [
            jnp.zeros(like.shape, like.dtype) if isinstance(leaf, zero) else leaf
            for leaf, like, moves in zip(above, parts, _and_float(parts, moving.state), strict=True)
            if moves
        ]
        gradients = run.backward(given[0], given[1], parts, (ticks, trees), above, moving)
        masks = map(_and_float, given, (moving.weights, moving.outside, moving.state))
        w, o, p = (
            [next(new) if moves else None for moves in mask]
            for mask, new in zip(masks, map(iter, gradients), strict=True)
        )
        return w, o, p

    rounds.defvjp(forward, backward, symbolic_zeros=True)
    return rounds


def _chunk(layer: Callable[[Any, Any], Any], weights: Any, state: Any) -> Any:
    """Return the state [stages, ...] after the layers of one chunk, run in sequence for all stages at once.

    Weights are [layers, stages, ...].
    """
    import jax

    # The map is inside of the loop, so that the weights themselves are the backward pass's residuals of them.
    return jax.lax.scan(lambda x, w: (jax.vmap(layer)(x, w), None), state, weights)[0]


def _begin(parts: Any, stages: int) -> Any:
    """Return the state before the first tick, with the first microbatch in every stage."""
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[0], (stages, *leaf.shape[1:])), parts)


def _along(mask: Any, dim: int, rank: int) -> Any:
    """Reshape a mask of stages for arrays of `rank` dims in which `dim` is that of the stages."""
    return mask.reshape(*[1] * dim, mask.shape[0], *[1] * (rank - dim - 1))


def _where(stage: int, new: Any, old: Any, also: Any = None) -> Any:
    """Return `new` in one stage, if the scalar `also` is None or true, and `old` in the others: [stages, ...]."""
    import jax.numpy as jnp

    mask = jnp.arange(old.shape[0]) == stage
    return jnp.where(_along(mask if also is None else mask & also, 0, old.ndim), new, old)


def _only(leaf: Any, stages: int, stage: int) -> Any:
    """Expand [N, ...] to [N, stages, ...] with the values in one stage and zeros in the others."""
    import jax.numpy as jnp

    mask = _along(jnp.arange(stages) == stage, 1, leaf.ndim + 1)
    return jnp.where(mask, jnp.expand_dims(leaf, 1), jnp.zeros((), leaf.dtype))


def _of_last(leaf: Any) -> Any:
    """Return the last stage's values of [N, stages, ...], by a masked sum, which XLA does not turn into a gather."""
    import jax.numpy as jnp

    mask = _along(jnp.arange(leaf.shape[1]) == leaf.shape[1] - 1, 1, leaf.ndim)
    masked = jnp.where(mask, leaf, jnp.zeros((), leaf.dtype))
    return masked.any(1) if leaf.dtype == jnp.bool_ else masked.sum(1, dtype=leaf.dtype)


def _take(leaf: Any, place: Any) -> Any:
    """Return entry `place` of the first dim, which is dropped."""
    import jax

    return jax.lax.dynamic_index_in_dim(leaf, place, 0, keepdims=False)


def _is_float(leaf: Any) -> bool:
    """Return True for real and complex floats."""
    import jax.numpy as jnp

    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _and_float(leaves: Sequence[Any], moving: Sequence[bool]) -> list[bool]:
    """Return for each leaf True if it is marked in `moving` and has a float dtype."""
    return [moves and _is_float(leaf) for leaf, moves in zip(leaves, moving, strict=True)]


def _split(leaves: Sequence[Any], mask: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Return the leaves in the mask, and all others."""
    some, rest = ([leaf for leaf, own in zip(leaves, mask, strict=True) if own is kind] for kind in (True, False))
    return some, rest


def _merged(mask: Sequence[bool], some: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Merge the two lists of `_split` into one."""
    first, rest = iter(some), iter(others)
    return [next(first) if own else next(rest) for own in mask]
