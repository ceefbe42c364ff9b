"""Keras 3 models: planned from shapes, trained by their own `fit` under a plan, and exported as a `LayoutMap`."""

import os


os.environ.setdefault("KERAS_BACKEND", "jax")

from types import SimpleNamespace  # noqa: E402

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402


keras = pytest.importorskip("keras")

import autoshard  # noqa: E402
from autoshard import UserError  # noqa: E402
from autoshard.exec import fit_as_planned  # noqa: E402
from autoshard.exports import export_plan  # noqa: E402
from autoshard.program import from_keras  # noqa: E402


MESH = {"data": 4, "model": 2}
X = np.random.default_rng(0).normal(size=(80, 16)).astype("float32")
Y = (np.arange(80) % 10).astype("int32")


def shape(*dims, dtype="float32"):
    return jax.ShapeDtypeStruct(dims, dtype)


def build():
    inputs = keras.Input((16,))
    hidden = keras.layers.Dense(64, activation="relu")(inputs)
    hidden = keras.layers.BatchNormalization()(hidden)
    hidden = keras.layers.Dropout(0.1, seed=1)(hidden)
    return keras.Model(inputs, keras.layers.Dense(10)(hidden))


def make():
    model = build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(1e-2), loss, metrics=["accuracy"])
    return model


def seeded():
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    return make()


@pytest.fixture(scope="module")
def program():
    return from_keras(make, shape(32, 16), shape(32, dtype="int32"))


@pytest.fixture(scope="module")
def plan(program):
    return autoshard.plan(program, topology="cpu:8", mesh=MESH, pins={"dense/kernel": "-,model"})


def fitted(model):
    history = model.fit(X, Y, batch_size=32, epochs=2, shuffle=False, verbose=0, validation_data=(X[:32], Y[:32]))
    return history.history


def compare(history, expected, ours, theirs):
    assert history.keys() == expected.keys()
    for key in expected:
        np.testing.assert_allclose(history[key], expected[key], rtol=1e-4, atol=1e-5)
    for mine, other in zip(ours.variables, theirs.variables, strict=True):
        np.testing.assert_allclose(mine.value, other.value, rtol=1e-3, atol=2e-4)


def test_a_model_is_planned_without_being_allocated(program):
    by_name = {argument.name: argument for argument in program.arguments}
    assert by_name["dense/kernel"].shape == (16, 64) and by_name["dense/kernel"].role == "parameter"
    assert by_name["optimizer.momentum.dense_1/kernel"].role == "optimizer_state"
    assert by_name["batch_normalization/moving_mean"].role == "other"
    assert by_name["x"].role == by_name["y"].role == "batch"
    assert program.training and all(a.result is not None for a in program.arguments if a.role != "batch")


@pytest.mark.full
def test_a_model_that_is_there_is_planned_as_it_is_and_stays_whole(program):
    model = seeded()
    found = from_keras(model, shape(32, 16), shape(32, dtype="int32"))
    assert [a.shape for a in found.arguments] == [a.shape for a in program.arguments]
    assert model.fit(X[:32], Y[:32], batch_size=32, verbose=0).history["loss"][0] > 0


def test_layers_are_named_as_in_a_process_of_their_own(program):
    make()  # advances the counter in layers' names
    again = from_keras(make, shape(32, 16), shape(32, dtype="int32"))
    assert [a.name for a in again.arguments] == [a.name for a in program.arguments]
    assert again.fingerprint == program.fingerprint


@pytest.mark.full
def test_fit_runs_the_planned_step(plan):
    theirs = seeded()
    expected = fitted(theirs)
    ours = seeded()
    fit_as_planned(plan, ours)
    compare(fitted(ours), expected, ours, theirs)
    kernel = next(v for v in ours.variables if v.path.endswith("dense/kernel"))
    assert kernel.value.sharding.spec == jax.sharding.PartitionSpec(None, "model")


def test_a_layout_map_splits_as_the_plan_does():
    plan = autoshard.plan(
        from_keras(make, shape(32, 16), shape(32, dtype="int32")), topology="cpu:8", mesh=MESH, form="keras",
        pins={"dense/kernel": "-,model", "x": "data,-"},
    )  # fmt: skip
    assert not plan.pins
    theirs = seeded()
    expected = theirs.fit(X[:64], Y[:64], batch_size=32, shuffle=False, verbose=0).history
    exported = {}
    exec(export_plan(plan, "keras"), exported)
    code = SimpleNamespace(**exported)
    keras.utils.clear_session()  # it would forget the distribution too
    with code.distribution().scope():
        keras.utils.set_random_seed(3)
        ours = make()
        code.check(ours)
        history = ours.fit(X[:64], Y[:64], batch_size=32, shuffle=False, verbose=0).history
    for key in expected:
        np.testing.assert_allclose(history[key], expected[key], rtol=1e-4, atol=1e-5)
    held = {v.path: v.value.sharding.spec for v in ours.weights if "seed" not in v.path}
    assert held["dense/kernel"] == jax.sharding.PartitionSpec(None, "model")
    wanted = [(name, spec) for name, spec in plan.arguments.items() if name in held]
    assert len(wanted) == 8
    for name, spec in wanted:
        assert sum(axis is not None for axis in held[name]) == len(spec.axes), name
    with pytest.raises(ValueError, match="has not, or of another shape"):
        code.check(keras.Sequential([keras.layers.Dense(3)]))


def test_what_is_not_split_by_batch_is_exported_so(program):
    plan = autoshard.plan(program, topology="cpu:8", mesh=MESH, pins={"x": "-,-", "y": "-"})
    text = export_plan(plan, "keras")
    names = {}
    exec(text, names)
    mesh = names["make_mesh"]()
    assert names["BATCH_AXIS"] == "batch" and mesh.axis_names == ("data", "model", "batch") and mesh.shape == (4, 2, 1)


def test_prediction_is_planned_too():
    program = from_keras(build, shape(32, 16))
    assert not program.training and [a.name for a in program.arguments if a.role == "batch"] == ["x"]
    plan = autoshard.plan(program, topology="cpu:8", mesh=MESH)
    args = program.make_args(0)
    np.testing.assert_allclose(plan.jit(program.fn)(*args), program.fn(*args), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: from_keras(build, shape(32, 16), train=True), "is to be trained, but it is not compiled"),
        (lambda: from_keras(lambda: 3, shape(32, 16)), "a function that returns one is needed, not a int"),
        (lambda: from_keras(make, [1.0]), "`x` needs arrays or their shapes, not a float"),
        (lambda: from_keras(make, shape(32, 17), shape(32, dtype="int32")), "functional"),
    ],
)
def test_what_cannot_be_planned_is_reported(call, message):
    with pytest.raises(UserError, match=message):
        call()


def test_fit_refuses_other_models_and_batches(plan):
    with pytest.raises(UserError, match="is not compiled"):
        fit_as_planned(plan, build())
    small = seeded()
    fit_as_planned(plan, small)
    with pytest.raises(UserError, match=r"the first batch has arrays of shapes \[16, 16\], \[16\]"):
        small.fit(X, Y, batch_size=16, verbose=0)
    other = keras.Sequential([keras.Input((16,)), keras.layers.Dense(10)])
    other.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    fit_as_planned(plan, other)
    with pytest.raises(UserError, match="plan this model"):
        other.fit(X, Y, batch_size=32, verbose=0)
