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


def test_calls_that_give_tuples_give_their_elements() -> None:
    called = """
func.func @main(%a: tensor<4x4xf32>) -> tensor<4xf32> {
  %made = stablehlo.custom_call @Eigh(%a) {backend_config = "1,1,100", xla_shape = "(f32[4,4], f32[4])"} :
    (tensor<4x4xf32>) -> tuple<tensor<4x4xf32>, tensor<4xf32>>
  %values = stablehlo.get_tuple_element %made[1] : (tuple<tensor<4x4xf32>, tensor<4xf32>>) -> tensor<4xf32>
  %plain = stablehlo.custom_call @Sharding(%values) : (tensor<4xf32>) -> tensor<4xf32>
  return %plain : tensor<4xf32>
}
"""
    module = mlir.inline_calls(mlir.parse_module(called))
    assert mlir.untuple_calls(module) == []
    assert "tuple<" not in str(module) and "%0:2 = stablehlo.custom_call @Eigh" in str(module)
    assert 'backend_config = "1,1,100"' in str(module) and "xla_shape" not in str(module)
    assert module.operation.verify() and mlir.to_hlo_proto(module)
    assert mlir.untuple_calls(mlir.inline_calls(mlir.parse_module(SOURCE))) == []


def test_a_call_whose_tuple_is_used_whole_is_named() -> None:
    whole = """
func.func @main(%a: tensor<4xf32>) -> tuple<tensor<4xf32>, tensor<4xf32>> {
  %made = stablehlo.custom_call @Pair(%a) : (tensor<4xf32>) -> tuple<tensor<4xf32>, tensor<4xf32>>
  return %made : tuple<tensor<4xf32>, tensor<4xf32>>
}
"""
    assert mlir.untuple_calls(mlir.parse_module(whole)) == ["Pair"]


def test_shapes_that_depend_on_data_are_found() -> None:
    bounded = """
func.func @main(%a: tensor<8xf32>, %n: tensor<i32>) -> tensor<8xf32> {
  %some = stablehlo.set_dimension_size %a, %n, dim = 0 :
    (tensor<8xf32>, tensor<i32>) -> tensor<?xf32, #stablehlo.bounds<8>>
  return %a : tensor<8xf32>
}
"""
    assert mlir.has_dynamic_shapes(mlir.parse_module(bounded))
    assert not mlir.has_dynamic_shapes(mlir.parse_module(SOURCE))
