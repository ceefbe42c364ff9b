"""Layouts of values that are offloaded to the host: the loops that write and read them use one dim order."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jaxlib.mlir import ir

from autoshard import mlir
from autoshard.mlir.module import collect
from autoshard.program import trace


LAYERS, WIDTH, TOKENS = 3, 16, 8
PLACEMENT, CONSTRAINT = "annotate_device_placement", "LayoutConstraint"


def offloading() -> Callable[..., jax.Array]:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["inner"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(checkpoint_name(x @ weight, "inner")) + x, None

    return lambda weights, x: jax.lax.scan(jax.checkpoint(layer, policy=policy), x, weights)[0].sum()


def calls(module: ir.Module, target: str) -> list[ir.Operation]:
    found = collect(mlir.main_function(module).operation, {"stablehlo.custom_call"})
    return [op for op in found if str(op.attributes["call_target_name"]).strip('"') == target]


@pytest.fixture
def module() -> ir.Module:
    sizes = (LAYERS, WIDTH, WIDTH), (TOKENS, WIDTH)
    arguments = [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]
    return mlir.inline_calls(mlir.parse_module(trace(jax.grad(offloading()), arguments).module))


def test_every_value_that_goes_or_comes_is_laid_out_in_order(module: ir.Module) -> None:
    placements = len(calls(module, PLACEMENT))
    assert placements == 2
    mlir.order_hosted(module)
    assert module.operation.verify()
    sent, fetched = calls(module, PLACEMENT)
    before, after = calls(module, CONSTRAINT)
    assert sent.operands[0] == before.results[0]
    assert [use.owner for use in fetched.results[0].uses] == [after]
    for constraint in (before, after):
        assert "[1, 0]" in str(constraint.attributes["result_layouts"])


def test_what_has_no_host_is_left_as_it_is() -> None:
    plain = trace(lambda x: x * 2, [jax.ShapeDtypeStruct((4,), jnp.float32)])
    module = mlir.parse_module(plain.module)
    text = str(module)
    assert str(mlir.order_hosted(module)) == text


def test_constraints_can_be_dropped_again(module: ir.Module) -> None:
    text = str(module)
    mlir.drop_layouts(mlir.order_hosted(module))
    assert str(module) == text
