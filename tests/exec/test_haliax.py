"""Haliax models: their named axes are read, and a plan becomes axis mappings under which Haliax runs the same step."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest


hax = pytest.importorskip("haliax")
hnn = hax.nn

import autoshard  # noqa: E402
from autoshard import UserError  # noqa: E402
from autoshard.cost import Topology, make_mesh  # noqa: E402
from autoshard.exec import read_collectives, wire_by_axis  # noqa: E402
from autoshard.exports import export_plan  # noqa: E402
from autoshard.planning import Plan  # noqa: E402


MESH = {"data": 4, "model": 2}
Batch, Pos, Embed, Mlp, Vocab = hax.make_axes(batch=8, position=32, embed=64, mlp=256, vocab=128)
Heads, HeadSize, Layers = hax.make_axes(heads=4, head_size=16, layers=2)
Qkv = hax.Axis("qkv", 3)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


class Block(eqx.Module):
    norm: Any
    qkv: Any
    out: Any
    up: Any
    down: Any

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 4)
        return Block(
            hnn.LayerNorm.init(Embed),
            hnn.Linear.init(Embed, (Qkv, Heads, HeadSize), key=keys[0]),
            hnn.Linear.init((Heads, HeadSize), Embed, key=keys[1]),
            hnn.Linear.init(Embed, Mlp, key=keys[2]),
            hnn.Linear.init(Mlp, Embed, key=keys[3]),
        )

    def __call__(self, x):
        q, k, v = self.qkv(self.norm(x)).unbind(Qkv)
        k, v = (each.rename({"position": "key_position"}) for each in (k, v))
        key_position = Pos.alias("key_position")
        mask = hnn.attention.causal_mask(Pos, key_position)
        x = x + self.out(hnn.attention.dot_product_attention(key_position, HeadSize, q, k, v, mask=mask))
        return x + self.down(hnn.gelu(self.up(self.norm(x))))


class Decoder(eqx.Module):
    embed: Any
    layers: Any
    head: Any

    @staticmethod
    def init(*, key):
        keys = jax.random.split(key, 3)
        stack = hnn.Stacked.init(Layers, Block, gradient_checkpointing=True)
        return Decoder(
            hnn.Embedding.init(Vocab, Embed, key=keys[0]),
            stack(key=jax.random.split(keys[1], Layers.size)),
            hnn.Linear.init(Embed, Vocab, key=keys[2]),
        )

    def __call__(self, ids):
        return self.head(self.layers.fold(self.embed.embed(ids)))


def make():
    model = Decoder.init(key=jax.random.key(0))
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))


def step(model, state, ids):
    def loss(model):
        targets = hnn.one_hot(hax.roll(ids, -1, Pos), Vocab)
        return hnn.cross_entropy_loss(model(ids), Vocab, targets).scalar()

    value, grads = eqx.filter_value_and_grad(loss)(model)
    updates, state = OPTIMIZER.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, value


def data():
    return hax.random.randint(jax.random.key(1), (Batch, Pos), 0, Vocab.size)


@pytest.fixture(scope="module")
def program():
    return autoshard.trace(step, (*eqx.filter_eval_shape(make), jax.eval_shape(data)))


@pytest.fixture(scope="module")
def expected():
    return jax.tree.leaves(eqx.filter_jit(step)(*make(), data()))


def differs(found: Any, expected: Any) -> float:
    pairs = zip(jax.tree.leaves(found), expected, strict=True)
    return max(float(np.abs(np.subtract(a, b)).max() / (np.abs(b).max() + 1e-12)) for a, b in pairs)


def under(plan: Plan, text: str) -> tuple[dict[str, int], Any]:
    """Run the step under an export's mappings. Return its bytes on the wire and its results."""
    said: dict[str, Any] = {}
    exec(text, said)
    with jax.set_mesh(said["make_mesh"]()):
        model, state = hax.shard(make(), said["PARAMETERS"])
        args = (model, state, hax.shard(data(), said["COMPUTE"]))
        run = hax.named_jit(step, axis_resources=said["COMPUTE"], out_axis_resources=said["PARAMETERS"])
        compiled = run.lower(*args).compile().as_text()
        wire = wire_by_axis(read_collectives(compiled, make_mesh(Topology.parse("cpu:8"), dict(plan.mesh))))
        return wire, run(*args)


def test_arrays_are_called_as_in_the_model_and_dims_by_their_axes(program):
    arguments = {argument.name: argument for argument in program.arguments}
    assert arguments["model.layers.stacked.up.weight"].shape == (2, 256, 64)
    assert arguments["model.layers.stacked.up.weight"].role == "parameter"
    assert program.dims["model.layers.stacked.up.weight"] == ("layers", "mlp", "embed")
    assert program.dims["state.trace.head.weight"] == ("vocab", "embed")
    assert program.dims["ids"] == ("batch", "position")
    assert {result.name for result in program.results} >= {"model.head.bias"}


@pytest.mark.few(1)
def test_the_planned_step_is_the_step(program, expected):
    plan = autoshard.plan(program, topology="cpu:8", mesh=MESH)
    result = plan.jit(step)(*make(), data())
    assert differs(result, expected) < 1e-5
    assert isinstance(result[0].head.weight, hax.NamedArray)


@pytest.fixture(scope="module")
def within(program):
    return autoshard.plan(program, topology="cpu:8", mesh=MESH, form="haliax")


@pytest.mark.few(1)
@pytest.mark.parametrize(("share", "near"), [(1.0, 0.02), pytest.param(0.8, 0.1, marks=pytest.mark.full)])
def test_haliax_under_the_mappings_does_what_is_predicted(program, within, expected, share, near):
    """Run with less memory too, where parameters are split further than activations, and XLA gathers biases as well."""
    plan = within
    if share < 1:
        limit = int(share * within.prediction.peak_bytes)
        plan = autoshard.plan(program, topology="cpu:8", mesh=MESH, form="haliax", memory_limit=limit)
    text = export_plan(plan, "haliax", program)
    assert "Not expressed" not in text and "(the same as the plan itself)" in text
    assert any("nothing inside the step is pinned" in line for line in plan.warnings)
    wire, found = under(plan, text)
    assert differs(found, expected) < 1e-5
    array = found[0].layers.stacked.up.weight.array
    planned = plan.arguments["model.layers.stacked.up.weight"].shards(MESH)
    assert array.addressable_shards[0].data.size * planned == array.size
    for axis, size in plan.prediction.wire_bytes.items():
        assert wire.get(axis, 0) == pytest.approx(size, rel=near, abs=1024), (wire, plan.prediction.wire_bytes)


@pytest.mark.full
def test_tensors_that_one_mapping_for_all_splits_otherwise_are_named(program):
    pins = {"model.embed.weight": "model,-", "model.head.weight": "-,data", "ids": "data,-"}
    plan = autoshard.plan(program, topology="cpu:8", mesh=MESH, pins=pins)
    text = export_plan(plan, "haliax", program, force=True)
    (lack,) = (line for line in text.splitlines() if "otherwise than others of the same name" in line)
    assert "model.embed.weight (128/model x 64; the mapping has " in lack
    assert "pins; COMPUTE splits them by the names of their dims." in text
    with pytest.raises(UserError, match="goes by the names that dims have in step: .* pass the program"):
        export_plan(plan, "haliax")


def test_splits_of_levanter_itself_are_undone(program):
    pins = {"*.up.weight": "-,-,-", "*.qkv.weight": "-,-,-,-,-", "ids": "data,-"}
    plan = autoshard.plan(program, topology="v5e:4x4*2", mesh={"data": 2, "model": 16}, form="haliax", pins=pins)
    text = export_plan(plan, "haliax", program)
    assert "#     axes: {model: 16}\n#     dcn_axes: {data: 2}\n" in text
    (held,) = (line for line in text.splitlines() if line.startswith("#     param_mapping"))
    assert "mlp: replica" in held and "heads: replica" in held
    mixed = autoshard.plan(program, topology="v5e:2x2*2", mesh={"data": 8}, form="haliax", pins=pins)
    assert "no axis of which a part is over the 2 slices" in export_plan(mixed, "haliax", program)


def test_hostile_names_of_axes_stay_strings():
    rows, columns = hax.make_axes(**{"x\nimport os": 8, 'a"b: {': 64})

    def scaled(params, x):
        return hax.sum(params * x, columns)

    like = jax.eval_shape(lambda: hax.ones((rows, columns)))
    program = autoshard.trace(scaled, (like, like), roles={"x": "batch"})
    pins = {"params": "data,model", "x": "data,model"}
    plan = autoshard.plan(program, topology="cpu:8", mesh=MESH, pins=pins)
    said: dict[str, Any] = {}
    text = export_plan(plan, "haliax", program)
    exec(text, said)
    assert said["PARAMETERS"] == {rows.name: "data", columns.name: "model"}
    assert "\nimport os" not in text and r'"a\"b: {": model' in text


def test_programs_without_names_are_refused():
    def square(x):
        return x @ x

    program = autoshard.trace(square, (jax.ShapeDtypeStruct((64, 64), jnp.float32),))
    with pytest.raises(UserError, match="no argument of square is an array with named axes"):
        autoshard.plan(program, topology="cpu:8", mesh=MESH, form="haliax")
