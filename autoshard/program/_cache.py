"""Key-value caches as donated state: what a serving step reads and writes, stacked like the layers."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from autoshard.program._layers import Block


_position: contextvars.ContextVar[Any] = contextvars.ContextVar("position", default=None)


def query_position() -> Any:
    """Position of the first query among the cached keys; None where keys and queries are the same tokens."""
    return _position.get()


class ServingCache:
    """Stands where transformers expects its cache: `update` writes new keys and values and gives all of them.

    `entries` maps a layer (`model.layers.*`, or one name for each unscanned layer) to its arrays
    [layers, B, K, T, D] or [B, K, T, D]. `position` is where the new tokens go; None means that they are the first.
    """

    is_compileable = False

    def __init__(self, env: Any, entries: dict[str, Any], position: Any = None) -> None:
        self.env, self.entries, self.position = env, dict(entries), position
        self._open: list[dict[str, Any]] = []
        self.seen: dict[int, Any] = {}

    def stacked(self, block: Block, offset: int) -> dict[str, Any] | None:
        """The arrays of one layer of a group, to be scanned over; None if the block keeps no cache."""
        return self.entries.get(block.label(offset))

    def close_block(self, block: Block, offset: int, after: dict[str, Any]) -> None:
        """Take the arrays that a scan has written."""
        self.entries[block.label(offset)] = after

    @contextlib.contextmanager
    def layer(self, arrays: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """While inside, `update` works on `arrays` (one layer of a stack); the yielded dict holds what it wrote."""
        self._open.append(dict(arrays))
        try:
            yield self._open[-1]
        finally:
            self._open.pop()

    def update(self, key: Any, value: Any, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Write the new keys and values [B, K, S, D] of a layer; the keys and values to attend to."""
        import jax

        new = {"keys": self.env.t2j_iso(key), "values": self.env.t2j_iso(value)}
        name = f"layer.{layer_idx}"
        held = self._open[-1] if self._open else self.entries.get(name)
        if held is None:  # a first trace that only asks for shapes
            self.seen[layer_idx] = new
            return key, value
        start = 0 if self.position is None else self.position
        written = {
            part: jax.lax.dynamic_update_slice_in_dim(held[part], new[part].astype(held[part].dtype), start, axis=2)
            for part in new
        }
        if self._open:
            self._open[-1].update(written)
        else:
            self.entries[name] = written
        if self.position is None:
            return key, value
        return self.env.j2t_iso((written["keys"], written["values"]))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given, so nobody has to count from here."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Masks come from iotas and `query_position`."""
        return 0

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Masks come from iotas and `query_position`."""
        return int(query_length), 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let attention see where its queries stand."""
        token = _position.set(self.position)
        try:
            yield
        finally:
            _position.reset(token)
