"""Ops that stand alone between loops have no compute to overlap their collectives with."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost import Topology, make_mesh
from autoshard.planning.price.analysed_program import analyse_program, build_model
from autoshard.planning.space.overlap import Overlap
from autoshard.program import trace


WIDTH, LAYERS, VOCABULARY = 256, 4, 1024
READERS = ("dot_general", "gather", "scatter")


def scanned(x: Any, weights: Any) -> Any:
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]


def head_alone(params: Any, x: Any) -> Any:
    return (scanned(x, params["layers"]) @ params["head"]).sum()


def two_beside_it(params: Any, x: Any) -> Any:
    return (jnp.tanh(scanned(x, params["layers"]) @ params["last"]) @ params["head"]).sum()


def no_loop(params: Any, x: Any) -> Any:
    return (jnp.tanh(x @ params["last"]) @ params["head"]).sum()


def table_first(params: Any, x: Any) -> Any:
    return (jnp.tanh(params["last"][x[:, 0].astype(jnp.int32)]) @ params["head"]).sum()


def overlaps(loss: Callable[[Any, Any], Any]) -> dict[str, set[Overlap]]:
    """Return the overlap of each stored weight: of its reshards to matmuls, and of its gradient's reshards."""

    def step(params: Any, x: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))

    shapes = {"layers": (LAYERS, WIDTH, WIDTH), "last": (WIDTH, WIDTH), "head": (WIDTH, VOCABULARY)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    program = trace(step, (params, jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)), donate_argnums=0)
    topology = Topology.parse("tpu7x:2x2x1")
    model = build_model(
        program, analyse_program(program, "tpu"), make_mesh(topology, {"data": 8}), topology.usable_bytes
    )
    names = {a.name: t for a, t in zip(program.arguments, model.graph.arguments, strict=True)}
    kinds: dict[str, set[Overlap]] = {}
    for name in shapes:
        (tensor,) = (t for given, t in names.items() if name in given)
        node = model.cluster_node[model.structure.cluster_of[tensor]]
        moves = [each for each in model.reshards if node in (each.source, each.target) and each.op >= 0]
        kinds[name] = {Overlap(m.overlap) for m in moves if model.graph.ops[m.op].kind in READERS}
    return kinds


@pytest.mark.parametrize(("loss", "alone"), [(head_alone, True), (two_beside_it, False), (no_loop, False)])
def test_a_head_waits_for_its_weight_without_a_concurrent_matmul(loss: Callable[[Any, Any], Any], alone: bool) -> None:
    kinds = overlaps(loss)
    assert (Overlap.PARAMETERS in kinds["head"]) is not alone
    assert (Overlap.NETWORK in kinds["head"]) is alone
    assert not kinds["head"] & ({Overlap.GRADIENTS, Overlap.GRADIENTS_AT_MATMUL} if alone else {Overlap.NETWORK})


def test_layers_in_a_loop_hide_theirs() -> None:
    kinds = overlaps(head_alone)["layers"]
    assert Overlap.PARAMETERS in kinds
    assert not kinds & {Overlap.NETWORK, Overlap.NETWORK_AT_MATMUL}


def test_the_first_weight_of_a_step_and_its_gradient_overlap_with_nothing() -> None:
    for loss in (no_loop, table_first):
        kinds = overlaps(loss)
        assert not kinds["last"] & {Overlap.PARAMETERS, Overlap.GRADIENTS, Overlap.GRADIENTS_AT_MATMUL}, loss
    kinds = overlaps(no_loop)["head"]
    assert Overlap.PARAMETERS in kinds and Overlap.NETWORK not in kinds
