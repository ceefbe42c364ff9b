"""Overlap of collectives with compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cost import Collectives, Topology, make_mesh
from autoshard.planning.price.analysed_program import analyse_program, build_model
from autoshard.planning.price.reshard_times import reshard_overlap
from autoshard.planning.space.decision_model import EXPOSED, Model, link_names
from autoshard.planning.space.overlap import Overlap, hidden_share, lanes, macs_per_element
from autoshard.program import trace
from tests.planning.programs import model_of


LARGE = 1e15
"""Bytes so large that launches and hops are negligible."""


def collectives(topology: str, **sizes: int) -> Collectives:
    return Collectives(make_mesh(Topology.parse(topology), sizes))


POD = collectives("v5e:16x16*2", slice=2, data=16, model=16)
PIPELINED = POD.calibration.pipelined_overlap
EARLY = POD.calibration.gather_overlap
FAR = POD.calibration.network_overlap


@pytest.mark.parametrize(
    ("overlap", "kind", "axes", "expected"),
    [
        (Overlap.PARAMETERS, "all-gather", ("data",), EARLY),
        (Overlap.PARAMETERS, "all-gather", ("slice",), FAR),
        (Overlap.PARAMETERS, "all-gather", ("slice", "data"), EARLY),
        (Overlap.PARAMETERS, "collective-permute", ("data",), 1.0),
        (Overlap.PARAMETERS, "all-to-all", ("data",), 0.0),
        (Overlap.PARAMETERS, "all-reduce", ("data",), 0.0),
        (Overlap.GRADIENTS, "all-reduce", ("slice",), FAR),
        (Overlap.GRADIENTS_AT_MATMUL, "reduce-scatter", ("slice",), FAR),
        (Overlap.PARAMETERS_AT_MATMUL, "all-gather", ("data",), PIPELINED),
        (Overlap.PARAMETERS_AT_MATMUL, "all-gather", ("data", "model"), EARLY),  # too many devices for a loop
        (Overlap.GRADIENTS, "all-reduce", ("data",), 0.0),
        (Overlap.GRADIENTS_AT_MATMUL, "reduce-scatter", ("data",), PIPELINED),
        (Overlap.GRADIENTS_AT_MATMUL, "reduce-scatter", ("data", "model"), 0.0),
        (Overlap.MATMUL, "all-gather", ("model",), PIPELINED),
        (Overlap.MATMUL, "all-reduce", ("model",), 0.0),
        (Overlap.MATMUL, "all-gather", ("slice",), 0.0),
        (Overlap.NONE, "all-gather", ("model",), 0.0),
        (Overlap.NETWORK, "all-gather", ("data",), 0.0),
        (Overlap.NETWORK, "reduce-scatter", ("slice",), FAR),
        (Overlap.NETWORK_AT_MATMUL, "reduce-scatter", ("model",), PIPELINED),
        (Overlap.NETWORK_AT_MATMUL, "all-reduce", ("slice",), FAR),
    ],
)
def test_share(overlap: Overlap, kind: str, axes: tuple[str, ...], expected: float) -> None:
    assert hidden_share(POD, overlap, kind, axes, LARGE) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("overlap", [Overlap.GRADIENTS, Overlap.GRADIENTS_AT_MATMUL])
def test_only_the_bytes_between_slices_of_a_sum_in_levels_are_hidden(overlap: Overlap) -> None:
    """Compare the exposed seconds with those of the sum within a slice, whose share the network then reduces."""
    both, inner = (
        float(POD.time("all-reduce", axes, LARGE)) for axes in (("slice", "data", "model"), ("data", "model"))
    )
    share = hidden_share(POD, overlap, "all-reduce", ("slice", "data", "model"), LARGE)
    assert (1.0 - share) * both == pytest.approx(inner + (1.0 - FAR) * (both - inner), rel=1e-6)


@pytest.mark.parametrize(
    ("topology", "tokens", "looped"),
    [("tpu7x:2x2x1", 4096, True), ("tpu7x:2x2x1", 1024, False), ("v5e:2x4", 4096, False)],
)
def test_gathers_of_weights_at_wide_matmuls_are_loops_on_one_generation(
    topology: str, tokens: int, looped: bool
) -> None:
    """Look at the second of two matmuls, since nothing hides the first gather of a step."""
    shapes = {"x": (8 * tokens, 2048), "v": (2048, 2048), "w": (2048, 8192)}
    given = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}
    program = trace(lambda x, v, w: x @ v @ w, given, roles={"v": "parameter", "w": "parameter"})
    model = model_of(program, topology, "data=8")
    _, op = (op for op in model.graph.ops if op.kind == "dot_general")
    node = model.op_node[op.id]
    (weight,) = (r for r in model.reshards if r.target == node and r.tensor == op.operands[1])
    choices = np.zeros(len(model.nodes), dtype=np.int64)
    rows = next(f for f, size in enumerate(op.rule.sizes) if size == 8 * tokens)
    (choices[node],) = np.flatnonzero((model.nodes[node].states == rows).all(axis=1))
    assert (reshard_overlap(model, weight, choices) is Overlap.PARAMETERS_AT_MATMUL) == looped


def test_launches_and_hops_of_a_pipelined_collective_are_waited_for() -> None:
    least, seconds = (POD.time("all-gather", ("model",), size) for size in (0.0, 4e6))
    share = hidden_share(POD, Overlap.MATMUL, "all-gather", ("model",), 4e6)
    assert share == pytest.approx(float(PIPELINED * (seconds - least) / seconds))
    assert 0.0 < share < PIPELINED
    assert lanes(POD, link_names(POD.mesh), Overlap.MATMUL, "all-gather", ("model",), 1e4, 0) == {EXPOSED: 1.0}


def test_gpus_reduce_during_compute_and_cpus_overlap_nothing() -> None:
    assert hidden_share(collectives("h100:8*2", data=16), Overlap.GRADIENTS, "all-reduce", ("data",), 8.0) == 1.0
    assert hidden_share(collectives("cpu:8", data=8), Overlap.PARAMETERS, "all-gather", ("data",), 8.0) == 0.0


def test_gathers_are_waited_for_where_the_compiler_makes_them_synchronous() -> None:
    shares = {
        chip: hidden_share(collectives(f"{chip}:4x4", data=16), Overlap.PARAMETERS, "all-gather", ("data",), 8.0)
        for chip in ("v5e", "v6e")
    }
    assert shares["v6e"] == 0.0 < shares["v5e"] < 1.0


def test_lanes_share_out_all_of_a_collective() -> None:
    names = link_names(POD.mesh)
    assert lanes(POD, names, Overlap.PARAMETERS, "collective-permute", ("data",), 8.0, 3) == {(3, names["data"]): 1.0}
    assert lanes(POD, names, Overlap.NONE, "all-gather", ("data",), 8.0, 3) == {EXPOSED: 1.0}
    some = lanes(POD, names, Overlap.MATMUL, "all-gather", ("model",), LARGE, 0)
    assert some == pytest.approx({(0, names["model"]): PIPELINED, EXPOSED: 1.0 - PIPELINED})


def test_an_axis_of_one_device_has_no_links() -> None:
    one = collectives("v5e:4x4", data=1, fsdp=16)
    both, split = (
        lanes(one, link_names(one.mesh), Overlap.PARAMETERS, "all-gather", axes, 8.0, 0)
        for axes in (("data", "fsdp"), ("fsdp",))
    )
    assert both == split and len(both) == 2
    assert set(lanes(one, link_names(one.mesh), Overlap.PARAMETERS, "all-gather", ("data",), 8.0, 0)) <= {EXPOSED}


@pytest.mark.parametrize(
    ("topology", "sizes", "axes", "looped"),
    [
        ("v6e:2x4", {"data": 8}, ("data",), True),
        ("v5p:2x2x2", {"data": 8}, ("data",), True),
        ("v6e:4x4", {"data": 4, "model": 4}, ("data",), True),  # four in a line
        ("v5p:2x2x1", {"data": 4}, ("data",), False),  # a square
        ("v6e:2x4", {"data": 4, "model": 2}, ("model",), False),  # a pair
    ],
)
def test_pairs_and_squares_are_not_walked_in_a_loop(topology: str, sizes: dict[str, int], axes, looped: bool) -> None:
    prices = collectives(topology, **sizes)
    share = hidden_share(prices, Overlap.MATMUL, "all-gather", axes, LARGE)
    assert share == pytest.approx(prices.calibration.pipelined_overlap if looped else 0.0, rel=1e-6)


def test_a_matmul_that_computes_little_for_what_is_sent_has_nothing_pipelined_into_it() -> None:
    """Sum a gradient [d, f] over the tokens of 8 devices. XLA pipelines the sum only from so many tokens a device."""
    least = collectives("v6e:2x4", data=8).calibration.pipelined_columns
    for tokens, pipelined in ((1536, True), (1024, False)):
        assert (tokens >= least) == pipelined
        model = _gradient(tokens)
        (op,) = (op for op in model.graph.ops if op.kind == "dot_general")
        node = next(n for n, node in enumerate(model.nodes) if node.kind == "op" and node.ref == op.id)
        states = model.nodes[node].states
        contracted = next(f for f, size in enumerate(op.rule.sizes) if size == 8 * tokens)
        (split,) = np.flatnonzero((states == contracted).all(axis=1))
        assert macs_per_element(op, len(op.operands), states, model.axis_sizes)[split] == tokens
        (out,) = (r for r in model.reshards if r.source == node)
        whole = np.flatnonzero((states != contracted).any(axis=1))
        assert out.narrow is None or (bool(out.narrow[split]) != pipelined and not out.narrow[whole].any())
        exposed = out.costs[EXPOSED][out.rows[split]]
        everything = np.sum(
            [table[out.rows[split]] for channel, table in out.costs.items() if channel[1] != "compute"], axis=0
        )
        sent = everything > 0
        assert sent.any() and ((exposed[sent] < everything[sent]).any() == pipelined)
        # The overlap without tables is the same.
        choices = np.zeros(len(model.nodes), dtype=np.int64)
        choices[node] = split
        assert reshard_overlap(model, out, choices) is (Overlap.MATMUL if pipelined else Overlap.NONE)


def _gradient(tokens: int) -> Model:
    given = [jax.ShapeDtypeStruct((8 * tokens, width), "bfloat16") for width in (2048, 4096)]
    program = trace(lambda x, y: jnp.einsum("td,tf->df", x, y), tuple(given))
    topology = Topology.parse("v6e:2x4")
    mesh = make_mesh(topology, {"data": 8})
    return build_model(program, analyse_program(program, "tpu"), mesh, topology.usable_bytes)


def test_a_tensor_on_both_sides_of_a_matmul_is_narrow_by_the_columns_of_the_other_side() -> None:
    program = trace(_gram, (jax.ShapeDtypeStruct((2048, 2048), jnp.float32),), name="gram")
    model = model_of(program, "v6e:2x4", "data=4,model=2")
    (op,) = (op for op in model.graph.ops if op.kind == "dot_general")
    node = model.op_node[op.id]
    least = model.collectives.calibration.pipelined_columns
    expected = []
    for (other,), _ in reversed(op.rule.operands):  # the rows of an operand are the columns of the other one
        parts = np.prod(np.where(model.nodes[node].states == other, model.axis_sizes, 1), axis=1)
        expected.append((2048 / parts < least).tolist())
    assert expected[0] != expected[1]
    assert [reshard.narrow.tolist() for reshard in model.reshards if reshard.target == node] == expected


def _gram(x: jax.Array) -> jax.Array:
    """Return the products of all pairs of rows."""
    h = jnp.tanh(x)
    return jnp.einsum("ak,bk->ab", h, h)
