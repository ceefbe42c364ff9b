"""Functions on DTensors of one of four devices: each shard equals that part of the whole result, in its placements.

The other three devices do not exist, so no device sends anything.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoshard.exec.dtensor.split_functions import choose, embed, multiply, pad
from autoshard.exec.dtensor.split_ops import SplitOps, run_split
from autoshard.exec.dtensor.split_trial import _alike, trial


WHOLE = Replicate()
X = torch.arange(4 * 6 * 8, dtype=torch.float32).reshape(4, 6, 8).sin()
IDS = torch.tensor([[0, 5, 3, 2], [7, 1, 2, 2], [4, 4, 6, 0], [1, 0, 7, 3]])
TABLE = torch.arange(8 * 4, dtype=torch.float32).reshape(8, 4)
WEIGHT = torch.arange(10 * 8, dtype=torch.float32).reshape(10, 8).cos()


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (2, 2))
    distributed.destroy_process_group()


def part(tensor: torch.Tensor, places: tuple[Any, ...]) -> torch.Tensor:
    """Return the shard of device (0, 1) in a mesh of two by two."""
    for number, place in zip((0, 1), places, strict=True):
        if isinstance(place, Shard):
            tensor = tensor.chunk(2, place.dim)[number]
    return tensor


def placed(mesh: DeviceMesh, tensor: torch.Tensor, *places: Any) -> DTensor:
    return distribute_tensor(tensor, mesh, places, src_data_rank=None)


def check(found: Any, wanted: torch.Tensor, *places: Any) -> None:
    assert isinstance(found, DTensor) and found.placements == places and found.shape == wanted.shape
    assert torch.allclose(found.to_local(), part(wanted, places), atol=1e-6)


@pytest.mark.parametrize("places", [(Shard(0), Shard(1)), (Shard(1), WHOLE), (WHOLE, Shard(0))])
def test_ids_that_are_split_are_looked_up_in_the_whole_table(mesh: DeviceMesh, places: tuple[Any, ...]) -> None:
    table = placed(mesh, TABLE, WHOLE, WHOLE)
    check(run_split(functional.embedding, (placed(mesh, IDS, *places), table), {}), TABLE[IDS], *places)


def test_columns_of_a_table_are_looked_up_apart_and_rows_are_summed(mesh: DeviceMesh) -> None:
    ids = placed(mesh, IDS, Shard(0), WHOLE)
    columns = run_split(functional.embedding, (ids, placed(mesh, TABLE, WHOLE, Shard(1))), {})
    check(columns, TABLE[IDS], Shard(0), Shard(2))
    rows = run_split(functional.embedding, (ids, placed(mesh, TABLE, WHOLE, Shard(0))), {})
    assert rows.placements == (Shard(0), Partial()) and rows.shape == (4, 4, 4)
    ours = (IDS[:2] >= 4)[..., None]  # the second half of the rows is here
    assert torch.equal(rows.to_local(), torch.where(ours, TABLE[IDS[:2]], 0.0))


def test_lookups_that_change_the_table_or_are_of_plain_ids_are_left_to_others(mesh: DeviceMesh) -> None:
    ids, table = placed(mesh, IDS, Shard(0), WHOLE), placed(mesh, TABLE, WHOLE, WHOLE)
    for more in ({"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}):
        assert embed(functional.embedding, (ids, table), more) is None
    assert embed(functional.embedding, (IDS, table), {}) is None
    assert embed(functional.embedding, (ids, TABLE), {}) is None


def test_a_linear_layer_keeps_the_split_of_its_rows_or_has_that_of_its_weight(mesh: DeviceMesh) -> None:
    wanted = functional.linear(X, WEIGHT)
    x = placed(mesh, X, Shard(1), WHOLE)
    check(run_split(functional.linear, (x, placed(mesh, WEIGHT, WHOLE, Shard(0))), {}), wanted, Shard(1), Shard(2))
    check(run_split(functional.linear, (x, placed(mesh, WEIGHT, WHOLE, WHOLE)), {}), wanted, Shard(1), WHOLE)
    plain = placed(mesh, X, Shard(0), Shard(2)), placed(mesh, WEIGHT, WHOLE, WHOLE)
    assert multiply(functional.linear, plain, {}) is None, "DTensor does that"
    assert multiply(functional.linear, (X, plain[1]), {}) is None


def test_the_largest_of_whole_rows_stay_split(mesh: DeviceMesh) -> None:
    values, indices = run_split(torch.topk, (placed(mesh, X, Shard(0), Shard(1)), 2), {})
    wanted = torch.topk(X, 2)
    check(values, wanted.values, Shard(0), Shard(1))
    check(indices, wanted.indices, Shard(0), Shard(1))
    out = torch.zeros(4, 6, 2), torch.zeros(4, 6, 2, dtype=torch.int64)
    assert choose(torch.topk, (placed(mesh, X, Shard(0), WHOLE), 2), {"out": out}) is None
    assert choose(torch.topk, (X, 2), {}) is None


def test_what_is_padded_at_other_dims_stays_split(mesh: DeviceMesh) -> None:
    x, wanted = placed(mesh, X, Shard(0), Shard(1)), functional.pad(X, (1, 2), value=3.0)
    check(run_split(functional.pad, (x, (1, 2)), {"value": 3.0}), wanted, Shard(0), Shard(1))
    assert pad(functional.pad, (X, (1, 2)), {}) is None


def test_results_are_placed_as_planned_but_for_views_of_a_shape_and_within_layers(mesh: DeviceMesh) -> None:
    pins = {
        ("relu", (4, 6, 8)): (Shard(0), Shard(1)),
        ("view", (4, 6, 8)): (Shard(0), WHOLE),
        ("view", (24, 8)): (WHOLE, Shard(0)),
    }
    x = placed(mesh, X, WHOLE, WHOLE)
    with SplitOps(mesh, pins) as ops:
        check(torch.relu(x), X.relu(), Shard(0), Shard(1))
        check(x.view(24, 8), X.view(24, 8), WHOLE, Shard(0))
        check(x.view(4, 6, 8), X, WHOLE, WHOLE)
        ops.inside = 1
        check(torch.relu(x), X.relu(), WHOLE, WHOLE)
        check(x.view(24, 8), X.view(24, 8), WHOLE, WHOLE)
    assert ops.whole == {}


def test_what_dtensor_cannot_run_is_run_whole_and_named(mesh: DeviceMesh) -> None:
    x, wanted = placed(mesh, X.clone(), WHOLE, WHOLE), X.clone()
    with SplitOps(mesh) as ops:
        x[0] = 3.0
        x.index_copy_(0, torch.tensor([1]), torch.zeros(1, 6, 8))
        counts = torch.bincount(placed(mesh, IDS.flatten(), WHOLE, WHOLE))
    wanted[0], wanted[1] = 3.0, 0.0
    check(x, wanted, WHOLE, WHOLE)
    check(counts, torch.bincount(IDS.flatten()), WHOLE, WHOLE)
    whole = {"torch.Tensor.__setitem__", "torch.bincount"}
    assert set(ops.whole) - {"torch.Tensor.index_copy_"} == whole, "DTensor runs that one from torch 2.13 on"


def test_arguments_that_a_function_writes_to_are_written_once(mesh: DeviceMesh) -> None:
    mean, variance = torch.zeros(6), torch.ones(6)
    x, total = placed(mesh, X, WHOLE, WHOLE), placed(mesh, X.clone(), WHOLE, WHOLE)
    with SplitOps(mesh) as ops:
        functional.batch_norm(placed(mesh, X, WHOLE, WHOLE), mean, variance, training=True)
        torch.add(total, x, out=total)
    wanted = torch.zeros(6), torch.ones(6)
    functional.batch_norm(X, *wanted, training=True)
    assert torch.allclose(mean, wanted[0]) and torch.allclose(variance, wanted[1])
    check(total, 2 * X, WHOLE, WHOLE)
    assert "torch.add" not in ops.whole


def test_an_argument_that_is_written_to_on_whole_tensors_is_written_in_its_shards(mesh: DeviceMesh) -> None:
    rows = placed(mesh, torch.zeros(4, 4), Shard(0), Shard(1))
    with SplitOps(mesh) as ops:
        torch.eye(4, out=rows)
    check(rows, torch.eye(4), Shard(0), Shard(1))
    assert not ops.whole


def test_a_wrong_value_of_an_argument_that_is_written_to_is_seen(mesh: DeviceMesh) -> None:
    def shifted(x: Any, seen: Any) -> Any:
        seen.add_(x * 2 if isinstance(x, DTensor) else x)
        return x + 1

    x, seen = (placed(mesh, X.clone(), WHOLE, WHOLE) for _ in range(2))
    run = lambda func, args, kwargs: func(*args, **kwargs)  # noqa: E731
    assert trial(shifted, run, (x, seen), {}, changes=False) == "it gives other values than on one device"
    assert trial(torch.add, run, (x, seen), {}, changes=False) == ""
    check(seen, X, WHOLE, WHOLE)


@pytest.mark.parametrize(
    ("found", "wanted", "same"),
    [
        ([1.0, 2.0001], [1.0, 2.0], True),
        ([1.0, 2.01], [1.0, 2.0], False),
        ([], [], True),
        ([2e-6, torch.inf], [1e-6, torch.inf], False),  # the rounding error is relative to the largest finite value
        ([1e-6, torch.inf], [1e-6, torch.inf], True),
        ([1.0, torch.nan], [1.0, torch.inf], False),
        ([1.0, torch.nan], [1.0, torch.nan], True),
    ],
)
def test_values_are_alike_up_to_rounding(mesh: DeviceMesh, found: list, wanted: list, same: bool) -> None:
    assert _alike(placed(mesh, torch.tensor(found), WHOLE, WHOLE), torch.tensor(wanted), 1e-3) == same


@pytest.mark.parametrize(("result", "refused"), [("Tensor(a)", True), ("Tensor", False)])
def test_an_own_operator_without_shapes_is_refused_where_it_returns_views(
    mesh: DeviceMesh, result: str, refused: bool
) -> None:
    name = f"views_{refused}"
    library = torch.library.Library("autoshard_test", "FRAGMENT")
    library.define(f"{name}(Tensor(a) x) -> {result}")
    library.impl(name, lambda x: x[1:] if refused else x[1:].clone(), "CPU")
    own = getattr(torch.ops.autoshard_test, name).default
    x = placed(mesh, X, WHOLE, WHOLE)
    with torch.no_grad(), SplitOps(mesh):
        if refused:
            with pytest.raises(NotImplementedError, match=r"views_True.default returns views.*register_fake"):
                own(x)
        else:
            check(own(x), X[1:], WHOLE, WHOLE)
    library._destroy()
