"""Patterns of topologies: their matches, and the error if there is none."""

import pytest

from autoshard.cost import Topology, chip_names, find_topologies, load_chip, shapes_of, slice_shapes
from autoshard.errors import UserError


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("v5e:*", "1x1 2x2 2x4 4x4 4x8 8x8 8x16 16x16"),
        ("v5litepod:4x*", "4x4 4x8"),
        ("v6e:16x16*1-3", "16x16 16x16*2 16x16*3"),
        ("v6e:2x4*2-2", "2x4*2"),
        ("h100:*", "1 2 4 8"),
        ("h100:8*1-2", "8 8*2"),
        ("v5p-256", "4x4x8"),
        ("v5p-512", "4x8x8"),
        ("v6e-1*", "1x1 4x4 8x16"),
        ("v5e:4x*", "4x4 4x8"),
    ],
)
def test_a_pattern_stands_for_the_shapes_that_exist(pattern: str, names: str):
    topologies = find_topologies(pattern)
    assert [each.name.partition(":")[2] for each in topologies] == names.split()


def test_all_that_is_found_can_be_parsed_and_grows():
    for chip in chip_names():
        if not load_chip(chip).traits.shares_machine:
            topologies = find_topologies(f"{chip}:*")
            assert [each.name for each in topologies] == [Topology.parse(each.name).name for each in topologies]
            assert [each.num_chips for each in topologies] == sorted(each.num_chips for each in topologies)
            assert {each.shape for each in topologies} == set(shapes_of(load_chip(chip)))
    for name, shape in slice_shapes(load_chip("v5p")).items():
        assert find_topologies(name)[0].shape == Topology.parse(name).shape == shape


def test_several_chips_have_the_shapes_that_each_has():
    assert {each.name for each in find_topologies("*:4x4")} == {"v2:4x4", "v3:4x4", "v5e:4x4", "v6e:4x4"}
    assert {each.chip.name for each in find_topologies("v5*:*")} == {"v5e", "v5p"}
    assert "cpu" not in {each.chip.name for each in find_topologies("*:*")}


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        ("h100*", "topology 'h100*' names no shapes; write 'h100:*'"),
        ("v5q:*", "unknown chip 'v5q'; did you mean v5 or v5p or v5e"),
        ("v7z*:4x4", "no chip is called 'v7z*'; did you mean"),
        ("v5e:5x*", "topology 'v5e:5x*' stands for none; v5e comes in 1x1, 2x2, 2x4"),
        ("v5e:3x4*1-2", "v5e has no shape 3x4; it has 1x1"),
        ("v5e:2x4*4-1", "slices from 4 to 1 are none"),
        ("v5e:2x4*1-9999", "slices from 1 to 9999 are none"),
        ("*:**1-9", "stands for 2358 of them, more than 512; name a chip"),
        ("cpu:*", "cpu has no list of shapes; write how many devices, such as cpu:8"),
        ("v5e", "topology 'v5e' is not of the form CHIP:SHAPE"),
        ("", "topology '' is not of the form CHIP:SHAPE"),
    ],
)
def test_what_stands_for_nothing_says_what_there_is(pattern: str, sentence: str):
    with pytest.raises(UserError) as caught:
        find_topologies(pattern)
    assert sentence in str(caught.value)
