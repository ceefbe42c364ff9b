"""Key-value caches as donated state: the arrays that a serving step reads and writes, stacked like the layers."""

import contextlib
from collections.abc import Iterator
from typing import Any

from autoshard.program.kernels.cached_keys import CachedKeys, active_cache, major_to_minor
from autoshard.program.torch.layer_differences import number_of
from autoshard.program.torch.repeated_layers import Block


class ServingCache:
    """A replacement for transformers' cache: `update` writes new keys and values, and returns all of them.

    `entries` maps a layer (`model.layers.*`, or one name for each unscanned layer) to its arrays [layers, B, K, T, D]
    or [B, K, T, D]. `position` is the place of the first new token; None means an empty cache. Up to `filled` places
    are expected to be read.

    Recurrent layers have states of fixed size instead, under names of `_state`. These are the last inputs of a
    convolution [B, C, K] and the carry of a recurrence [B, ...].
    """

    is_compileable = False
    is_sliding: tuple[bool, ...] = ()
    """Layers that store only the last tokens; none is known to."""

    def __init__(
        self, env: Any, entries: dict[str, Any], position: Any = None, filled: int = 0, *, counted: bool = False
    ) -> None:
        """Store the arrays of the cache.

        - `env`: the torchax environment.
        - `entries`, `position`, `filled`: those of the class.
        - `counted`: True if the module receives no positions, and derives them from the length of the cache.
        """
        self.counted = counted
        self.env, self.entries, self.position, self.filled = env, dict(entries), position, filled
        self.given: tuple[Any, CachedKeys] | None = None
        self._open: list[tuple[dict[str, Any], Any]] = []
        self._lent: list[tuple[str, str, Any, Any]] = []
        # Layer number -> arrays by name that a first trace, without entries, would store.
        self.seen: dict[int, Any] = {}

    def stacked(self, block: Block, offset: int) -> dict[str, Any] | None:
        """Return the stacks [layers, ...] that a scan over a block carries; None if the block has no cache.

        - `offset`: place of the layers within each group of the block.
        """
        return self.entries.get(block.label(offset))

    def close_block(self, block: Block, offset: int, after: dict[str, Any]) -> None:
        """Store `after`, the stacks that a scan has written for the layers at `offset` of each group of the block."""
        self.entries[block.label(offset)] = after

    @contextlib.contextmanager
    def layer(self, stacks: dict[str, Any], index: Any) -> Iterator[dict[str, Any]]:
        """Apply `update` to layer `index` of `stacks` while inside; the yielded dict has the updated stacks.

        Only the new tokens are written into a stack, and a layer is read from it. Compilers update a loop's carry in
        place, but copy a stack that a loop reads as one input and returns as another output.
        """
        outer, self._lent = self._lent, []
        self._open.append((dict(stacks), index))
        try:
            yield self._open[-1][0]
            self.settle()
        finally:
            self._open.pop()
            self._lent = outer

    def update(self, key: Any, value: Any, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Write the new keys and values [B, K, S, D] of a layer, and return the keys and values to attend to.

        These are all of the cache, [B, K, T, D], or only the new ones if the cache was empty. A first trace that only
        needs shapes records the new ones in `seen`.
        """
        import jax

        new = {"keys": self.env.t2j_iso(key), "values": self.env.t2j_iso(value)}
        layer_idx = number_of(layer_idx)
        name = f"layer.{layer_idx}"
        held, index = self._open[-1] if self._open else (self.entries.get(name), None)
        if held is None:  # a first trace that only needs shapes
            self.seen.setdefault(layer_idx, {}).update(new)
            return key, value
        start = 0 if self.position is None else self.position
        written = {part: _write(held[part], new[part], start, index) for part in new}
        if index is not None:
            held.update(written)
        else:
            self.entries[name] = held | written
        if self.position is None:
            return key, value
        stacks = written if index is not None else {part: array[None] for part, array in written.items()}
        if index is not None:
            written = {
                part: jax.lax.dynamic_index_in_dim(stack, index, keepdims=False) for part, stack in written.items()
            }
        keys, values = self.env.j2t_iso((written["keys"], written["values"]))
        held = CachedKeys(stacks["keys"], stacks["values"], 0 if index is None else index, self.filled)
        self.given = (keys, held)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the number of tokens before the new ones if the module derives positions from it (`counted`), else 0.

        It is 0 for an empty cache too.
        """
        return self.env.j2t_iso(self.position) if self.counted and self.position is not None else 0

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """Return the last inputs of a layer's convolution [B, C, K], or None before there are any.

        The layer may write to the tensor; `settle` stores the result.
        """
        return self._state(layer_idx, f"conv_state{state_idx}")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """Return the carry of a layer's recurrence, or None before there is any.

        The layer may write to the tensor; `settle` stores the result.
        """
        return self._state(layer_idx, f"recurrent_state{state_idx}")

    def update_conv_state(
        self, conv_states: Any, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Any:
        """Store the last K inputs of a convolution, and return all inputs that the convolution reads.

        These are the stored inputs followed by the new ones [B, C, S]. If the cache was empty they are the new ones
        alone, with zeros in front up to K. K is `conv_kernel_size`, or by default the width of the state.
        """
        import jax.numpy as jnp

        name = f"conv_state{state_idx}"
        before, new = self._held(layer_idx, name), self.env.t2j_iso(conv_states)
        width = conv_kernel_size or (new.shape[-1] if before is None else before.shape[-1])
        if before is not None and self.position is not None:
            new = jnp.concatenate([before.astype(new.dtype), new], -1)
        elif new.shape[-1] < width:
            new = jnp.pad(new, ((0, 0),) * (new.ndim - 1) + ((width - new.shape[-1], 0),))
        self._keep(layer_idx, name, new[..., -width:])
        return self.env.j2t_iso(new)

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, state_idx: int = 0, **_: Any) -> Any:
        """Store the carry of a layer's recurrence, and return it unchanged."""
        self._keep(layer_idx, f"recurrent_state{state_idx}", self.env.t2j_iso(recurrent_states))
        return recurrent_states

    def update_indexer(self, indexer_key_states: Any, layer_idx: int) -> Any:
        """Write the new keys [B, S, D] by which a layer selects its tokens, and return the keys to select from.

        These are all of the cache, [B, T, D], or only the new ones if the cache was empty.
        """
        import jax
        import jax.numpy as jnp

        new, before = self.env.t2j_iso(indexer_key_states), self._held(layer_idx, "indexer")
        if before is None:
            self._keep(layer_idx, "indexer", new)
            return indexer_key_states
        start = 0 if self.position is None else self.position
        after = jax.lax.dynamic_update_slice(before, new.astype(before.dtype), [jnp.int32(i) for i in (0, start, 0)])
        self._keep(layer_idx, "indexer", after)
        return indexer_key_states if self.position is None else self.env.j2t_iso(after)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return True if the states come from tokens before the new ones; the arguments are ignored."""
        return self.position is not None and bool(self.entries)

    def is_recording_past(self, layer_idx: int | None = None) -> bool:
        """Return False: states can never be rolled back."""
        return False

    @property
    def is_initialized(self) -> bool:
        """True if there are tokens before the new ones."""
        return self.has_previous_state()

    def settle(self) -> None:
        """Store the in-place writes of layers to the states that they received."""
        for layer, name, tensor, before in self._lent:
            if tensor._elem is not before:
                self._put(layer, name, tensor._elem)
        self._lent.clear()

    def _held(self, layer_idx: int, name: str) -> Any:
        """Return the present state, or None in a first trace that only needs shapes, or if the layer has none."""
        import jax

        number = number_of(layer_idx)
        entry, index = self._open[-1] if self._open else (self.entries.get(f"layer.{number}"), None)
        if entry is None or name not in entry:
            return None
        return entry[name] if index is None else jax.lax.dynamic_index_in_dim(entry[name], index, keepdims=False)

    def _state(self, layer_idx: int, name: str) -> Any:
        """Return a state as a tensor that the layer may write to, or None if there is none or the cache is empty."""
        value = self._held(layer_idx, name) if self.position is not None else None
        if value is None:
            return None
        tensor = self.env.j2t_iso(value)
        self._lent.append((f"layer.{number_of(layer_idx)}", name, tensor, tensor._elem))
        return tensor

    def _keep(self, layer_idx: int, name: str, value: Any) -> None:
        """Store a state; if there is no such state, as in a first trace, record its value in `seen`.

        In-place writes to the same state that `settle` has not stored are dropped.
        """
        layer_idx = number_of(layer_idx)
        self._lent = [each for each in self._lent if each[:2] != (f"layer.{layer_idx}", name)]
        if self._held(layer_idx, name) is None:
            self.seen.setdefault(layer_idx, {})[name] = value
        else:
            self._put(f"layer.{layer_idx}", name, value)

    def _put(self, layer: str, name: str, value: Any) -> None:
        """Write a state, cast to the stored dtype, into the open stack, or into the entry of an unscanned layer."""
        import jax

        entry, index = self._open[-1] if self._open else (dict(self.entries[layer]), None)
        value = value.astype(entry[name].dtype)
        if index is not None:
            entry[name] = jax.lax.dynamic_update_index_in_dim(entry[name], value, index, 0)
        else:
            self.entries[layer] = entry | {name: value}

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Return the position of the first new token, 0 for an empty cache, for masks of modules' own attention."""
        return 0 if self.position is None else self.env.j2t_iso(self.position)

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of keys, and the position of the first key, 0.

        The keys are all places of the cache, or only the new tokens if the cache is empty or has no keys.
        """
        lengths = [parts["keys"].shape[-2] for parts in self.entries.values() if "keys" in parts]
        return (int(query_length) if self.position is None or not lengths else lengths[0]), 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Make this cache visible to attention while inside, so that it knows the positions of its queries."""
        token = active_cache.set(self)
        try:
            yield
        finally:
            active_cache.reset(token)


def _write(held: Any, new: Any, start: Any, index: Any) -> Any:
    """Return `held` [B, K, T, D] with new keys or values [B, K, S, D] at position `start`.

    With an `index`, `held` is a stack of layers, of which that layer is written.

    The new token has the cache's layout; otherwise XLA would copy the whole cache around the loop over layers.
    Evidence: docs/compiler_behaviour.md, "Writes of one token into a key-value cache".
    """
    import jax
    import jax.numpy as jnp
    from jax.experimental.layout import Layout, with_layout_constraint

    new, places = new.astype(held.dtype), (0, 0, start, 0)
    if index is not None:
        new, places = new[None], (index, *places)
    new = with_layout_constraint(new, Layout(major_to_minor=major_to_minor(held.shape)))
    # Python numbers become 64 bits wide in programs with wide integers.
    return jax.lax.dynamic_update_slice(held, new, [jnp.int32(place) for place in places])
