"""Names of stacks of layers, and the names of the layers that a stack represents."""

import re

import pytest

from autoshard.planning import is_stacked, layer_pattern


@pytest.mark.parametrize(
    ("name", "layers", "fits", "others"),
    [
        ("model.layers.*.w", 3, ["model.layers.0.w", "model.layers.12.w"], ["model.layers.x.w", "model.layers.0.w.b"]),
        ("[0:2].up.weight", 2, ["0.up.weight", "1.up.weight"], ["2.up.weight", "0.upxweight"]),
        ("layers.[3:61].w", 58, ["layers.3.w", "layers.60.w"], ["layers.2.w", "layers.61.w"]),
        ("layers.[1::2].w", 3, ["layers.1.w", "layers.5.w"], ["layers.0.w", "layers.7.w"]),
        ("lm_head.weight", 8, ["lm_head.weight"], ["model.lm_head.weight"]),
    ],
)
def test_a_stack_stands_for_its_layers(name: str, layers: int, fits: list[str], others: list[str]):
    pattern = re.compile(layer_pattern(name, layers))
    assert is_stacked(name) == (name != "lm_head.weight")
    assert [each for each in (*fits, *others) if pattern.match(each)] == fits
