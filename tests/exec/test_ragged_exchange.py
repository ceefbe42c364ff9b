"""Rows that devices send to the experts' devices, on 8 devices: the collective that CPUs lack is replaced."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from autoshard.program.kernels.ragged_exchange import RaggedCall, _all_rows, _real_rows, _RealRows


GROUPS, BATCH, ROOM, WIDTH = 8, 16, 3, 5


def plain_ragged(
    operand: Any, output: Any, begins: Any, sizes: Any, ends: Any, comes: Any, *, axis_name: tuple[str, ...]
) -> Any:
    """Replace `jax.lax.ragged_all_to_all` by gathers. A size that its receiver does not expect gives NaN."""
    count = jax.lax.axis_size(axis_name)
    mine = jax.lax.axis_index(axis_name)
    data, begins, sizes, ends = (jax.lax.all_gather(x, axis_name) for x in (operand, begins, sizes, ends))
    each = comes.shape[0] // count
    places = jnp.arange(output.shape[0])
    for sender in range(count):
        for slot in range(each):
            at = mine * each + slot
            begin, size, end = (x[sender].at[at].get() for x in (begins, sizes, ends))
            inside = (places >= end) & (places < end + size)
            rows = jnp.take(data[sender], jnp.clip(begin + places - end, 0, operand.shape[0] - 1), axis=0)
            rows = jnp.where(size == comes[sender * each + slot], rows, jnp.nan)
            output = jnp.where(inside[:, None], rows, output)
    return output


def given() -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    filled = rng.integers(0, ROOM + 1, (BATCH, GROUPS)).astype(np.int32)
    rows = rng.normal(size=(BATCH, GROUPS, ROOM, WIDTH)).astype(np.float32)
    return np.where((np.arange(ROOM) < filled[..., None])[..., None], rows, 0), filled


@pytest.mark.parametrize("axes", [("expert",), ("other", "expert")])
@pytest.mark.parametrize("way", [_real_rows, _all_rows])
def test_rows_reach_their_groups_and_return(monkeypatch: pytest.MonkeyPatch, way: Any, axes: tuple[str, ...]) -> None:
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", plain_ragged)
    rows, filled = given()
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("other", "expert"))
    count, rest = (8, ()) if len(axes) == 2 else (4, ("other",))
    by_sequence, by_group = PartitionSpec(("other", "expert")), PartitionSpec(axes, rest or None)
    whole = PartitionSpec(rest or None)

    def on_mesh(there: bool) -> Any:
        fn = functools.partial(way, axes=axes, count=count, there=there)
        sides = (by_sequence, by_group) if there else (by_group, by_sequence)
        return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=(sides[0], whole), out_specs=sides[1], check_vma=False))

    moved = np.asarray(on_mesh(True)(rows, filled))
    np.testing.assert_array_equal(moved, rows.swapaxes(0, 1))
    np.testing.assert_array_equal(np.asarray(on_mesh(False)(moved, filled)), rows)


def test_what_is_beyond_the_real_rows_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", plain_ragged)
    rows, filled = given()
    mesh = Mesh(np.array(jax.devices()), ("expert",))
    fn = functools.partial(_real_rows, axes=("expert",), count=8, there=True)
    split = PartitionSpec("expert")
    run = jax.shard_map(fn, mesh=mesh, in_specs=(split, PartitionSpec()), out_specs=split, check_vma=False)
    np.testing.assert_array_equal(np.asarray(jax.jit(run)(rows + 1, filled) == 0), rows.swapaxes(0, 1) == 0)


def test_the_rule_ties_sequences_of_one_side_to_groups_of_the_other() -> None:
    sizes, kinds, (rows, filled), (result,) = RaggedCall(
        _RealRows(0.5, 1.0), True, (BATCH, GROUPS, ROOM, WIDTH), "f"
    ).rule
    assert sizes == (BATCH // GROUPS, GROUPS, GROUPS, GROUPS, ROOM, WIDTH)
    assert rows[0] == (0, 1) and result[0] == (1,) and filled[0] == (0, 3)
    assert [kinds[f] for f in (0, 1, 5)] == ["parallel"] * 3
    assert {kinds[f] for f in (2, 3, 4)} == {"need_replication"}
