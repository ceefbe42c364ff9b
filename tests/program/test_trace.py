"""`trace`: names, roles, ties, and refusals."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard.errors import UserError
from autoshard.program import Role, trace


S = jax.ShapeDtypeStruct
F = jnp.float32
MLP = {"layers": [{"w": S((16, 32), F), "b": S((32,), F)}, {"w": S((32, 8), F)}]}
DATA = {"x": S((4, 16), F), "y": S((4, 8), F)}


def _loss(params, batch):
    hidden = jax.nn.relu(batch["x"] @ params["layers"][0]["w"] + params["layers"][0]["b"])
    return jnp.mean((hidden @ params["layers"][1]["w"] - batch["y"]) ** 2)


def _step(optimizer):
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(_loss)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def _roles(program):
    return {a.name: a.role.value for a in program.arguments}


def test_training_step_is_named_and_tied():
    optimizer = optax.adamw(1e-3)
    state = jax.eval_shape(optimizer.init, MLP)
    program = trace(_step(optimizer), (MLP, state, DATA), donate_argnums=(0, 1), tokens=4, model_flops=1.0)
    assert [a.name for a in program.arguments][:5] == [
        "params.layers.0.b",
        "params.layers.0.w",
        "params.layers.1.w",
        "opt_state.count",
        "opt_state.mu.layers.0.b",
    ]
    assert [a.result for a in program.arguments] == [*range(10), None, None]
    assert [a.donated for a in program.arguments] == [True] * 10 + [False] * 2
    assert [r.argument for r in program.results] == [*range(10), None]
    assert program.results[1].name == "params.layers.0.w" and program.results[-1].name == "result.2"
    roles = _roles(program)
    assert roles["params.layers.1.w"] == "parameter" and roles["opt_state.nu.layers.1.w"] == "optimizer_state"
    assert roles["batch.x"] == "batch" and program.training
    assert (program.tokens, program.model_flops, program.name) == (4, 1.0, "step")


@pytest.mark.parametrize("donate", [(), (0, 1), 0])
def test_updated_state_is_tied_whether_or_not_it_is_donated(donate):
    optimizer = optax.sgd(1e-3, momentum=0.9)
    state = jax.eval_shape(optimizer.init, MLP)
    program = trace(_step(optimizer), (MLP, state, DATA), donate_argnums=donate)
    assert [a.result for a in program.arguments] == [*range(6), None, None]
    assert set(_roles(program).values()) == {"parameter", "optimizer_state", "batch"}


def test_inference_is_not_tied_even_if_shapes_agree():
    program = trace(lambda params, x: x @ params["w"], ({"w": S((16, 16), F)}, S((4, 16), F)))
    assert _roles(program) == {"params.w": "parameter", "x": "batch"}
    assert [a.result for a in program.arguments] == [None, None] and not program.training


@pytest.mark.parametrize(
    ("fn", "args", "expected"),
    [
        (lambda w, x: x @ w, (S((4, 4), F), S((2, 4), F)), {"w": "parameter", "x": "batch"}),
        (
            lambda tokens, table: table[tokens],
            (S((2,), jnp.int32), S((9, 4), F)),
            {"tokens": "batch", "table": "batch"},
        ),
        (
            lambda params, ids: params["e"][ids],
            ({"e": S((9, 4), F)}, S((2,), jnp.int32)),
            {"params.e": "parameter", "ids": "batch"},
        ),
        (
            lambda params, key: params["e"] * 2,
            ({"e": S((9, 4), F)}, jax.eval_shape(lambda: jax.random.key(0))),
            {"params.e": "parameter", "key": "other"},
        ),
        (
            lambda params, batch: jax.random.categorical(batch["key"], batch["x"] @ params["e"]),
            ({"e": S((4, 4), F)}, {"x": S((8, 4), F), "key": S((2,), jnp.uint32)}),
            {"params.e": "parameter", "batch.x": "batch", "batch.key": "other"},
        ),
        (
            lambda params, cache, token: (params["w"][token], jax.tree.map(lambda c: c + 1, cache)),
            ({"w": S((9, 4), F)}, {"k": S((2, 4), F)}, S((2,), jnp.int32)),
            {"params.w": "parameter", "cache.k": "other", "token": "batch"},
        ),
        (
            lambda state, x: (jax.tree.map(lambda w: w + x.sum(), state), x.sum()),
            ({"key": {"kernel": S((4, 4), F), "count": S((4,), F)}}, S((2, 4), F)),
            {"state.key.kernel": "parameter", "state.key.count": "other", "x": "batch"},
        ),
    ],
)
def test_guessed_roles(fn, args, expected):
    assert _roles(trace(fn, args)) == expected


def test_roles_can_be_stated():
    args = (S((4, 4), F), S((2, 4), F))
    by_prefix = trace(lambda a, b: b @ a, args, roles={"a": "parameter", "b": Role.OTHER})
    assert _roles(by_prefix) == {"a": "parameter", "b": "other"}
    by_call = trace(lambda a, b: b @ a, args, roles=lambda name: "optimizer_state" if name == "a" else None)
    assert _roles(by_call)["a"] == "optimizer_state"


def test_fingerprint_depends_on_the_computation_and_on_roles():
    args = (S((4, 4), F), S((2, 4), F))

    def product(a, b):
        return b @ a

    first = trace(product, args)
    assert first.fingerprint == trace(product, args).fingerprint
    assert first.fingerprint != trace(product, args, roles={"a": "other"}).fingerprint
    assert first.fingerprint != trace(product, args, arg_names=("c", "b")).fingerprint
    assert first.fingerprint != trace(lambda a, b: b @ a + 1, args, name="product").fingerprint


def test_names_are_unique():
    args = ({"a": {"b": S((2,), F)}, "a.b": S((2,), F)}, S((2,), F))
    program = trace(lambda p, q: q, args, arg_names=("", "a.b"))
    names = [a.name for a in program.arguments]
    assert len(set(names)) == 3 and names[0] == "a.b"


def test_donated_leaves_without_structure_are_tied_by_shape():
    program = trace(lambda x: {"out": x * 2}, (S((4,), F),), donate_argnums=0)
    assert program.arguments[0].result == 0 and program.results[0].argument == 0


def test_unused_arguments_stay():
    program = trace(lambda params, x: x + 1, ({"w": S((3,), F)}, S((3,), F)))
    assert len(program.arguments) == 2


def test_module_is_bytecode_without_shardings():
    program = trace(lambda params, x: x @ params["w"], ({"w": S((16, 16), F)}, S((4, 16), F)))
    assert program.module[:4] == b"ML\xefR"


def test_concrete_arrays_are_saved_as_arguments():
    weights = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    program = trace(lambda params, x: x @ params["w"], ({"w": weights}, S((2, 3), F)))
    params, x = program.make_args(0)
    assert params["w"] is weights and x.shape == (2, 3)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: trace(lambda x: x, ({"a": "text"},)), "argument `x.a` is a str, expected an array"),
        (
            lambda: trace(lambda x: x @ x, (S((2, 3), F),), name="square"),
            "`square` could not be traced by JAX: TypeError: dot_general requires",
        ),
        (lambda: trace(3, ()), "the program must be a callable, got int"),
        (
            lambda: trace(lambda x: x, S((2,), F)),
            "`args` must be a tuple of the positional arguments, got ShapeDtypeStruct",
        ),
        (
            lambda: trace(lambda x: x, (S((2,), F),), donate_argnums=3),
            "donate_argnums: 3 is not one of the 1 positional arguments",
        ),
        (lambda: trace(lambda x: x, (S((2,), F),), donate_argnums=-2), "donate_argnums: -2 is not one of the 1 "),
        (lambda: trace(lambda x: x, (S((2,), F),), donate_argnums=True), "donate_argnums: True is not one of the 1 "),
        (
            lambda: trace(lambda x: x, (S((2,), F),), donate_argnums="x"),
            "donate_argnums is 'x'; expected the number of a positional argument, or several",
        ),
        *(
            (
                lambda each=each: trace(lambda x: x, (S((2,), F),), name="same", model_flops=each),
                f"model_flops of `same` is {each!r}; expected a number from 0 up",
            )
            for each in (math.nan, math.inf, -1, "x", True)
        ),
        (
            lambda: trace(lambda x: x, (S((2,), F),), name="same", tokens=-1),
            "tokens of `same` is -1; expected a number",
        ),
        (lambda: trace(lambda x: x, (S((2,), F),), notes="slow"), "is 'slow'; expected a list of texts"),
        (lambda: trace(lambda x: x, (S((2,), F),), arg_names="x"), "is 'x'; expected a list of texts"),
        (lambda: trace(lambda x: x, (S((2,), F),), roles=5), "roles is 5; expected a dict of names and roles, or "),
        (lambda: trace(lambda x: x, (S((2,), F),), ties={1: 0}), "ties: 1 is no argument; the leaves of the arguments"),
        (lambda: trace(lambda x: x, (S((2,), F),), ties={0: 3}), "ties: 3 is no result; the leaves of the results"),
        (
            lambda: trace(lambda x: x[:1], (S((2,), F),), ties={0: 0}),
            "ties: leaf 0 has the shape [2], result 0 [1]; they are no pair",
        ),
        (
            lambda: trace(lambda x: x, (S((2,), F),), evidence=[None] * 2),
            "expected a role or None for each of the 1 leaves of `args`",
        ),
        (
            lambda: trace(jax.jit(lambda x, n: x * n, static_argnums=1), (S((2,), F), [3]), name="scaled"),
            "`scaled` is given a static argument without a hash, which jax.jit refuses: give a tuple",
        ),
        (
            lambda: trace(lambda x: x, (S((2,), F),), roles={"y": "batch"}),
            "no argument is called `y` or starts with it; the arguments are `x`",
        ),
        (
            lambda: trace(lambda x: x, (S((2,), F),), roles={"x": "weights"}),
            "`x` is given the role `weights`, which does not exist; use one of `parameter`",
        ),
        (lambda: trace(lambda x: x, (S((2,), F),), arg_names=("a", "b")), "2 names were given for 1 arguments"),
    ],
)
def test_bad_input(call, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        call()


def test_donated_positions_are_those_of_jax():
    args = (S((2,), F), S((2,), F))
    assert trace(lambda x, y: (x, y), args, donate_argnums=-1).donate_argnums == (1,)
    assert trace(lambda x, y: (x, y), args, donate_argnums=np.array([1, 0])).donate_argnums == (1, 0)


def test_dynamic_shapes_are_refused():
    size = jax.export.symbolic_shape("n, 4")
    with pytest.raises(UserError, match=r"argument `x` has the dynamic shape \(n, 4\); a plan is made for fixed sizes"):
        trace(lambda x: x, (S(size, F),))


KERAS = {
    "trainable_variables": [S((16, 32), F), S((32,), F), S((32, 8), F), S((8,), F)],
    "non_trainable_variables": [S((8,), F), S((8,), F), S((2,), jnp.uint32)],
    "optimizer_variables": [S((), jnp.int32), S((), F)]
    + [S(shape, F) for shape in ((16, 32), (32,), (32, 8), (8,)) for _ in range(2)],
    "metrics_variables": [S((), F), S((), F)],
}
"""Arguments of a compiled Keras model: lists of values, in the order of its own lists."""

KERAS_ROLES = {
    "trainable_variables": "parameter",
    "non_trainable_variables": "other",
    "optimizer_variables": "optimizer_state",
    "metrics_variables": "other",
}


def _stateless_call(trainable, others, x):
    hidden = jax.nn.relu(x @ trainable[0] + trainable[1]) @ trainable[2] + trainable[3]
    mean, variance, seed = others
    return hidden, [0.9 * mean + 0.1 * hidden.mean(0), 0.9 * variance + 0.1 * hidden.var(0), seed + 1]


def _stateless_apply(state, gradients, trainable):
    count, rate, *moments = state
    new, params = [count + 1, rate], []
    pairs = zip(moments[::2], moments[1::2], strict=True)
    for value, gradient, (m, v) in zip(trainable, gradients, pairs, strict=True):
        m, v = 0.9 * m + 0.1 * gradient, 0.99 * v + 0.01 * gradient**2
        params.append(value - rate * m / (jnp.sqrt(v) + 1e-7))
        new += [m, v]
    return params, new


def _keras_step(state, data):
    trainable, others, optimizer, metrics = state

    def loss(trainable):
        out, after = _stateless_call(trainable, others, data[0])
        return ((out - data[1]) ** 2).mean(), after

    (value, others), gradients = jax.value_and_grad(loss, has_aux=True)(trainable)
    trainable, optimizer = _stateless_apply(optimizer, gradients, trainable)
    return {"loss": value}, (trainable, others, optimizer, [metrics[0] + value, metrics[1] + 1])


def _keras_named(state, data):
    logs, after = _keras_step(tuple(state[name] for name in KERAS), data)
    return logs, dict(zip(KERAS, after, strict=True))


def _keras_apart(trainable_variables, non_trainable_variables, optimizer_variables, metrics_variables, data):
    return _keras_step((trainable_variables, non_trainable_variables, optimizer_variables, metrics_variables), data)


def test_keras_state_has_its_roles_in_every_form():
    """Infer the roles of lists in a tuple without names from the step's uses of them."""
    batch = (DATA["x"], DATA["y"])
    by_number = _roles(trace(_keras_step, (tuple(KERAS.values()), batch)))
    by_name = _roles(trace(_keras_named, (KERAS, batch)))
    apart = _roles(trace(_keras_apart, (*KERAS.values(), batch)))
    for number, (name, values) in enumerate(KERAS.items()):
        for k, value in enumerate(values):
            expected = KERAS_ROLES[name]
            if name == "optimizer_variables" and not value.shape:
                assert by_number[f"state.{number}.{k}"] == "other", "a scalar says nothing by its use"
            else:
                assert by_number[f"state.{number}.{k}"] == expected
            assert (by_name[f"state.{name}.{k}"], apart[f"{name}.{k}"]) == (expected, expected)
    assert by_number["data.0"] == by_number["data.1"] == "batch"


def test_numbered_state_of_layers_is_parameters():
    """Exclude a bias that is combined with values of its own shape from the moments."""

    def step(net, x):
        def loss(net):
            hidden = x
            for w, b in net:
                hidden = jnp.tanh(w @ hidden + b)
            return (hidden**2).sum()

        return jax.tree.map(lambda p, g: p - 0.1 * g, net, jax.grad(loss)(net))

    net = [(S((32, 16), F), S((32,), F)), (S((8, 32), F), S((8,), F))]
    roles = _roles(trace(step, (net, S((16,), F)), donate_argnums=0))
    assert [roles[f"net.{i}.{k}"] for i in (0, 1) for k in (0, 1)] == ["parameter"] * 4


def test_an_axis_that_nothing_binds_is_named():
    def step(w, x):
        return w - 0.1 * jax.lax.pmean(jax.grad(lambda w: ((x @ w) ** 2).mean())(w), "batch")

    with pytest.raises(
        UserError, match=r"`step` has a collective over the axis `batch`, which only an enclosing jax\.pmap"
    ):
        trace(step, (S((16, 8), F), S((4, 16), F)))
    bound = jax.vmap(step, in_axes=(None, 0), axis_name="batch")
    assert trace(bound, (S((16, 8), F), S((2, 4, 16), F))).results


@pytest.mark.parametrize(
    "error",
    [
        NotImplementedError("Not supported on cpu."),
        RuntimeError("grouped_matmulv2 (platform=pallas): Unsupported TPU device kind: cpu"),
    ],
)
def test_a_kernel_of_another_backend_is_refused_with_what_works(error: Exception):
    def step(x):
        raise error

    with pytest.raises(UserError, match=r"`step` asks for a kernel that is not made for cpu, .* in plain JAX"):
        trace(step, (S((4,), F),))


def test_a_value_that_a_checkpoint_did_not_return_is_refused() -> None:
    def loss(w, x):
        kept = []

        def first(w, x):
            kept.append(jnp.sin(x @ w))
            return kept[0] * 2

        return jax.checkpoint(lambda w, z: jnp.sum(z @ w * kept[0]))(w, jax.checkpoint(first)(w, x))

    with pytest.raises(UserError, match=r"`loss` uses a value from inside of a `jax.checkpoint` .*--remat none"):
        trace(jax.grad(loss), (jax.ShapeDtypeStruct((8, 8), jnp.float32),) * 2)


@pytest.mark.parametrize("weak", [0, 1, 2])
def test_weakly_typed_state_that_a_step_replaces_is_named(weak):
    """Judge by JAX: the step on its own results is another program exactly if a leaf was weakly typed."""
    state = {"a": jnp.full((4,), 0.1, F), "b": jnp.full((4,), 0.1, F), "c": jnp.ones((4,), F)}
    state |= {name: jnp.full((4,), 0.1) for name in ("a", "b")[:weak]}

    def step(state, x):
        return {name: each - 0.1 * x for name, each in state.items()}

    own = jax.jit(step).trace(state, jnp.ones((4,), F))
    again = jax.jit(step).trace(step(state, jnp.ones((4,), F)), jnp.ones((4,), F))
    notes = [note for note in trace(step, (state, jnp.ones((4,), F))).notes if "weakly typed" in note]
    assert bool(notes) == (str(own.jaxpr.in_avals) != str(again.jaxpr.in_avals)) == (weak > 0)
    assert not notes or notes[0].startswith(("`state.a` is ", "`state.a` and 1 more are ")[weak - 1])
