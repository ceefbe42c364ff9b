"""Rewritten modules compute the same: StableHLO's reference interpreter runs them before and after."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard import mlir
from tests.mlir.interpreting import interpreted, random


def check_same(module: Any, change: Callable[[Any], Any], *arguments: Any, rtol: float = 0) -> None:
    wanted = interpreted(module, *arguments)
    change(module)
    assert module.operation.verify()
    for found, result in zip(interpreted(module, *arguments), wanted, strict=True):
        np.testing.assert_allclose(found, result, rtol=rtol)


def lowered(fn: Callable[..., Any], *arguments: Any) -> Any:
    return mlir.parse_module(jax.jit(fn, keep_unused=True).lower(*arguments).as_text())


LOOPS_AND_CALLS = """
func.func @main(%x: tensor<4xf32>, %n: tensor<i32>) -> (tensor<4xf32>, tensor<i32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %0:2 = stablehlo.while(%i = %zero, %v = %x) : tensor<i32>, tensor<4xf32>
    cond {
      %c = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %one = stablehlo.constant dense<1> : tensor<i32>
      %next = stablehlo.add %i, %one : tensor<i32>
      %new = func.call @thrice(%v) : (tensor<4xf32>) -> tensor<4xf32>
      stablehlo.return %next, %new : tensor<i32>, tensor<4xf32>
    }
  %1 = "stablehlo.case"(%n) ({
    %a = func.call @thrice(%0#1) : (tensor<4xf32>) -> tensor<4xf32>
    stablehlo.return %a : tensor<4xf32>
  }, {
    stablehlo.return %x : tensor<4xf32>
  }) : (tensor<i32>) -> tensor<4xf32>
  return %1, %0#0 : tensor<4xf32>, tensor<i32>
}
func.func private @thrice(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = call @twice(%x) : (tensor<4xf32>) -> tensor<4xf32>
  %1 = stablehlo.add %0, %x : tensor<4xf32>
  return %1 : tensor<4xf32>
}
func.func private @twice(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.tuple %x, %x : tuple<tensor<4xf32>, tensor<4xf32>>
  %1 = stablehlo.get_tuple_element %0[0] : (tuple<tensor<4xf32>, tensor<4xf32>>) -> tensor<4xf32>
  %2 = stablehlo.get_tuple_element %0[1] : (tuple<tensor<4xf32>, tensor<4xf32>>) -> tensor<4xf32>
  %3 = stablehlo.add %1, %2 : tensor<4xf32>
  return %3 : tensor<4xf32>
}
"""


@pytest.mark.parametrize("trips", [0, 1, 3])
def test_calls_in_loops_and_branches_are_inlined_without_a_change(trips: int) -> None:
    module = mlir.parse_module(LOOPS_AND_CALLS)
    check_same(module, mlir.inline_calls, random(4), np.int32(trips))
    assert "call" not in str(module) and "tuple" not in str(module)


def norm_module(kind: str, dtype: str) -> Any:
    x, row = f"tensor<4x3x2x{dtype}>", f"tensor<3x{dtype}>"
    takes = {"training": (x, row, row), "inference": (x, row, row, row, row), "grad": (x, row, row, row, x)}[kind]
    gives = {"training": (x, row, row), "inference": (x,), "grad": (x, row, row)}[kind]
    values = ", ".join(f"%{k}" for k in range(len(takes)))
    names = ", ".join(f"%r#{k}" for k in range(len(gives))) if len(gives) > 1 else "%r"
    return mlir.parse_module(f"""
        func.func @main({", ".join(f"%{k}: {kind}" for k, kind in enumerate(takes))}) -> ({", ".join(gives)}) {{
          %r{f":{len(gives)}" if len(gives) > 1 else ""} = "stablehlo.batch_norm_{kind}"({values})
            {{epsilon = 1.0e-1 : f32, feature_index = 1 : i64}} : ({", ".join(takes)}) -> ({", ".join(gives)})
          return {names} : {", ".join(gives)}
        }}""")


@pytest.mark.heavy
@pytest.mark.parametrize(("dtype", "rtol"), [("f32", 1e-4), ("f64", 1e-7)])
def test_batch_norms_are_what_the_specification_says(dtype: str, rtol: float) -> None:
    """Compare with numpy, and the gradients with those that JAX derives."""
    number = {"f32": np.float32, "f64": np.float64}[dtype]
    x, g = (random(4, 3, 2, seed=seed).astype(number) for seed in (1, 2))
    scale, offset, mean, spread = (random(3, seed=seed).astype(number) for seed in (3, 4, 5, 6))

    def column(row: Any) -> Any:
        return row[None, :, None]

    def trained(x: Any, scale: Any, offset: Any) -> Any:
        centre, variance = x.mean((0, 2)), x.var((0, 2))
        return column(scale) * (x - column(centre)) / (column(variance) + 0.1) ** 0.5 + column(offset)

    def results(kind: str, *arguments: Any) -> list[np.ndarray]:
        module = norm_module(kind, dtype)
        mlir.inline_calls(module)
        assert "batch_norm" not in str(module) and module.operation.verify()
        return interpreted(module, *arguments)

    spread = spread**2
    wanted = column(scale) * (x - column(mean)) / np.sqrt(column(spread) + 0.1) + column(offset)
    np.testing.assert_allclose(results("inference", x, scale, offset, mean, spread)[0], wanted, rtol=rtol, atol=1e-6)
    for found, each in zip(
        results("training", x, scale, offset), (trained(x, scale, offset), x.mean((0, 2)), x.var((0, 2))), strict=True
    ):
        np.testing.assert_allclose(found, each, rtol=rtol, atol=1e-6)
    _, pull = jax.vjp(trained, *(jnp.asarray(each, jnp.float32) for each in (x, scale, offset)))
    for found, each in zip(
        results("grad", x, scale, x.mean((0, 2)), x.var((0, 2)), g), pull(jnp.asarray(g, jnp.float32)), strict=True
    ):
        np.testing.assert_allclose(found, each, rtol=1e-3, atol=1e-5)


WINDOW = (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (0, 1), (0, 0))


@pytest.mark.parametrize(("largest", "platform"), [(True, "cpu"), (False, "cpu"), (True, "tpu"), (False, "tpu")])
def test_gradients_of_pooling_have_one_form_and_compute_the_same(largest: bool, platform: str) -> None:
    start, fn = (-jnp.inf, lax.max) if largest else (jnp.inf, lax.min)

    def run(x: Any) -> Any:
        return jax.grad(lambda x: (lax.reduce_window(x, start, fn, *WINDOW) ** 2).sum())(x)

    x = random(2, 8, 8, 3)
    module = mlir.parse_module(jax.jit(run).trace(x).lower(lowering_platforms=(platform,)).as_text())
    check_same(module, mlir.inline_calls, x)
    assert str(module).count("stablehlo.pad") == 0
    check_same(module, mlir.unfold_pooling, x)
    assert str(module).count("stablehlo.pad") == 1
    check_same(module, mlir.inline_calls, x)
    assert str(module).count("stablehlo.pad") == 0


@pytest.mark.parametrize("start", [-9, -1, 0, 3, 12, 15, 99])
def test_guards_of_indices_keep_what_is_read_and_written(start: int) -> None:
    """Run with starts out of range too, which StableHLO clamps."""

    def run(x: Any, u: Any, i: Any) -> Any:
        read = lax.dynamic_slice(x, (i, 0), (4, 8))
        rows = lax.gather(
            x, jnp.stack([i, i + 1])[:, None],
            lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(0,)),
            (3, 8), mode="clip",
        )  # fmt: skip
        return read, lax.dynamic_update_slice(x, u, (i, 0)), rows

    module = mlir.inline_calls(lowered(run, random(16, 8), random(2, 8), np.int32(start)))
    clamps = str(module).count("stablehlo.clamp")
    check_same(module, mlir.guard_indexing, random(16, 8), random(2, 8, seed=1), np.int32(start))
    assert str(module).count("stablehlo.clamp") > clamps


def test_what_is_left_of_cut_results_is_the_same() -> None:
    def run(x: Any, w: Any) -> Any:
        y = jnp.tanh(x @ w)
        return y, (y**2).sum(), x @ w.T

    arguments = random(4, 4), random(4, 4, seed=1)
    module = mlir.inline_calls(lowered(run, *arguments))
    wanted = interpreted(module, *arguments)
    dropped = mlir.cut_results(module, 1)
    assert module.operation.verify() and str(module).count("dot_general") == 1 and dropped == [None, None]
    (left,) = interpreted(module, *arguments)
    np.testing.assert_array_equal(left, wanted[0])


def test_an_argument_in_full_replaces_the_spread_one() -> None:
    """Compare with the module whose call is dropped instead; in full the argument has the elements of the spread."""
    source = """
        func.func @main(%a: tensor<1xf32>, %b: tensor<4x3xf32>) -> tensor<4x3xf32> {
          %0 = stablehlo.reshape %a : (tensor<1xf32>) -> tensor<f32>
          %1 = stablehlo.broadcast_in_dim %0, dims = [] : (tensor<f32>) -> tensor<4x3xf32>
          %2 = stablehlo.custom_call @Sharding(%1) {mhlo.sharding = "{replicated}"}
            : (tensor<4x3xf32>) -> tensor<4x3xf32>
          %3 = stablehlo.multiply %2, %b : tensor<4x3xf32>
          return %3 : tensor<4x3xf32>
        }"""
    module, other = mlir.parse_module(source), mlir.drop_gspmd(mlir.parse_module(source))
    mlir.give_whole(module, {0: (4, 3)})
    b = random(4, 3)
    (found,), (wanted,) = interpreted(module, np.full((4, 3), 7, "float32"), b), interpreted(other, np.float32([7]), b)
    np.testing.assert_array_equal(found, wanted)


CONSTRAINED = """
sdy.mesh @mesh = <["a b"=2, "c"=4]>
func.func @main(%x: tensor<8x4xf32> {{sdy.sharding = #sdy.sharding<@mesh, [{{"c"}}, {{?}}]>}}) -> tensor<8x4xf32> {{
  %0 = stablehlo.sine %x : tensor<8x4xf32>
  {constraint}
  %2 = stablehlo.add %1, %x : tensor<8x4xf32>
  return %2 : tensor<8x4xf32>
}}
"""
AS_OP = '%1 = sdy.sharding_constraint %0 <@mesh, [{"c"}, {"a b"}]> : tensor<8x4xf32>'
AS_CALL = (
    '%1 = stablehlo.custom_call @Sharding(%0) {mhlo.sharding = "{devices=[4,2]<=[2,4]T(1,0)}"} '
    ": (tensor<8x4xf32>) -> tensor<8x4xf32>"
)


@pytest.mark.parametrize("constraint", [AS_OP, AS_CALL])
def test_a_program_without_its_constraints_computes_the_same(constraint: str) -> None:
    module = mlir.parse_module(CONSTRAINED.format(constraint=constraint))
    counts = mlir.count_constraints(module)
    assert (counts.constraints, counts.arguments, counts.idle) == (1, 1, 0)
    mlir.drop_constraints(module)
    counts = mlir.count_constraints(module)
    assert (counts.constraints, counts.arguments) == (0, 0) and module.operation.verify()
    x = random(8, 4)
    np.testing.assert_allclose(interpreted(module, x)[0], np.sin(x) + x, rtol=1e-6)


def test_constraints_become_calls_and_calls_constraints() -> None:
    module = mlir.parse_module(CONSTRAINED.format(constraint=AS_OP))
    seen: list[Any] = []

    def write(dims: Any) -> str:
        seen.append(dims)
        return "{devices=[4,2]<=[2,4]T(1,0)}"

    assert mlir.custom_call_pins(module, write) == 1 and seen == [(("c",), ("a b",))]
    names = [op.name for op in mlir.number_ops(module)]
    assert names == ["stablehlo.sine", "stablehlo.custom_call", "stablehlo.add", "func.return"]
    assert not mlir.meshes_of(module)
    read: list[Any] = []

    def parse(text: str, shape: tuple[int, ...]) -> Any:
        read.append((text, shape))
        return (("c",), ("a b",))

    assert mlir.constrain_custom_calls(module, "mesh", {"a b": 2, "c": 4}, parse) == 0
    assert read == [("{devices=[4,2]<=[2,4]T(1,0)}", (8, 4))]
    names = [op.name for op in mlir.number_ops(module)]
    assert names == ["stablehlo.sine", "sdy.sharding_constraint", "stablehlo.add", "func.return"]
    assert mlir.read_shardings(mlir.number_ops(module)[1]) == [(("c",), ("a b",))] and module.operation.verify()
    module = mlir.parse_module(CONSTRAINED.format(constraint=AS_CALL))
    assert mlir.constrain_custom_calls(module, "mesh", {"c": 4}, lambda text, shape: None) == 1
    assert [op.name for op in mlir.number_ops(module)] == ["stablehlo.sine", "stablehlo.add", "func.return"]


@dataclasses.dataclass(frozen=True)
class Spec:
    dims: tuple[tuple[str, ...], ...]


def test_a_call_is_replaced_by_the_function_that_it_stands_for() -> None:
    """Emit a call in a module on the mesh `mesh`; its body has constraints on a mesh of another name."""
    module = mlir.parse_module("""
        sdy.mesh @mesh = <["a b"=2, "c"=4]>
        func.func @main(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
          %0 = stablehlo.sine %x : tensor<8x4xf32>
          return %0 : tensor<8x4xf32>
        }""")
    body = mlir.parse_module(CONSTRAINED.format(constraint=AS_OP).replace("@mesh", '@"mesh, of body"'))
    (sine, *_) = mlir.number_ops(module)
    mlir.splice(module, {0: sine}, {0: mlir.to_bytes(body)}, {"a b": 2, "c": 4})
    assert module.operation.verify() and "of body" not in str(module)
    (constraint,) = [op for op in mlir.number_ops(module) if op.name == "sdy.sharding_constraint"]
    assert mlir.read_shardings(constraint) == [(("c",), ("a b",))]
    mlir.drop_constraints(module)
    x = random(8, 4)
    np.testing.assert_allclose(interpreted(module, x)[0], np.sin(x) + x, rtol=1e-6)


def test_files_of_every_form_compute_the_same() -> None:
    """Convert to an HLO proto and back, to bytecode and to a portable artifact."""
    arguments = random(4, 6), random(6, 3, seed=1)
    module = mlir.inline_calls(lowered(lambda x, w: (jnp.tanh(x[:, :3] * w[:4]), x.sum(0)), *arguments))
    wanted = interpreted(module, *arguments)
    forms = mlir.hlo_to_stablehlo(mlir.to_hlo_proto(module), "it"), mlir.to_bytes(module), mlir.to_portable(module)
    for form in forms:
        read = mlir.read_file_module(form, "it")
        entry = mlir.take_entry(read, "it")
        assert entry.arguments == (((4, 6), "float32"), ((6, 3), "float32"))
        assert entry.results == (((4, 3), "float32"), ((6,), "float32"))
        for found, each in zip(interpreted(mlir.inline_calls(read), *arguments), wanted, strict=True):
            np.testing.assert_allclose(found, each, rtol=1e-6)


def test_arguments_are_called_as_their_locations_are() -> None:
    names = "%a: tensor<f32> loc({}), %b: tensor<f32> loc({})"
    source = "func.func @main({}) -> tensor<f32> {{\n return %a : tensor<f32>\n}}"
    cases = {
        ('"x"', '"y"'): ("x", "y"),
        ('"params[\\22w\\22]"', "\"params['b']\""): ('params["w"]', "params['b']"),
        ('"x"("f.py":1:2)', '"y:"(callsite("f"("f.py":1:2) at "g.py":3:4))'): ("x", "y"),
        ('"x"', '"x"'): None,  # not unique
        ('"x"', '"f.py":1:2'): None,  # a line is no name
    }
    for (first, second), wanted in cases.items():
        module = mlir.read_file_module(source.format(names.format(first, second)), "it")
        assert mlir.argument_names(module) == wanted
    assert mlir.argument_names(mlir.parse_module(source.format("%a: tensor<f32>"))) is None


def test_the_buffers_that_results_reuse_are_those_that_xla_reads() -> None:
    """Compare with the alias in the text of the HLO module that XLA makes of the program."""
    module = mlir.parse_module(
        jax.jit(lambda a, b, c: (c + 1, a * 2, b), donate_argnums=(0, 2)).lower(*(np.ones(4),) * 3).as_text()
    )
    assert mlir.donated(module) == {0, 2}
    entry = mlir.take_entry(mlir.read_file_module(mlir.text_of(module), "it"), "it")
    back = mlir.read_file_module(mlir.hlo_to_stablehlo(mlir.hlo_text_to_proto(ALIASED, "it"), "it"), "it")
    assert entry.aliases == {0: 0, 2: 1} == mlir.take_entry(back, "it").aliases


ALIASED = """HloModule it, input_output_alias={ {0}: (0, {}, may-alias), {1}: (2, {}, must-alias) }

ENTRY main {
  a = f32[4] parameter(0)
  b = f32[4] parameter(1)
  c = f32[4] parameter(2)
  d = f32[4] negate(c)
  e = f32[4] negate(a)
  ROOT r = (f32[4], f32[4], f32[4]) tuple(d, e, b)
}
"""
