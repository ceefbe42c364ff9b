"""Arguments without elements that stand in for larger ones."""

import pytest

from autoshard import mlir


MODULE = """
func.func @main(%a: tensor<1x1xf32>, %b: tensor<4xf32>, %c: tensor<1xf32>) -> (tensor<4x4xf32>, tensor<1x1xf32>) {
  %0 = stablehlo.reshape %a : (tensor<1x1xf32>) -> tensor<f32>
  %1 = stablehlo.broadcast_in_dim %0, dims = [] : (tensor<f32>) -> tensor<8x4xf32>
  %2 = stablehlo.custom_call @Sharding(%1) {mhlo.sharding = "{replicated}"} : (tensor<8x4xf32>) -> tensor<8x4xf32>
  %3 = stablehlo.dot_general %2, %2, contracting_dims = [0] x [0] :
    (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
  %4 = stablehlo.custom_call @Sharding(%c) {mhlo.sharding = "{replicated}"} : (tensor<1xf32>) -> tensor<1xf32>
  %5 = stablehlo.reshape %4 : (tensor<1xf32>) -> tensor<1x1xf32>
  return %3, %5 : tensor<4x4xf32>, tensor<1x1xf32>
}
"""


def test_what_is_spread_out_of_an_argument_becomes_the_argument():
    module = mlir.parse_module(MODULE)
    mlir.give_whole(module, {0: (8, 4), 2: (1,)})
    assert module.operation.verify()
    types, _ = mlir.main_types(module)
    assert [shape for shape, _ in types] == [(8, 4), (4,), (1,)]
    names = [op.operation.name for op in mlir.main_block(module).operations]
    assert names == ["stablehlo.dot_general", "stablehlo.reshape", "func.return"]
    dot = mlir.main_block(module).operations[0].operation
    assert [value == mlir.main_block(module).arguments[0] for value in dot.operands] == [True, True]


@pytest.mark.parametrize("shapes", [{0: (4, 8)}, {1: (4, 4)}])
def test_an_argument_that_is_not_spread_to_the_shape_is_an_error(shapes: dict[int, tuple[int, ...]]):
    with pytest.raises(ValueError, match="is not spread to"):
        mlir.give_whole(mlir.parse_module(MODULE), shapes)
