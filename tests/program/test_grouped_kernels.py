"""Kernels for grouped rows: work, steps and traffic follow from their tiles."""

import pytest

from autoshard.program import GroupedKernels, GroupedTiles
from autoshard.program.kernels.grouped_kernels import _work


ROWS, GROUPS, WIDTH, INNER = 4096, 8, 2048, 1536


def test_tiles_that_do_not_divide_are_computed_whole() -> None:
    fit = GroupedKernels(GroupedTiles(512, 1024, 768))
    # One more tile of rows for each group, and the 8 tiles of the rows are half filled twice.
    found = _work(fit, ROWS, GROUPS, (WIDTH, INNER), INNER, gradient=False)
    assert found.share == pytest.approx((4096 / 512 + 8) * 512 / 4096)
    assert found.steps == 16 * 2 * 2
    wide = _work(GroupedKernels(GroupedTiles(512, 1024, 1024)), ROWS, GROUPS, (WIDTH, INNER), INNER, gradient=False)
    assert wide.share == pytest.approx(found.share * 2048 / 1536)
    deep = _work(GroupedKernels(GroupedTiles(512, 1024, 1024)), ROWS, GROUPS, (INNER, WIDTH), INNER, gradient=True)
    assert deep.share == pytest.approx(wide.share)


def test_a_core_without_a_tile_of_columns_waits() -> None:
    """Compare tiles of columns on two cores: one tile needs as long as two, and three as long as four."""
    shares = []
    for inner in (512, 768, 1536):
        kernels = GroupedKernels(GroupedTiles(512, 1024, inner), cores=2)
        shares.append(_work(kernels, ROWS, GROUPS, (WIDTH, INNER), INNER, gradient=False).share / 2)
    assert shares == pytest.approx([4 / 3, 1.0, 2.0])


def test_a_matrix_of_one_tile_is_read_once_a_group() -> None:
    tiles, narrow = GroupedTiles(512, 2048, 1536), GroupedTiles(512, 1024, 1536)
    once, again = (
        _work(GroupedKernels(each), ROWS, GROUPS, (WIDTH, INNER), INNER, gradient=False).traffic
        for each in (tiles, narrow)
    )
    assert once == 2 * (16 * 512 * WIDTH + 8 * WIDTH * INNER + 4096 * INNER)
    assert again - once == 2 * 8 * WIDTH * INNER  # 8 of its 16 tiles of rows are further ones of a group


def test_devices_have_their_own_rows_and_groups() -> None:
    """Scale rows and groups with the devices: the ratio of computed to needed work stays, steps and traffic grow."""
    one = _work(GroupedKernels(), ROWS, GROUPS, (WIDTH, INNER), INNER, gradient=False)
    rows = _work(GroupedKernels(row_parts=4), 4 * ROWS, GROUPS, (WIDTH, INNER), INNER, gradient=False)
    both = _work(
        GroupedKernels(row_parts=2, group_parts=2), 4 * ROWS, 2 * GROUPS, (WIDTH, INNER), INNER, gradient=False
    )
    for found in (rows, both):
        assert found.share == pytest.approx(one.share)
        assert (found.steps, found.traffic) == (4 * one.steps, 4 * one.traffic)
