"""A stack of layers as a pipeline in one SPMD program: stages side by side in one dim, their results shifted by one.

At every tick all stages compute at once, each on its own microbatch, and hand their results on by a roll along the dim
of the stages, which is a collective-permute where stages stand on different devices. Stage `s` works at tick `t` on
what stage 0 began at tick `t - s`. Ticks before the first microbatch has come and after the last one has passed
compute on values that nobody uses: that is the bubble, and so it takes its time in the program itself. Those values
are microbatches too, never zeros, so that no layer divides by what cannot be.

With several rounds a stage has as many chunks of layers. Groups of as many microbatches as there are stages go round
and round: their first one is through with the last stage just when stage 0 is free again, so nothing has to wait.
Which chunk a stage needs depends on the tick, so the parameters of a tick are copied out of all of a stage. They are
copied again in the backward pass, which is written out here: `jax.grad` of the loop would keep them for every tick,
and would add gradients of all chunks where one has changed.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any


def run_pipeline(
    layer: Callable[[Any, Any], Any], stacked: Any, x: Any, stages: int, microbatches: int, rounds: int
) -> Any:
    """`x` [B, ...] after all layers of `stacked` [L, ...], in `microbatches` that go `rounds` times round `stages`.

    `stages * rounds` divides L, `microbatches` divides B, and `stages` divides `microbatches` if there are rounds.
    """
    import jax

    def by_stage(leaf: Any) -> Any:
        own = leaf.shape[0] // (stages * rounds)
        return leaf.reshape(rounds, stages, own, *leaf.shape[1:]).swapaxes(1, 2)

    weights = jax.tree.map(by_stage, stacked)  # [rounds, layers of a chunk, stages, ...]
    # A microbatch takes every so many-th example: a batch that is split over devices stays where it is.
    parts = jax.tree.map(
        lambda leaf: leaf.reshape(leaf.shape[0] // microbatches, microbatches, *leaf.shape[1:]).swapaxes(0, 1), x
    )
    if rounds == 1:
        out = _once(layer, jax.tree.map(lambda leaf: leaf[0], weights), parts, stages, microbatches)
    else:
        out = _around(layer, weights, parts, stages, microbatches, rounds)
    return jax.tree.map(lambda leaf, like: leaf.swapaxes(0, 1).reshape(like.shape), out, x)


def _once(layer: Callable[[Any, Any], Any], weights: Any, parts: Any, stages: int, count: int) -> Any:
    """Microbatches [count, ...] through all stages, whose weights are [layers of a stage, stages, ...]."""
    import jax
    import jax.numpy as jnp

    # While the last microbatch drains, the first stage gets it again.
    feed = jax.tree.map(
        lambda leaf: jnp.concatenate([leaf, jnp.broadcast_to(leaf[-1:], (stages - 1, *leaf.shape[1:]))]), parts
    )
    feed = jax.tree.map(lambda leaf: _only(leaf, stages, 0), feed)

    def tick(state: Any, fed: Any) -> tuple[Any, Any]:
        state = jax.tree.map(lambda leaf, new: _where(0, new, jnp.roll(leaf, 1, axis=0)), state, fed)
        state = _chunk(layer, weights, state)
        return state, state

    _, states = jax.lax.scan(tick, _begin(parts, stages), feed)
    # One sum over the stages at the end: what each of them has computed stays where it is until then.
    return jax.tree.map(lambda leaf: _of_last(leaf[stages - 1 :]), states)


def _around(layer: Callable[[Any, Any], Any], weights: Any, parts: Any, stages: int, count: int, rounds: int) -> Any:
    """Microbatches [count, ...] round all stages, whose weights are [rounds, layers of a chunk, stages, ...]."""
    import jax
    from jax import core

    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), parts)
    own = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[3:], leaf.dtype), weights)
    closed = jax.make_jaxpr(layer)(one, own)  # what the layer has from outside of it becomes an argument
    tree = jax.tree.structure(parts)

    def flat(outside: Sequence[Any], x: Sequence[Any], w: Sequence[Any]) -> list[Any]:
        return core.eval_jaxpr(closed.jaxpr, outside, *x, *w)

    # A part of the state that no layer changes is there for the others: it has a gradient only if it is asked for one.
    changed = [new is not old for new, old in zip(closed.jaxpr.outvars, closed.jaxpr.invars, strict=False)]
    run = _Rounds(flat, stages, count, rounds, changed)
    done = _differentiable(run)(jax.tree.leaves(weights), list(closed.consts), jax.tree.leaves(parts))
    return tree.unflatten(done)


class _Rounds:
    """The loop over the ticks of several rounds, and its gradient; trees are lists of leaves here."""

    def __init__(
        self, layer: Callable[..., list[Any]], stages: int, count: int, rounds: int, changed: Sequence[bool]
    ) -> None:
        self.layer, self.stages, self.count, self.rounds = layer, stages, count, rounds
        self.changed = changed
        self.ticks = count * rounds + stages - 1

    def picked(self, weights: Sequence[Any], tick: Any) -> list[Any]:
        """What each stage computes with at a tick: [layers of a chunk, stages, ...]."""
        import jax
        import jax.numpy as jnp

        now, before, late = self._chunks(tick)

        def of(leaf: Any) -> Any:
            newer, older = (jax.lax.dynamic_index_in_dim(leaf, chunk, 0, keepdims=False) for chunk in (now, before))
            return jnp.where(_along(late, 1, newer.ndim), newer, older)

        return [of(leaf) for leaf in weights]

    def _chunks(self, tick: Any) -> tuple[Any, Any, Any]:
        """The chunk of the stages that the group of microbatches has reached, that of the others, and which have it."""
        import jax.numpy as jnp

        turn = tick // self.stages
        reached = jnp.arange(self.stages) <= tick % self.stages
        return turn % self.rounds, (turn - 1) % self.rounds, reached

    def _place(self, begun: Any) -> Any:
        """The number of the microbatch that stage 0 began at a tick; some valid one where it began none."""
        import jax.numpy as jnp

        group = jnp.clip(begun // (self.rounds * self.stages), 0, self.count // self.stages - 1)
        return group * self.stages + begun % self.stages

    def _enters(self, tick: Any) -> Any:
        return tick % (self.rounds * self.stages) < self.stages

    def _leaves(self, tick: Any) -> Any:
        begun = tick - (self.stages - 1)
        last = (begun // self.stages) % self.rounds == self.rounds - 1
        return (begun >= 0) & last

    def moving(self, *asked: Sequence[bool]) -> "_Moving":
        """What has gradients, of weights, of what comes from outside and of the microbatches that are `asked` for."""
        weights, outside, parts = map(tuple, asked)
        state = tuple(own or new for own, new in zip(parts, self.changed, strict=True))
        return _Moving(weights, outside, parts, state)

    def forward(self, weights: Any, outside: Any, parts: Any, moving: "_Moving | None") -> tuple[list[Any], Any]:
        """Results by microbatch; and for gradients of what moves, what every tick keeps for them and how to read it."""
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
            own = self.picked(weights, tick)
            if moving is not None:
                state, kept = self._recorded(own, outside, state, moving, known)
            else:
                state, kept = self._computed(own, outside, state), None
            # Earlier rounds write into the places of their microbatches too: the last one is what stays.
            place = self._place(tick - (self.stages - 1))
            out = [jax.lax.dynamic_update_index_in_dim(o, s, place, 0) for o, s in zip(out, state, strict=True)]
            return (state, out), kept

        out = [jnp.zeros_like(leaf) for leaf in feed]
        (_, out), kept = jax.lax.scan(step, (_begin(parts, self.stages), out), jnp.arange(self.ticks))
        return [_of_last(leaf) for leaf in out], (kept, known)

    def _computed(self, own: Any, outside: Any, state: Any) -> list[Any]:
        return _chunk(lambda x, w: self.layer(outside, x, w), own, state)

    def _recorded(
        self, own: Any, outside: Any, state: Any, moving: "_Moving", known: dict[str, Any]
    ) -> tuple[list[Any], list[Any]]:
        """The state after a tick, and what its gradient needs but for the weights, which are found again."""
        import jax

        leaves = (own, outside, state)
        masks = list(map(_and_float, leaves, (moving.weights, moving.outside, moving.state)))
        floats, others = zip(*map(_split, leaves, masks), strict=True)

        def run(*given: Any) -> tuple[list[Any], list[Any]]:
            return _split(self._computed(*map(_merged, masks, given, others)), masks[2])

        after, back, rest = jax.vjp(run, *floats, has_aux=True)
        found, tree = jax.tree.flatten(back)
        ids = {id(leaf): number for number, leaf in enumerate(own)}
        known["tree"], known["own"] = tree, [ids.get(id(leaf)) for leaf in found]
        kept = [leaf for leaf, number in zip(found, known["own"], strict=True) if number is None]
        return _merged(masks[2], after, rest), kept

    def backward(
        self, weights: Any, outside: Any, parts: Any, kept: Any, above: Any, moving: "_Moving"
    ) -> tuple[Any, Any, Any]:
        """Gradients of weights, of what comes from outside, and of the microbatches, those of what moves.

        `above` are those of the results, for what moves of the state.
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
            saved, own = iter(saved), self.picked(weights, tick)
            leaves = [next(saved) if number is None else own[number] for number in known["own"]]
            of_own, more, state = known["tree"].unflatten(leaves)(state)
            enters = self._enters(tick)
            # Ticks that carry a microbatch for a later round write too, before the one that took it in does.
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
        """Gradients of all chunks with those of one tick added where they belong."""
        import jax
        import jax.numpy as jnp

        now, before, late = self._chunks(tick)
        mask = _along(late, 1, new.ndim)
        for chunk, part in ((now, jnp.where(mask, new, 0)), (before, jnp.where(mask, 0, new))):
            old = jax.lax.dynamic_index_in_dim(total, chunk, 0, keepdims=False)
            total = jax.lax.dynamic_update_index_in_dim(total, old + part.astype(total.dtype), chunk, 0)
        return total


@dataclasses.dataclass(frozen=True, slots=True)
class _Moving:
    """Of which leaves gradients are computed, if they are floats."""

    weights: tuple[bool, ...]
    outside: tuple[bool, ...]
    parts: tuple[bool, ...]
    """Which of the microbatches are asked for."""
    state: tuple[bool, ...]
    """What is handed from stage to stage has gradients also where only layers make it depend on what moves."""


def _differentiable(run: _Rounds) -> Callable[[list[Any], list[Any], list[Any]], list[Any]]:
    import jax
    import jax.numpy as jnp

    @jax.custom_vjp
    def rounds(weights: list[Any], outside: list[Any], parts: list[Any]) -> list[Any]:
        return run.forward(weights, outside, parts, None)[0]

    trees: dict[str, Any] = {}

    # Tables of positions and masks are floats too, but nobody asks for their gradients: it would be summed over the
    # stages at every tick.
    def forward(*asked: list[Any]) -> tuple[list[Any], Any]:
        moving = run.moving(*([leaf.perturbed for leaf in leaves] for leaves in asked))
        weights, outside, parts = ([leaf.value for leaf in leaves] for leaves in asked)
        out, (kept, known) = run.forward(weights, outside, parts, moving)
        trees.update(known, moving=moving)
        return out, (weights, outside, parts, kept)

    def backward(kept: Any, above: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        *given, ticks = kept
        moving, parts = trees["moving"], given[2]
        zero = jax.custom_derivatives.SymbolicZero
        above = [
            jnp.zeros(like.shape, like.dtype) if isinstance(leaf, zero) else leaf
            for leaf, like, moves in zip(above, parts, _and_float(parts, moving.state), strict=True)
            if moves
        ]
        found = run.backward(given[0], given[1], parts, (ticks, trees), above, moving)
        masks = map(_and_float, given, (moving.weights, moving.outside, moving.state))
        w, o, p = (
            [next(new) if moves else None for moves in mask] for mask, new in zip(masks, map(iter, found), strict=True)
        )
        return w, o, p

    rounds.defvjp(forward, backward, symbolic_zeros=True)
    return rounds


def _chunk(layer: Callable[[Any, Any], Any], weights: Any, state: Any) -> Any:
    """The layers of one chunk, one after the other, of all stages at once: weights [layers, stages, ...]."""
    import jax

    # The map is inside of the loop: what the backward pass needs of the weights is then the weights themselves.
    return jax.lax.scan(lambda x, w: (jax.vmap(layer)(x, w), None), state, weights)[0]


def _begin(parts: Any, stages: int) -> Any:
    """Before the first tick: the first microbatch in every stage."""
    import jax
    import jax.numpy as jnp

    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[0], (stages, *leaf.shape[1:])), parts)


def _along(mask: Any, dim: int, rank: int) -> Any:
    """A mask of stages for arrays of `rank` dims, of which `dim` is that of the stages."""
    return mask.reshape(*[1] * dim, mask.shape[0], *[1] * (rank - dim - 1))


def _where(stage: int, new: Any, old: Any, also: Any = None) -> Any:
    """`new` in one stage (where `also` holds), `old` in the others: [stages, ...]."""
    import jax.numpy as jnp

    mask = jnp.arange(old.shape[0]) == stage
    return jnp.where(_along(mask if also is None else mask & also, 0, old.ndim), new, old)


def _only(leaf: Any, stages: int, stage: int) -> Any:
    """What one stage is given, with zeros for the others: [N, ...] becomes [N, stages, ...]."""
    import jax.numpy as jnp

    mask = _along(jnp.arange(stages) == stage, 1, leaf.ndim + 1)
    return jnp.where(mask, jnp.expand_dims(leaf, 1), jnp.zeros((), leaf.dtype))


def _of_last(leaf: Any) -> Any:
    """What the last stage has of [N, stages, ...]: a sum with zeros for the others, which XLA makes no gather of."""
    import jax.numpy as jnp

    mask = _along(jnp.arange(leaf.shape[1]) == leaf.shape[1] - 1, 1, leaf.ndim)
    masked = jnp.where(mask, leaf, jnp.zeros((), leaf.dtype))
    return masked.any(1) if leaf.dtype == jnp.bool_ else masked.sum(1, dtype=leaf.dtype)


def _take(leaf: Any, place: Any) -> Any:
    import jax

    return jax.lax.dynamic_index_in_dim(leaf, place, 0, keepdims=False)


def _is_float(leaf: Any) -> bool:
    import jax.numpy as jnp

    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _and_float(leaves: Sequence[Any], moving: Sequence[bool]) -> list[bool]:
    """Which of the leaves have gradients."""
    return [moves and _is_float(leaf) for leaf, moves in zip(leaves, moving, strict=True)]


def _split(leaves: Sequence[Any], mask: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Those of the mask, and all others."""
    some, rest = ([leaf for leaf, own in zip(leaves, mask, strict=True) if own is kind] for kind in (True, False))
    return some, rest


def _merged(mask: Sequence[bool], some: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """The inverse of `_split`."""
    first, rest = iter(some), iter(others)
    return [next(first) if own else next(rest) for own in mask]
