"""The room `mlir`: inlining, numbering, hashing, sharding rules, pins, propagation."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard import mlir
from autoshard.errors import UserError
from tests.mlir.interpreting import Pin, Spec


def layer(x, w):
    h = jax.nn.gelu(x @ w[0], approximate=False)
    return h @ w[1], jnp.sum(h)


def step(weights, x):
    def loss(weights):
        y, _ = jax.lax.scan(jax.checkpoint(layer), x, weights)
        return jnp.mean(y**2)

    value, grads = jax.value_and_grad(loss)(weights)
    key = jax.random.key(0)
    kept = jax.random.bernoulli(key, 0.5, grads[0].shape)
    return jax.tree.map(lambda a, g: a - 0.1 * g, weights, (grads[0] * kept, grads[1])), value


WEIGHTS = (jax.ShapeDtypeStruct((3, 16, 64), "float32"), jax.ShapeDtypeStruct((3, 64, 16), "float32"))
X = jax.ShapeDtypeStruct((8, 16), "float32")
SIZES = {"a": 4, "b": 2}


def lowered(sharded: bool = False):
    if not sharded:
        return jax.jit(step, keep_unused=True, donate_argnums=0).lower(WEIGHTS, X)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))

    def put(*dims):
        return NamedSharding(mesh, PartitionSpec(*dims))

    weights = (put(None, "a"), put(None, "b"))
    return jax.jit(
        lambda *args: step(*args),
        keep_unused=True,
        donate_argnums=0,
        in_shardings=(weights, put("a")),
        out_shardings=(weights, put()),
    ).lower(WEIGHTS, X)


def copy(lowering):
    return mlir.parse_module(mlir.to_bytes(lowering.compiler_ir("stablehlo")))


def kinds(module) -> list[str]:
    return [op.name for op in mlir.number_ops(module)]


def test_inlining_leaves_one_function_and_no_calls():
    module = copy(lowered())
    assert "call @" in str(module)
    mlir.inline_calls(module)
    assert [op.operation.name for op in module.body.operations] == ["func.func"]
    assert "call" not in {name.rpartition(".")[2] for name in kinds(module)}
    assert module.operation.verify()
    names = {mlir.location_name(op.location) for op in mlir.number_ops(module)}
    calls = "closed_call", "eval_jaxpr"  # names of the calls in jax 0.10 and 0.11
    assert any(name.endswith(tuple(f"while/body/{call}/dot_general" for call in calls)) for name in names)
    (dot, *_) = [op for op in mlir.number_ops(module) if op.name == "stablehlo.dot_general"]
    assert mlir.code_line(dot).startswith(f"{pathlib.Path(__file__).name}:")


@pytest.mark.heavy
def test_inlining_does_not_change_results():
    args = ((np.full((3, 16, 64), 0.1, "float32"), np.full((3, 64, 16), 0.1, "float32")), np.ones((8, 16), "float32"))
    lowering = lowered()
    mlir.inline_calls(lowering.compiler_ir("stablehlo"))
    (inlined, _), (wanted, _) = lowering.compile()(*args), jax.jit(step)(*args)
    assert np.allclose(inlined[0], wanted[0], rtol=1e-6)


def test_composites_and_nested_calls_are_inlined_and_called_computations_preserved():
    module = mlir.parse_module(
        """
        func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
          %0 = stablehlo.composite "some.thing" %x {decomposition = @twice} : (tensor<4xf32>) -> tensor<4xf32>
          %1 = stablehlo.custom_call @kernel(%0) {called_computations = [@kept]} : (tensor<4xf32>) -> tensor<4xf32>
          return %1 : tensor<4xf32>
        }
        func.func private @twice(%x: tensor<4xf32>) -> tensor<4xf32> {
          %0 = call @once(%x) : (tensor<4xf32>) -> tensor<4xf32>
          %1 = call @once(%0) : (tensor<4xf32>) -> tensor<4xf32>
          return %1 : tensor<4xf32>
        }
        func.func private @once(%x: tensor<4xf32>) -> tensor<4xf32> {
          %0 = stablehlo.add %x, %x : tensor<4xf32>
          return %0 : tensor<4xf32>
        }
        func.func private @kept(%x: tensor<4xf32>) -> tensor<4xf32> {
          return %x : tensor<4xf32>
        }
        """
    )
    mlir.inline_calls(module)
    assert kinds(module) == ["stablehlo.add", "stablehlo.add", "stablehlo.custom_call", "func.return"]
    assert len(list(module.body.operations)) == 2


def test_numbers_descend_into_loops_but_not_into_reducers():
    module = mlir.inline_calls(copy(lowered()))
    numbered = kinds(module)
    loop = numbered.index("stablehlo.while")
    assert "stablehlo.dot_general" in numbered[loop:]
    assert numbered.count("stablehlo.while") == 3, "forward, backward, threefry"
    reduce = next(op for op in mlir.number_ops(module) if op.name == "stablehlo.reduce")
    inside = [op.operation for region in reduce.regions for block in region for op in block.operations]
    assert inside and not any(op in mlir.number_ops(module) for op in inside)


def test_sharded_and_unsharded_lowerings_have_one_hash():
    a, b = mlir.inline_calls(copy(lowered())), mlir.inline_calls(copy(lowered(sharded=True)))
    assert "sdy.mesh" in str(b)
    assert mlir.structure_hash(a) == mlir.structure_hash(b)
    assert kinds(a) == kinds(b)
    assert "sdy.mesh" in str(b), "hashing leaves the module as it is"
    changed = mlir.parse_module(str(a).replace("dense<1.000000e-01>", "dense<2.000000e-01>", 1), a.context)
    assert mlir.structure_hash(changed) != mlir.structure_hash(a)


def test_every_op_but_structure_and_constants_gets_a_rule():
    module = mlir.populate_rules(mlir.inline_calls(copy(lowered())))
    ops = mlir.number_ops(module)
    without = {op.name for op in ops if "sdy.sharding_rule" not in op.attributes}
    assert without <= {
        "stablehlo.constant",
        "stablehlo.iota",
        "stablehlo.while",
        "stablehlo.return",
        "stablehlo.optimization_barrier",
        "func.return",
    }
    erfc = next(op for op in ops if op.name == "chlo.erfc")
    assert "([i, j])->([i, j]) {i=8, j=64}" in str(erfc.attributes["sdy.sharding_rule"])


@pytest.mark.heavy
def test_top_k_reduces_its_last_dim_to_one_that_stays_whole():
    module = copy(jax.jit(lambda x: jax.lax.top_k(x, 2)).lower(jnp.zeros((4, 8))))
    mlir.populate_rules(mlir.inline_calls(module))
    (top,) = [op for op in mlir.number_ops(module) if op.name == "chlo.top_k"]
    rule = str(top.attributes["sdy.sharding_rule"])
    assert "([i, j])->([i, k], [i, k])" in rule and "reduction={j} need_replication={k}" in rule


def test_pins_of_values_arguments_loop_values_and_single_uses():
    module = mlir.inline_calls(copy(lowered()))
    numbered = kinds(module)
    dot, loop = numbered.index("stablehlo.dot_general"), numbered.index("stablehlo.while")
    results = len(mlir.number_ops(module)[loop].results)
    x_inside = next(
        k
        for k, argument in enumerate(mlir.number_ops(module)[loop].regions[1].blocks[0].arguments)
        if str(argument.type) == "tensor<8x16xf32>"
    )
    pins = [
        Pin(dot, 0, Spec((("a",), ("b",)))),
        Pin(dot, 0, Spec(((), ("b",)))),
        Pin(-1, 2, Spec((("b",), ()))),
        Pin(loop, results + x_inside, Spec((("a",), ()))),
        Pin(0, 0, Spec((("a", "b"), ())), operand=(dot, 0)),
    ]
    assert mlir.insert_pins(module, "mesh", SIZES, pins) == 5 == mlir.count_pins(module)
    assert module.operation.verify()
    assert [name for name in kinds(module) if name != "sdy.sharding_constraint"] == numbered
    user = mlir.number_ops(module)[kinds(module).index("stablehlo.dot_general")]
    assert mlir.read_shardings(user.operands[0].owner) == [(("a", "b"), ())]
    mlir.run_propagation(module)
    assert "sdy.reshard" in str(module)


def test_an_operand_that_loops_do_not_change_is_pinned_before_them():
    def run(w, x):
        def outer(h, _):
            return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), h, None, 3)[0], None

        return jax.lax.scan(outer, x, None, 2)[0]

    module = mlir.inline_calls(copy(jax.jit(run).lower(jnp.zeros((16, 16)), jnp.zeros((8, 16)))))
    dot = kinds(module).index("stablehlo.dot_general")
    weight, state = (Pin(0, 0, Spec(((), ("a",))), operand=(dot, k)) for k in (1, 0))
    assert mlir.insert_pins(module, "mesh", SIZES, [weight, state]) == 2 and module.operation.verify()
    user = mlir.number_ops(module)[kinds(module).index("stablehlo.dot_general")]
    pinned = [operand.owner.operation.parent.name for operand in user.operands]
    assert pinned == ["stablehlo.while", "func.func"]


@pytest.mark.parametrize(
    ("pin", "sentence"),
    [
        (Pin(100000, 0, Spec(())), "the plan pins result 0 of op 100000, which is not in this program of"),
        (Pin(0, 7, Spec(())), "the plan pins result 7 of op 0"),
        (Pin(0, 0, Spec(()), operand=(2, 9)), "the plan pins operand 9 of op 2"),
        (Pin(-1, 0, Spec(((),))), "the pin on op -1 result 0 has 1 dims but the value has 3"),
    ],
)
def test_pins_of_another_program_are_refused(pin, sentence):
    module = mlir.inline_calls(copy(lowered()))
    with pytest.raises(UserError) as caught:
        mlir.insert_pins(module, "mesh", SIZES, [pin])
    assert sentence in str(caught.value)


def test_propagation_fills_in_what_arguments_imply():
    module = mlir.inline_calls(copy(lowered()))
    weights = Spec(((), (), ("b",))), Spec(((), ("b",), ()))
    mlir.set_shardings(module, "mesh", SIZES, [*weights, Spec((("a",), ()))], [*weights, None])
    mlir.run_propagation(module)
    dots = [op for op in mlir.number_ops(module) if op.name == "stablehlo.dot_general"]
    assert mlir.read_shardings(dots[0]) == [(("a",), ("b",))]


def test_aliases_are_read_and_set():
    module = copy(lowered())
    assert mlir.aliases(module) == {0: 0, 1: 1}
    assert mlir.aliases(mlir.set_aliases(module, {1: 1})) == {1: 1}
    assert module.operation.verify()


def test_a_body_can_be_replaced_by_one_of_the_same_type():
    target, donor = copy(lowered(sharded=True)), copy(lowered())
    plain = jax.jit(lambda w, x: (w, jnp.sum(x)), keep_unused=True).lower(WEIGHTS, X)
    replaced = mlir.replace_body(copy(plain), mlir.to_bytes(donor))
    assert mlir.structure_hash(replaced) == mlir.structure_hash(mlir.inline_calls(donor))
    mlir.replace_body(target, mlir.to_bytes(plain.compiler_ir("stablehlo")))
    assert '{"a"}' in str(target) and "dot_general" not in str(target)
    other = jax.jit(lambda x: x).lower(X).compiler_ir("stablehlo")
    with pytest.raises(UserError, match="the program that was planned has the type"):
        mlir.replace_body(copy(plain), mlir.to_bytes(other))


def test_meshes_are_reused_or_renamed():
    module = copy(lowered(sharded=True))
    assert mlir.ensure_mesh(module, "other", SIZES) == "mesh"
    assert mlir.ensure_mesh(module, "mesh", {"a": 8}) == "mesh_"


@pytest.mark.parametrize("source", ["module {", b"ML\xefR nothing", "hello"])
def test_what_is_not_mlir_is_refused(source):
    with pytest.raises(UserError, match="the module is not StableHLO that can be read"):
        mlir.parse_module(source)


def test_a_module_without_main_is_refused():
    module = mlir.parse_module("func.func @f(%x: tensor<4xf32>) -> tensor<4xf32> {\n return %x : tensor<4xf32>\n}")
    with pytest.raises(UserError, match="no function named main"):
        mlir.inline_calls(module)


def test_portable_artifacts_are_read():
    from jax import export

    artifact = export.export(jax.jit(lambda x: x + 1))(X).mlir_module_serialized
    assert "stablehlo.add" in kinds(mlir.inline_calls(mlir.parse_module(artifact)))


def test_what_flows_into_what():
    module = mlir.parse_module("""
        func.func @main(%a: tensor<4xf32>, %b: tensor<4x4xf32>) -> tensor<4x4xf32> {
          %0 = stablehlo.dot %b, %b : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
          %1 = stablehlo.broadcast_in_dim %a, dims = [1] : (tensor<4xf32>) -> tensor<4x4xf32>
          %2 = stablehlo.add %0, %1 : tensor<4x4xf32>
          %3 = stablehlo.negate %2 : tensor<4x4xf32>
          return %3 : tensor<4x4xf32>
        }""")
    flow = mlir.flow(module)
    assert flow.operands[:4] == [((-1, 1), (-1, 1)), ((-1, 0),), ((0, 0), (1, 0)), ((2, 0),)]
    assert flow.between({(0, 0)}, (3, 0)) == {1, 2, 3}
    assert list(flow.unchanged({0, 1, 2, 3}, (3, 0))) == [(2, 0), (0, 0), (1, 0)]
    assert list(flow.unchanged({3}, (3, 0))) == []
    assert flow.users == {(-1, 0): [1], (-1, 1): [0, 0], (0, 0): [2], (1, 0): [2], (2, 0): [3]}


def test_what_a_sum_keeps_and_what_is_only_a_view():
    module = mlir.parse_module("""
        func.func @main(%a: tensor<4x2x3xf32>) -> tensor<2xf32> {
          %0 = stablehlo.reshape %a : (tensor<4x2x3xf32>) -> tensor<2x4x3xf32>
          %zero = stablehlo.constant dense<0.0> : tensor<f32>
          %1 = stablehlo.reduce(%0 init: %zero) applies stablehlo.add across dimensions = [1, 2]
            : (tensor<2x4x3xf32>, tensor<f32>) -> tensor<2xf32>
          return %1 : tensor<2xf32>
        }""")
    flow = mlir.flow(module)
    kinds = [op.name for op in mlir.number_ops(module)]
    assert flow.views == {kinds.index("stablehlo.reshape"): (0, None, 2)}
    assert flow.unreduced_dims == {kinds.index("stablehlo.reduce"): (0,)}


def test_where_views_put_dims_and_what_is_spread_is_found_again():
    module = mlir.parse_module("""
        func.func @main(%a: tensor<16x32x8xf32>, %b: tensor<8xf32>) -> (tensor<1x512x8xf32>, tensor<8x16x32xf32>) {
          %0 = stablehlo.reshape %a : (tensor<16x32x8xf32>) -> tensor<1x512x8xf32>
          %1 = stablehlo.transpose %a, dims = [2, 0, 1] : (tensor<16x32x8xf32>) -> tensor<8x16x32xf32>
          %2 = stablehlo.broadcast_in_dim %b, dims = [2] : (tensor<8xf32>) -> tensor<1x512x8xf32>
          return %0, %1 : tensor<1x512x8xf32>, tensor<8x16x32xf32>
        }""")
    flow = mlir.flow(module)
    assert flow.views == {0: (1, None, 2), 1: (1, 2, 0)}
    assert flow.broadcast_dims == {2: (2,)}


def test_results_are_cut_with_what_only_they_need():
    module = mlir.parse_module("""
        func.func @main(%a: tensor<4xf32>, %b: tensor<4xf32>)
            -> (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<4xf32>) {
          %0 = stablehlo.multiply %a, %b : tensor<4xf32>
          %1 = stablehlo.subtract %0, %b : tensor<4xf32>
          %2 = stablehlo.add %a, %b : tensor<4xf32>
          %3 = stablehlo.negate %2 : tensor<4xf32>
          return %3, %1, %b, %2 : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<4xf32>
        }""")
    assert mlir.cut_results(module, 1) == [None, (-1, 1), (0, 0)]
    kinds = [op.name for op in mlir.number_ops(module)]
    assert kinds == ["stablehlo.add", "stablehlo.negate", "func.return"]


def test_a_loop_that_only_cut_results_need_goes_with_its_body():
    module = mlir.parse_module("""
        func.func @main(%a: tensor<i32>) -> (tensor<i32>, tensor<i32>, tensor<i32>) {
          %0 = stablehlo.while(%i = %a) : tensor<i32>
            cond {
              %5 = stablehlo.compare LT, %i, %a : (tensor<i32>, tensor<i32>) -> tensor<i1>
              stablehlo.return %5 : tensor<i1>
            } do {
              %6 = stablehlo.add %i, %i : tensor<i32>
              stablehlo.return %6 : tensor<i32>
            }
          %1 = stablehlo.multiply %a, %a : tensor<i32>
          %2 = stablehlo.negate %1 : tensor<i32>
          return %2, %0, %1 : tensor<i32>, tensor<i32>, tensor<i32>
        }""")
    assert mlir.cut_results(module, 1) == [None, (0, 0)]
    assert [op.name for op in mlir.number_ops(module)] == ["stablehlo.multiply", "stablehlo.negate", "func.return"]


def spanning(*axes: str, mesh: str = "mesh_0") -> Any:
    """Return a module with an all-reduce over some axes, in the syntax of jax 0.11."""
    refs = ", ".join(f'#stablehlo.axis_ref<name = "{axis}">' for axis in axes)
    sizes = ", ".join(f'{{name = "{name}", size = {size} : i64}}' for name, size in (("a", 4), ("b", 2)))
    return mlir.parse_module(
        f"""module {{
  sdy.mesh @{mesh} = <["a"=4, "b"=2]> {{stablehlo.mesh = {{axes = [{sizes}]}}}}
  sdy.mesh @planned = <["a"=4, "b"=2]>
  func.func public @main(%0: tensor<2x4xf32>) -> tensor<2x4xf32> {{
    %1 = "stablehlo.all_reduce"(%0) <{{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
      replica_groups = #stablehlo.replica_group_mesh_axes<mesh = @{mesh}, axes = [{refs}]>, use_global_device_ids}}> ({{
      ^bb0(%2: tensor<f32>, %3: tensor<f32>):
        %4 = stablehlo.add %2, %3 : tensor<f32>
        stablehlo.return %4 : tensor<f32>
    }}) : (tensor<2x4xf32>) -> tensor<2x4xf32>
    return %1 : tensor<2x4xf32>
  }}
}}""".encode()
    )


@pytest.mark.parametrize(
    ("axes", "groups"),
    [
        (["a"], ((0, 2, 4, 6), (1, 3, 5, 7))),
        (["b"], ((0, 1), (2, 3), (4, 5), (6, 7))),
        (["a", "b"], (tuple(range(8)),)),
        (["b", "a"], ((0, 2, 4, 6, 1, 3, 5, 7),)),
    ],
)
def test_a_collective_may_name_the_axes_that_it_spans(axes: list[str], groups: tuple[tuple[int, ...], ...]):
    module = spanning(*axes)
    assert mlir.device_groups(mlir.number_ops(module)[0]) == groups


def test_collectives_that_name_axes_are_put_on_another_mesh():
    module = spanning("b")
    other = spanning("b", mesh="mesh")
    assert mlir.structure_hash(module) == mlir.structure_hash(other) != mlir.structure_hash(spanning("a"))
    before = mlir.device_groups(mlir.number_ops(module)[0])
    mlir.use_mesh(module, "planned")
    assert module.operation.verify() and "<mesh = @planned," in str(module)
    assert mlir.device_groups(mlir.number_ops(module)[0]) == before


def test_equal_modules_are_the_same_hlo_in_one_process():
    """Compare the bytes of two equal modules. XLA numbers modules: with other bytes PyTorch/XLA would compile again."""

    def lowered() -> Any:
        return mlir.parse_module(mlir.to_bytes(jax.jit(lambda x: jnp.tanh(x) @ x).lower(np.ones((4, 4))).compiler_ir()))

    first, second = (mlir.to_hlo_proto(lowered()) for _ in range(2))
    assert first == second
    back = str(mlir.parse_module(mlir.hlo_to_stablehlo(first, "it")))
    assert "stablehlo.tanh" in back and "stablehlo.dot" in back
