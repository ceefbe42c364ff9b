"""Programs in files: StableHLO text and bytecode, jax.export artifacts, HLO protos and dumps."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import mlir
from autoshard.errors import UserError
from autoshard.program import load_artifact, open_source


S = jax.ShapeDtypeStruct
F = jnp.float32


def _step(params, batch):
    def loss(p):
        return jnp.mean((jnp.tanh(batch["x"] @ p["up"]) @ p["down"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


PARAMS = {"down": S((16, 4), F), "up": S((8, 16), F)}
BATCH = {"x": S((6, 8), F), "y": S((6, 4), F)}


def _lowered():
    return jax.jit(_step, donate_argnums=0, keep_unused=True).lower(PARAMS, BATCH)


def _text(path):
    path.write_text(_lowered().as_text(debug_info=True))


def _plain_text(path):
    path.write_text(_lowered().as_text())


def _bytecode(path):
    with path.open("wb") as file:
        _lowered().compiler_ir("stablehlo").operation.write_bytecode(file)


def _portable(path):
    path.write_bytes(_exported().mlir_module_serialized)


def _hlo_proto(path):
    path.write_bytes(_lowered().compiler_ir("hlo").as_serialized_hlo_module_proto())


def _hlo_text(path):
    path.write_text(_lowered().compiler_ir("hlo").as_hlo_text())


def _exported():
    return jax.export.export(jax.jit(_step, donate_argnums=0))(PARAMS, BATCH)


def _artifact(path):
    path.write_bytes(_exported().serialize())


NAMED = ["params.down", "params.up", "batch.x", "batch.y"]
BARE = ["arg0", "arg1", "arg2", "arg3"]


@pytest.mark.parametrize(
    ("write", "name", "names"),
    [
        (_text, "step.mlir", NAMED),
        (_plain_text, "step.mlir", BARE),
        (_bytecode, "step.mlirbc", NAMED),
        (_portable, "step.bc", NAMED),
        (_artifact, "step.jax_export", NAMED),
        (_hlo_proto, "step.pb", NAMED),
        (_hlo_text, "step.hlo", NAMED),
    ],
)
def test_every_form_computes_the_same(tmp_path, write, name, names):
    path = tmp_path / name
    write(path)
    program = open_source(str(path))
    assert [a.name for a in program.arguments] == names and program.name == "step"
    assert [a.shape for a in program.arguments] == [(16, 4), (8, 16), (6, 8), (6, 4)]
    assert [a.result for a in program.arguments] == [0, 1, None, None]
    assert [a.donated for a in program.arguments] == [True, True, False, False]
    assert [a.role.value for a in program.arguments] == ["parameter", "parameter", "batch", "batch"]
    assert program.training and program.module[:4] == b"ML\xefR"
    rng = np.random.default_rng(0)
    leaves = [rng.standard_normal(a.shape).astype(np.float32) for a in program.arguments]
    got = jax.tree.leaves(jax.jit(program.fn)(*jax.tree.unflatten(jax.tree.structure(program.args), leaves)))
    expected = jax.tree.leaves(jax.jit(_step)(dict(down=leaves[0], up=leaves[1]), dict(x=leaves[2], y=leaves[3])))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def _flat_step(up, down, up_mean, down_mean, x):
    gradients = jax.grad(lambda w: ((jax.nn.relu(x @ w[0]) @ w[1]) ** 2).mean())((up, down))
    means = [0.9 * mean + gradient for mean, gradient in zip((up_mean, down_mean), gradients, strict=True)]
    return up - 0.1 * means[0], down - 0.1 * means[1], *means


@pytest.mark.parametrize("platforms", [["cpu"], ["tpu", "cuda"]])
@pytest.mark.parametrize("donated", [(), (0, 1, 2, 3)])
def test_an_exported_step_without_structure_has_optimizer_state(tmp_path, platforms, donated):
    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in [(8, 16), (16, 4)] * 2 + [(6, 8)]]
    exported = jax.export.export(jax.jit(_flat_step, donate_argnums=donated), platforms=platforms)(*shapes)
    path = tmp_path / "step.jax_export"
    path.write_bytes(exported.serialize())
    program = open_source(str(path))
    assert [a.role.value for a in program.arguments] == ["parameter"] * 2 + ["optimizer_state"] * 2 + ["batch"]
    assert [a.result for a in program.arguments] == [0, 1, 2, 3, None]


def test_roles_can_be_stated_for_a_file(tmp_path):
    path = tmp_path / "forward.mlir"
    path.write_text(jax.jit(lambda w, x: x @ w).lower(S((8, 4), F), S((2, 8), F)).as_text())
    assert [a.role.value for a in load_artifact(path).arguments] == ["parameter", "batch"]
    program = open_source(str(path), roles={"arg0": "batch", "arg1": "parameter"})
    assert [a.role.value for a in program.arguments] == ["batch", "parameter"]
    with pytest.raises(UserError, match="roles: no argument is called `arg7` or starts with it"):
        open_source(str(path), roles={"arg7": "batch"})


def test_shardings_on_the_arguments_of_a_file_are_dropped(tmp_path):
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    path = tmp_path / "split.mlir"
    path.write_text(jax.jit(lambda x: x * 2, in_shardings=split).lower(S((8, 4), F)).as_text())
    program = load_artifact(path)
    assert program.notes[0] == "Shardings on 1 arguments of the file were dropped."


def _write_bytes(data):
    return lambda path: path.write_bytes(data)


def _optimised(path):
    path.write_text(_lowered().compile().as_text())


def _symbolic(path):
    shape = jax.export.symbolic_shape("n, 4")
    path.write_bytes(jax.export.export(jax.jit(lambda x: x * 2))(S(shape, F)).serialize())


def _truncated(path):
    path.write_bytes(_exported().mlir_module_serialized[:200])


def _identity(name, kind):
    return f"module {{ func.func public @{name}(%a: {kind}) -> {kind} {{ return %a : {kind} }} }}"


def _dynamic(path):
    path.write_text(
        "module { func.func public @main(%a: tensor<?x4xf32>) -> tensor<?x4xf32> { return %a : tensor<?x4xf32> } }"
    )


def _no_main(path):
    path.write_text(_identity("f", "tensor<4xf32>"))


def _wide(path):
    path.write_text(
        "module { func.func public @main(%a: tensor<4xi64>) -> tensor<4xi64> { return %a : tensor<4xi64> } }"
    )


def _mistyped(path):
    path.write_text(_lowered().as_text().replace("stablehlo.tanh", "stablehlo.tanhh"))


@pytest.mark.parametrize(
    ("write", "name", "sentence"),
    [
        (lambda path: None, "missing.mlir", "there is no file `.*missing.mlir`"),
        (_write_bytes(b""), "empty.mlir", "is empty; expected a StableHLO module"),
        (_write_bytes(b"hello"), "word.mlir", "is text but no module"),
        (_write_bytes(b'{"schema": 1, "format": "autoshard-plan"}'), "p.json", "is a plan and no program: name the"),
        (
            _write_bytes(bytes(range(256)) * 4),
            "noise.bin",
            "is neither a StableHLO module nor a readable",
        ),
        (_write_bytes(b"HloModule broken {"), "broken.hlo", "is not a readable HLO module"),
        (_write_bytes(b"\x00\x01\x02\xff" * 9), "noise.pb", "does not convert from HLO to StableHLO"),
        (_truncated, "cut.bc", "is not a readable StableHLO module"),
        (_mistyped, "typo.mlir", "is not a readable StableHLO module: .*tanhh"),
        (_optimised, "after.hlo", "is an HLO dump after optimisation"),
        (_symbolic, "any.jax_export", "was exported with symbolic shapes"),
        (_dynamic, "any.mlir", r"argument 0 of `main` has the dynamic shape tensor<\?x4xf32>"),
        (_no_main, "f.mlir", r"has no function `main` \(its functions: `f`\)"),
        (
            _wide,
            "wide.mlir",
            r"argument 0 of `main` is int64\[4\], and JAX keeps 64-bit values only",
        ),
    ],
)
def test_sentences(tmp_path, write, name, sentence):
    path = tmp_path / name
    write(path)
    with pytest.raises(UserError, match=sentence):
        open_source(str(path))


RECURSIVE = """
module {{
  func.func public @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {{
    %0 = {main} : (tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }}
  func.func private @a(%arg0: tensor<4xf32>) -> tensor<4xf32> {{
    %0 = {a} : (tensor<4xf32>) -> tensor<4xf32>
    return %0 : tensor<4xf32>
  }}
}}
"""


@pytest.mark.parametrize(
    ("main", "a", "chain"),
    [
        ("func.call @main(%arg0)", "stablehlo.negate %arg0", "`main` calls `main`"),
        ("func.call @a(%arg0)", "func.call @main(%arg0)", "`a` calls `main` calls `a`|`main` calls `a` calls `main`"),
        ('stablehlo.composite "x.y" %arg0 {decomposition = @a}', "func.call @a(%arg0)", "`a` calls `a`"),
    ],
)
def test_recursion_is_refused(main: str, a: str, chain: str, tmp_path: Path):
    (file := tmp_path / "step.mlir").write_text(RECURSIVE.format(main=main, a=a))
    with pytest.raises(UserError, match=rf"step.mlir`: ({chain}), and recursion has no fixed number of ops; write it"):
        load_artifact(file)


def test_a_long_chain_of_calls_is_inlined(tmp_path: Path):
    """Inline a chain of calls that is longer than Python's stack."""
    functions = [
        f"func.func {'public @main' if n == 0 else f'private @f{n}'}(%arg0: tensor<4xf32>) -> tensor<4xf32> {{\n"
        + (f"%0 = func.call @f{n + 1}(%arg0) : (tensor<4xf32>) -> tensor<4xf32>" if n < 1500 else "")
        + ("%0 = stablehlo.negate %arg0 : tensor<4xf32>" if n == 1500 else "")
        + "\nreturn %0 : tensor<4xf32>\n}"
        for n in range(1501)
    ]
    (file := tmp_path / "step.mlir").write_text("\n".join(["module {", *functions, "}"]))
    program = load_artifact(file)
    assert [op.name for op in mlir.number_ops(mlir.inline_calls(mlir.parse_module(program.module)))] == [
        "stablehlo.negate",
        "func.return",
    ]
