"""Arrays that need more bytes than their elements, since registers have 128 lanes and 8 rows."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cost import Topology, make_mesh, tile_padding
from autoshard.exec import compile_figures, compile_plan
from autoshard.planning import Options, make_plan
from autoshard.planning.price.analysed_program import analyse_program, build_model
from autoshard.planning.price.evaluate import evaluate
from autoshard.planning.space.decision_model import Model
from autoshard.program import DecoderDims, decoder_program, open_source, trace
from tests.graph.programs import f32


def half(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def whole(run: Any, *given: Any, topology: str = "v5e:1x1") -> Model:
    """Build the model of a program on one device, where nothing is split."""
    parsed = Topology.parse(topology)
    program = trace(run, given, name="padded")
    mesh = make_mesh(parsed, {"data": parsed.num_devices})
    return build_model(program, analyse_program(program, parsed.backend), mesh, parsed.usable_bytes)


@pytest.mark.parametrize(
    "shape, itemsize, outer, ratio",
    [  # read from the layouts of programs compiled for v5e
        ((64, 8, 16, 64, 64), 4, (), 2.0),
        ((256, 8, 64, 64), 4, (), 1.0),
        ((4, 3000, 7, 5), 4, (), 3072 / 3000),
        ((1000, 3), 4, (), 1024 / 1000 * 4 / 3),
        ((7, 300, 3, 300), 4, (), 384 / 300 * 304 / 300),
        ((64, 100, 30), 4, (), 128 / 100),
        ((32, 32, 32, 32), 1, (), 4.0),
        ((8, 2048, 12, 64), 2, (), 1.0),
        ((16, 56, 56, 64), 2, (), 2.0),
        ((256, 28, 28, 64), 2, (), 1.0),
        ((64, 128, 2, 64, 64), 4, (0,), 1.0),
        ((64, 8, 4, 64, 128), 4, (0,), 1.0),
        ((64, 8, 4, 96, 96), 4, (0,), 128 / 96),
        ((512, 4, 49, 49), 4, (0, 1), 128 / 49 * 56 / 49),
        ((4096, 27, 27), 2, (0,), 128 / 27 * 32 / 27),
        ((65536, 4, 4), 2, (0,), 32.0),
    ],
)
def test_padding_is_the_compilers(shape: tuple[int, ...], itemsize: int, outer: tuple[int, ...], ratio: float) -> None:
    assert tile_padding(np.array([shape], dtype=float), itemsize, outer) == pytest.approx([ratio])


def test_what_is_left_of_a_split_dim_is_padded() -> None:
    local = np.array([[64, 128, 16], [64, 16, 16]], dtype=float)
    assert tile_padding(local, 4, (0,)).tolist() == [1.0, 8.0]


def test_in_order_the_last_dim_lies_along_the_lanes() -> None:
    local = np.array([[79, 192, 1536, 32], [79, 192, 32, 1536]], dtype=float)
    assert tile_padding(local, 2, (0,)).tolist() == [1.0, 1.0]
    assert tile_padding(local, 2, (0,), in_order=True).tolist() == [4.0, 1.0]  # compiled for tpu7x


@pytest.mark.parametrize(("queries", "outer"), [(1, ()), (8, (0, 1))])
def test_a_product_with_single_rows_is_no_matmul_whose_batch_dims_are_in_no_tile(
    queries: int, outer: tuple[int, ...]
) -> None:
    """Lay the cache out along its batch: with a single query row, the product is elementwise and no matmul."""
    cache, x = half(256, 4, 3, 64), half(256, 4, queries, 64)
    model = whole(lambda cache, x: jnp.einsum("bhkd,bhqd->bhkq", cache, x), cache, x)
    number = model.graph.arguments[0]
    assert model.padding.tile_layout(number)[0] == outer
    ratio = float(model.padding.ratio(number, np.array([[-1]]), [1])[0])
    assert (ratio == 1.0) == (queries == 1)


def test_stacks_of_matrices_that_kernels_take_lie_in_order() -> None:
    """Order the narrowed copy of a parameter before the loop, and the stack of its gradients, not the parameter."""
    program = decoder_program(
        DecoderDims(4, 128, 256, 2, 2, 64, 256, experts=4, active_experts=2), batch=2, seq=128, routing="kernels",
        stack_axis=1,
    )  # fmt: skip
    parsed = Topology.parse("v5p:2x2x1")
    model = build_model(
        program, analyse_program(program, parsed.backend), make_mesh(parsed, {"data": 4}), parsed.usable_bytes
    )
    padding, graph = model.padding, model.graph
    found = {(graph.tensors[t].shape, graph.tensors[t].dtype.startswith("bf")) for t in padding.in_order}
    assert {shape for shape, _ in found} == {(4, 4, 128, 256), (4, 4, 256, 128)}
    assert not padding.in_order & set(graph.arguments)
    narrow = [buffer for buffer in model.liveness.widths if buffer[0] in padding.in_order]
    assert len(narrow) >= 3


STEPS, HEADS, WIDTH = 256, 4, 64


@pytest.mark.heavy
def test_what_attention_kernels_take_lies_in_order(tmp_path: Path) -> None:
    """Predict the memory of layers that keep queries, keys and values of heads of 64, each in twice its bytes."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 8, "num_hidden_layers": 6}
    config = {"model_type": "llama", "vocab_size": 1024, "num_key_value_heads": 8, "max_position_embeddings": 1024}
    file = tmp_path / "heads.json"
    file.write_text(json.dumps(config | sizes))
    program = open_source(f"hf:{file}", train=True, batch=64, seq=1024, attention="splash")
    plan = make_plan(program, Options(topology="v5e:2x4", mesh="data=8")).plan
    compiled = compile_figures(compile_plan(program, plan, 300.0, quick=True))["peak_bytes"]["reserved"]
    assert plan.prediction.peak_bytes == pytest.approx(compiled, rel=0.05)
    # Each layer keeps queries, keys, values and the kernel's result, of which half is padding.
    assert 4 * 6 * 8 * 1024 * 512 * 2 > 0.1 * compiled


def recurrence(width: int) -> tuple[Any, tuple[Any, ...]]:
    """Return the gradients of a recurrence and their arguments: a `width` x `width` state for each of 8 x 4 heads."""

    def step(state: Any, given: Any) -> Any:
        r, k, v = given
        state = 0.9 * state + k[..., :, None] * v[..., None, :]
        return state, jnp.einsum("bhk,bhkv->bhv", r, state)

    def run(r: Any, k: Any, v: Any) -> Any:
        def loss(*given: Any) -> Any:
            return jnp.sum(jax.lax.scan(step, jnp.zeros((8, HEADS, width, width)), given)[1] ** 2)

        return jax.grad(loss, argnums=(0, 1, 2))(r, k, v)

    return run, (f32(STEPS, 8, HEADS, width),) * 3


@pytest.mark.parametrize(
    ("width", "topology", "ratio"), [(64, "v5e:1x1", 2.0), (128, "v5e:1x1", 1.0), (64, "cpu:1", 1.0)]
)
def test_states_that_a_recurrence_saves_are_padded(width: int, topology: str, ratio: float) -> None:
    run, given = recurrence(width)
    model = whole(run, *given, topology=topology)
    shape = (STEPS, 8, HEADS, width, width)
    saved = [(t, *span) for t, *span in model.liveness.buffers if model.graph.tensors[t].shape == shape]
    assert saved
    elements = int(np.prod(shape)) * 4
    for tensor, start, stop in saved:
        assert model.padding.shard_bytes(tensor, shape, 4) == ratio * elements
        node = model.nodes[model.cluster_node[model.structure.cluster_of[tensor]]]
        assert any((m.start, m.stop, int(m.usage[0])) == (start, stop, ratio * elements) for m in node.memory)
    outcome = evaluate(model, np.zeros(len(model.nodes), dtype=np.int64))
    assert outcome.peak_bytes >= ratio * elements


def attention(batch: int, length: int, heads: int, width: int) -> tuple[Any, tuple[Any, ...]]:
    def run(x: Any, w: Any) -> Any:
        q, k, v = jnp.einsum("bsd,dchk->cbshk", x, w)
        scores = jax.nn.softmax(jnp.einsum("bshk,bthk->bhst", q, k).astype(jnp.float32))
        return jnp.einsum("bhst,bthk->bshk", scores.astype(x.dtype), v)

    return run, (half(batch, length, heads * width), half(heads * width, 3, heads, width))


@pytest.mark.parametrize(("length", "ratio"), [(1024, 1.0), (49, 128 / 49 * 56 / 49)])
def test_scores_lie_head_after_head(length: int, ratio: float) -> None:
    """Fill the lanes along a long sequence for any number of heads. A window of 49 tokens does not fill them."""
    run, given = attention(256, length, 4, 32)
    model = whole(run, *given)
    shape = (256, 4, length, length)
    scores = [op.results[0] for op in model.graph.ops if model.graph.tensors[op.results[0]].shape == shape]
    made = [t for t in scores if model.graph.ops[model.graph.tensors[t].producer].kind == "dot_general"]
    assert made
    for tensor in made:
        states = np.full((1, 1), -1)
        assert model.padding.ratio(tensor, states, model.axis_sizes) == pytest.approx([ratio])


def test_caches_of_narrow_heads_are_not_padded() -> None:
    """Lay the positions along the lanes, in the cache and in each layer that the loop slices from it."""

    def run(q: Any, caches: Any) -> Any:
        def layer(x: Any, cache: Any) -> Any:
            mixed = jnp.einsum("bkgd,bktd->bkgt", x, cache)
            return x + jnp.einsum("bkgt,bktd->bkgd", jax.nn.softmax(mixed), cache), None

        return jax.lax.scan(layer, q, caches)[0]

    model = whole(run, f32(4, 8, 2, 64), f32(3, 4, 8, 1024, 64))
    cache = model.graph.arguments[1]
    assert model.padding.shard_bytes(cache, (3, 4, 8, 1024, 64), 4) == 3 * 4 * 8 * 1024 * 64 * 4


@pytest.mark.parametrize(("dim", "read"), [(0, 0.5), (3, 1.0)])
def test_a_slice_reads_what_it_takes_unless_it_steps_inside_of_tiles(dim: int, read: float) -> None:
    """Read half of an array: its every second matrix, or every second column of each matrix."""
    shape = (64, 8, 256, 512)
    model = whole(lambda x: x[(slice(None),) * dim + (slice(None, None, 2),)], f32(*shape))
    seconds = sum(float(s[0]) for n in model.nodes for channel, s in n.time.items() if channel == (-1, "compute"))
    moving = float(model.compute.memory_seconds((read + 0.5) * np.prod(shape) * 4))
    assert seconds == pytest.approx(moving + model.compute.calibration.op_overhead_s, rel=1e-3)
