"""Key-value caches as donated state: what a serving step reads and writes, stacked like the layers."""

import contextlib
from collections.abc import Iterator
from typing import Any

from autoshard.program.kernels.cached_keys import Held, active_cache, major_to_minor
from autoshard.program.torch.layer_differences import number_of
from autoshard.program.torch.repeated_layers import Block


class ServingCache:
    """Stands where transformers expects its cache: `update` writes new keys and values and gives all of them.

    `entries` maps a layer (`model.layers.*`, or one name for each unscanned layer) to its arrays
    [layers, B, K, T, D] or [B, K, T, D]. `position` is where the new tokens go; None means that they are the first.
    Up to `filled` places are expected to be read. Recurrent layers keep states of one size instead, under names of
    `_state`: the last inputs of a convolution [B, C, K], and whatever a recurrence carries [B, ...].
    """

    is_compileable = False
    is_sliding: tuple[bool, ...] = ()
    """Which layers keep the last tokens alone: none says that it does."""

    def __init__(
        self, env: Any, entries: dict[str, Any], position: Any = None, filled: int = 0, *, counted: bool = False
    ) -> None:
        """`counted`: the module is not told its positions, but counts them from the length of the cache."""
        self.counted = counted
        self.env, self.entries, self.position, self.filled = env, dict(entries), position, filled
        self.given: tuple[Any, Held] | None = None
        self._open: list[tuple[dict[str, Any], Any]] = []
        self._lent: list[tuple[str, str, Any, Any]] = []
        self.seen: dict[int, Any] = {}

    def stacked(self, block: Block, offset: int) -> dict[str, Any] | None:
        """The stacks [layers, ...] that a scan over a block carries; None if the block keeps no cache."""
        return self.entries.get(block.label(offset))

    def close_block(self, block: Block, offset: int, after: dict[str, Any]) -> None:
        """Take the stacks that a scan has written."""
        self.entries[block.label(offset)] = after

    @contextlib.contextmanager
    def layer(self, stacks: dict[str, Any], index: Any) -> Iterator[dict[str, Any]]:
        """While inside, `update` works on layer `index` of `stacks`; the yielded dict holds the updated stacks.

        Only the new tokens are written into a stack, and a layer is read from it: compilers update what a loop
        carries in place, and copy what it takes in one stack and gives in another.
        """
        lent, self._lent = self._lent, []
        self._open.append((dict(stacks), index))
        try:
            yield self._open[-1][0]
            self.settle()
        finally:
            self._open.pop()
            self._lent = lent

    def update(self, key: Any, value: Any, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Write the new keys and values [B, K, S, D] of a layer; the keys and values to attend to."""
        import jax

        new = {"keys": self.env.t2j_iso(key), "values": self.env.t2j_iso(value)}
        layer_idx = number_of(layer_idx)
        name = f"layer.{layer_idx}"
        held, index = self._open[-1] if self._open else (self.entries.get(name), None)
        if held is None:  # a first trace that only asks for shapes
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
        stacks = written if index is not None else {part: whole[None] for part, whole in written.items()}
        if index is not None:
            written = {
                part: jax.lax.dynamic_index_in_dim(stack, index, keepdims=False) for part, stack in written.items()
            }
        keys, values = self.env.j2t_iso((written["keys"], written["values"]))
        held = Held(stacks["keys"], stacks["values"], 0 if index is None else index, self.filled)
        self.given = (keys, held)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """How many tokens there are before the new ones, if the module has to count from here."""
        return self.env.j2t_iso(self.position) if self.counted and self.position is not None else 0

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """The last inputs of a layer's convolution [B, C, K], which it may write to; None before there are any."""
        return self._state(layer_idx, f"conv_state{state_idx}")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Any:
        """What a layer's recurrence carries, which it may write to; None before there is anything."""
        return self._state(layer_idx, f"recurrent_state{state_idx}")

    def update_conv_state(
        self, conv_states: Any, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Any:
        """Keep the last of the new inputs [B, C, S]; all that the convolution sees."""
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
        """Keep what a layer's recurrence carries on."""
        self._keep(layer_idx, f"recurrent_state{state_idx}", self.env.t2j_iso(recurrent_states))
        return recurrent_states

    def update_indexer(self, indexer_key_states: Any, layer_idx: int) -> Any:
        """Write the new keys [B, S, D] by which a layer chooses its tokens; all of them [B, T, D]."""
        import jax

        new, before = self.env.t2j_iso(indexer_key_states), self._held(layer_idx, "indexer")
        if before is None:
            self._keep(layer_idx, "indexer", new)
            return indexer_key_states
        start = 0 if self.position is None else self.position
        after = jax.lax.dynamic_update_slice(before, new.astype(before.dtype), (0, start, 0))
        self._keep(layer_idx, "indexer", after)
        return indexer_key_states if self.position is None else self.env.j2t_iso(after)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether states hold anything of tokens before the new ones."""
        return self.position is not None and bool(self.entries)

    def is_recording_past(self, layer_idx: int | None = None) -> bool:
        """Whether states can be taken back: never."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether there are tokens before the new ones."""
        return self.has_previous_state()

    def settle(self) -> None:
        """Take what layers have written into the states that they were given."""
        for layer, name, tensor, before in self._lent:
            if tensor._elem is not before:
                self._put(layer, name, tensor._elem)
        self._lent.clear()

    def _held(self, layer_idx: int, name: str) -> Any:
        """A state as it is now; None in a first trace that only asks for shapes."""
        import jax

        number = number_of(layer_idx)
        held, index = self._open[-1] if self._open else (self.entries.get(f"layer.{number}"), None)
        if held is None or name not in held:
            return None
        return held[name] if index is None else jax.lax.dynamic_index_in_dim(held[name], index, keepdims=False)

    def _state(self, layer_idx: int, name: str) -> Any:
        value = self._held(layer_idx, name) if self.position is not None else None
        if value is None:
            return None
        tensor = self.env.j2t_iso(value)
        self._lent.append((f"layer.{number_of(layer_idx)}", name, tensor, tensor._elem))
        return tensor

    def _keep(self, layer_idx: int, name: str, value: Any) -> None:
        layer_idx = number_of(layer_idx)
        self._lent = [each for each in self._lent if each[:2] != (f"layer.{layer_idx}", name)]
        if self._held(layer_idx, name) is None:
            self.seen.setdefault(layer_idx, {})[name] = value
        else:
            self._put(f"layer.{layer_idx}", name, value)

    def _put(self, layer: str, name: str, value: Any) -> None:
        import jax

        held, index = self._open[-1] if self._open else (dict(self.entries[layer]), None)
        value = value.astype(held[name].dtype)
        if index is not None:
            held[name] = jax.lax.dynamic_update_index_in_dim(held[name], value, index, 0)
        else:
            self.entries[layer] = held | {name: value}

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        """Where the first new token goes, for masks of modules whose attention is their own."""
        return 0 if self.position is None else self.env.j2t_iso(self.position)

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """How many keys there are, and where the first of them stands."""
        lengths = [parts["keys"].shape[-2] for parts in self.entries.values() if "keys" in parts]
        return (int(query_length) if self.position is None or not lengths else lengths[0]), 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let attention see where its queries stand."""
        token = active_cache.set(self)
        try:
            yield
        finally:
            active_cache.reset(token)


def _write(held: Any, new: Any, start: Any, index: Any) -> Any:
    """Put new keys or values [B, K, S, D] at position `start` of [B, K, T, D], or of layer `index` of a stack.

    Laid out like the cache: else XLA lays the whole cache out as the matmul leaves a new token, heads and batch
    inside of positions, and copies it before and after the loop over layers (seen for TPUs, libtpu 0.0.51).
    """
    import jax
    from jax.experimental.layout import Layout, with_layout_constraint

    new, places = new.astype(held.dtype), (0, 0, start, 0)
    if index is not None:
        new, places = new[None], (index, *places)
    new = with_layout_constraint(new, Layout(major_to_minor=major_to_minor(held.shape)))
    return jax.lax.dynamic_update_slice(held, new, places)
