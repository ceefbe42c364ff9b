"""Flattening of tuples, in which PyTorch/XLA's scans return the results of their bodies."""

from autoshard import mlir


SOURCE = """
func.func @main(%a: tensor<4xf32>, %b: tensor<8xf32>) -> (tensor<8xf32>, tensor<4xf32>) {
  %inner = stablehlo.tuple %a, %b : tuple<tensor<4xf32>, tensor<8xf32>>
  %second = stablehlo.get_tuple_element %inner[1] : (tuple<tensor<4xf32>, tensor<8xf32>>) -> tensor<8xf32>
  %outer = stablehlo.tuple %second, %inner : tuple<tensor<8xf32>, tuple<tensor<4xf32>, tensor<8xf32>>>
  %x = stablehlo.get_tuple_element %outer[0] :
    (tuple<tensor<8xf32>, tuple<tensor<4xf32>, tensor<8xf32>>>) -> tensor<8xf32>
  %again = stablehlo.get_tuple_element %outer[1] :
    (tuple<tensor<8xf32>, tuple<tensor<4xf32>, tensor<8xf32>>>) -> tuple<tensor<4xf32>, tensor<8xf32>>
  %y = stablehlo.get_tuple_element %again[0] : (tuple<tensor<4xf32>, tensor<8xf32>>) -> tensor<4xf32>
  return %x, %y : tensor<8xf32>, tensor<4xf32>
}
"""


def test_elements_are_what_was_put_in() -> None:
    text = str(mlir.inline_calls(mlir.parse_module(SOURCE)))
    assert "tuple" not in text
    assert "return %arg1, %arg0" in text


def test_calls_that_give_tuples_are_named() -> None:
    """Leave the tuples of custom calls alone: no op of the module packs their elements."""
    called = """
func.func @main(%a: tensor<4x4xf32>) -> tensor<4xf32> {
  %made = stablehlo.custom_call @Eigh(%a) : (tensor<4x4xf32>) -> tuple<tensor<4x4xf32>, tensor<4xf32>>
  %values = stablehlo.get_tuple_element %made[1] : (tuple<tensor<4x4xf32>, tensor<4xf32>>) -> tensor<4xf32>
  %plain = stablehlo.custom_call @Sharding(%values) : (tensor<4xf32>) -> tensor<4xf32>
  return %plain : tensor<4xf32>
}
"""
    assert mlir.tuple_calls(mlir.inline_calls(mlir.parse_module(called))) == ["Eigh"]
    assert mlir.tuple_calls(mlir.inline_calls(mlir.parse_module(SOURCE))) == []
