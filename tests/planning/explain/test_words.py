"""A plan in words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

import autoshard
from autoshard.planning.explain.plan_words import _ranked, describe
from autoshard.planning.space.decision_model import Model
from autoshard.program import Role
from tests.planning import programs as made


def choose(model: Model, everywhere: dict[str, str], stored: dict[str, str]) -> NDArray[np.int64]:
    """Split the dims of the named groups over named axes: `everywhere` in all clusters, `stored` in those of state."""
    groups = made.groups(model)
    of_state = {
        model.structure.cluster_of[t]
        for t, a in zip(model.graph.arguments, model.program.arguments, strict=True)
        if a.role in (Role.PARAMETER, Role.OPTIMIZER_STATE)
    } | {model.structure.cluster_of[r] for r, _ in model.structure.ties}
    choices = np.zeros(len(model.nodes), dtype=np.int64)
    for cluster in model.structure.clusters:
        wanted = everywhere | (stored if cluster.id in of_state else {})
        node = model.nodes[model.cluster_node[cluster.id]]
        names = [groups.names.get(groups.of_factor[(cluster.id, f)], "") for f in range(len(cluster.sizes))]
        state = []
        for axis in model.axis_names:
            found = [f for f, name in enumerate(names) if wanted.get(axis) == name and f not in cluster.blocked]
            state.append(found[0] if found else -1)
        match = np.flatnonzero((node.states == state).all(axis=1))
        choices[model.cluster_node[cluster.id]] = match[0] if len(match) else 0
    return choices


@pytest.mark.parametrize(
    ("everywhere", "stored", "words"),
    [
        ({}, {}, ("nothing over data and model: its devices repeat the same work",)),
        ({"data": "batch"}, {}, ("batch over data", "nothing over model: its devices repeat the same work")),
        ({"data": "batch", "model": "batch"}, {}, ("batch over data and model",)),
        ({"data": "batch", "model": "ffn"}, {}, ("ffn over model", "batch over data")),
        (
            {"data": "batch", "model": "ffn"},
            {"data": "hidden"},
            ("ffn over model", "batch over data", "parameters also over data"),
        ),
        (
            {"data": "batch"},
            {"model": "hidden"},
            ("batch over data", "parameters also over model"),
        ),
    ],
)
def test_an_mlp_in_words(everywhere: dict[str, str], stored: dict[str, str], words: tuple[str, ...]) -> None:
    model = made.model("wide mlp", "v5e:4x4", "data=4,model=4")
    found = describe(model, made.groups(model), choose(model, everywhere, stored))
    assert sorted(found) == sorted(words)


def test_a_decoder_in_words() -> None:
    model = made.model("decoder")
    groups = made.groups(model)
    found = describe(model, groups, choose(model, {"data": "batch", "model": "sequence"}, {"model": "hidden"}))
    assert set(found) == {"batch over data", "sequence over model", "parameters also over model"}


def test_state_split_further_than_its_parameters_is_reported() -> None:
    model = made.model("wide mlp", "v5e:4x4", "data=4,model=4")
    choices = choose(model, {"data": "batch"}, {})
    groups = made.groups(model)
    for t, a in zip(model.graph.arguments, model.program.arguments, strict=True):
        cluster = model.structure.cluster_of[t]
        if a.role is Role.OPTIMIZER_STATE and cluster >= 0:
            states = model.nodes[model.cluster_node[cluster]].states
            choices[model.cluster_node[cluster]] = np.flatnonzero((states == [0, -1]).all(axis=1))[0]
    assert "optimizer state also over data" in describe(model, groups, choices)


def test_dims_without_a_name_are_called_after_a_parameter() -> None:
    groups = made.groups(made.model("mixed"))
    assert {"batch", "vocabulary"} & set(groups.names.values())
    assert {"dim 1 of params.out"} <= set(groups.names.values())


def test_the_first_spatial_dim_of_a_batch_of_images_is_their_height() -> None:
    names = set(made.groups(made.model("kernel gradients", "v5p:2x2x2")).names.values())
    assert {"batch", "image height", "image width"} <= names and "sequence" not in names


def test_the_width_between_matrices_wu_and_wd_is_that_of_an_mlp() -> None:
    def step(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return (jax.nn.silu(x @ w["wg"]) * (x @ w["wu"])) @ w["wd"]

    wide, narrow = jax.ShapeDtypeStruct((8, 32), jnp.float32), jax.ShapeDtypeStruct((32, 8), jnp.float32)
    program = autoshard.trace(
        step, ({"wg": wide, "wu": wide, "wd": narrow}, jax.ShapeDtypeStruct((16, 8), jnp.float32))
    )
    assert "ffn" in made.groups(made.model_of(program, "cpu:8", "data=4,model=2")).names.values()


def test_features_of_one_expert_are_not_called_experts() -> None:
    def names(shapes: dict[str, tuple[int, ...]], equation: str) -> set[str]:
        """Return the names of the dims of a step in which `equation` applies the first parameter to a batch [B, H]."""

        def step(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
            def loss(params: dict[str, jax.Array]) -> jax.Array:
                squares = [(jnp.einsum(equation, x, each) ** 2).sum() for each in params.values()]
                return sum(squares, jnp.zeros(()))

            return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

        params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        program = autoshard.trace(step, (params, jax.ShapeDtypeStruct((8, 16), jnp.float32)))
        return set(made.groups(made.model_of(program, "cpu:8", "data=4,model=2")).names.values())

    assert "experts" in names({"experts_in": (4, 16, 32)}, "bh,ehf->bef")
    assert "experts" not in names({"w_up": (4, 16, 32)}, "bh,ehf->bef")  # gates side by side
    listed = names({"experts.0.weight": (16, 32), "experts.1.weight": (16, 32)}, "bh,hf->bf")
    assert "experts" not in listed and any(name.startswith("dim 1 of params.experts.0") for name in listed)


def test_feed_forward_weights_that_each_take_tokens_of_their_own_are_experts() -> None:
    def step(params: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        def loss(params: dict[str, jax.Array]) -> jax.Array:
            tokens = jnp.einsum("bh,be->ebh", x, jax.nn.softmax(x @ params["router"]))
            inner = jax.nn.relu(jnp.einsum("ebh,ehf->ebf", tokens, params["w_up"]))
            return (jnp.einsum("ebf,efh->bh", inner, params["w_down"]) ** 2).sum()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    shapes = {"router": (64, 8), "w_up": (8, 64, 256), "w_down": (8, 256, 64)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    program = autoshard.trace(step, (params, jax.ShapeDtypeStruct((128, 64), jnp.float32)))
    groups = made.groups(made.model_of(program, "cpu:8", "data=4,model=2"))
    names = {groups.sizes[g]: name for g, name in groups.names.items() if groups.parameters.get(g)}
    assert (names[8], names[256]) == ("experts", "ffn")


def test_inputs_that_stand_whole_beside_a_split_batch_are_told() -> None:
    model = made.model("wide mlp", "v5e:4x4", "data=4,model=4")
    groups = made.groups(model)
    choices = choose(model, {"data": "batch"}, {})
    assert not any("whole" in line for line in describe(model, groups, choices))
    names = []
    for tensor, argument in zip(model.graph.arguments, model.program.arguments, strict=True):
        if argument.role is Role.BATCH:
            names.append(argument.name)
            choices[model.cluster_node[model.structure.cluster_of[tensor]]] = 0
    assert f"{' and '.join(names)} whole on every device" in describe(model, groups, choices)


def test_inputs_that_other_axes_split_are_told_by_dim() -> None:
    model = made.model("decoder", "v6e:2x4*2", "data=2,model=8")
    groups = made.groups(model)
    choices = choose(model, {"data": "batch"}, {})
    names = []
    for tensor, argument in zip(model.graph.arguments, model.program.arguments, strict=True):
        if argument.role is Role.BATCH:
            cluster = model.structure.cluster_of[tensor]
            found = [groups.names.get(groups.of_factor[(cluster, f)]) for f in model.structure.dims_of[tensor]]
            states = model.nodes[model.cluster_node[cluster]].states
            match = (states == [-1, model.structure.dims_of[tensor][found.index("sequence")]]).all(axis=1)
            choices[model.cluster_node[cluster]] = np.flatnonzero(match)[0]
            names.append(argument.name)
    assert f"{' and '.join(names)} split by sequence over model" in describe(model, groups, choices)


def test_inputs_that_axes_of_the_batch_split_by_another_dim_are_told() -> None:
    model = made.model("decoder", "v6e:2x4*2", "data=2,model=8")
    groups = made.groups(model)
    choices = choose(model, {"data": "batch"}, {})
    ids = {}
    for tensor, argument in zip(model.graph.arguments, model.program.arguments, strict=True):
        if argument.role is Role.BATCH:
            ids[argument.name] = model.structure.cluster_of[tensor], model.structure.dims_of[tensor]
    (name, (cluster, (rows, columns))), *_ = ids.items()
    states = model.nodes[model.cluster_node[cluster]].states
    same = [other for other, (of, _) in ids.items() if of == cluster]
    also = "batch over data and sequence over model"
    for state, words in (([columns, -1], "sequence over data"), ([rows, columns], also)):
        choices[model.cluster_node[cluster]] = np.flatnonzero((states == state).all(axis=1))[0]
        assert f"{' and '.join(same)} split by {words}" in describe(model, groups, choices), name


def test_channels_of_several_layers_are_one_name() -> None:
    assert _ranked(["channels of a.0", "dim 0 of w", "batch", "channels of a.3"]) == [
        "batch",
        "channels of 2 layers such as a.0",
        "dim 0 of w",
    ]
    assert _ranked(["channels of a.0", "batch"]) == ["channels of a.0", "batch"]


def test_channels_of_convolutions_have_the_names_of_layers() -> None:
    names = set(made.groups(made.model("convolutions", "h100:8", "data=4,model=2")).names.values())
    assert any(name.startswith("channels of ") for name in names), names
