"""Lifetimes of values, and updates in place."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from autoshard.graph import TO_HOST, analyse, read_graph
from autoshard.program import trace
from autoshard.program.jax.optimizers import make_optimizer
from tests.graph import programs as made
from tests.graph.buffers import lifetimes, peak
from tests.graph.programs import f32, graph_of


def test_a_chain_by_hand() -> None:
    # 0: dot a@b -> h. 1: tanh h -> t. 2: negate h -> n. 3: dot t@b -> u. 4: add u, n -> r.
    def fn(a: Any, b: Any) -> Any:
        h = a @ b
        return jnp.tanh(h) @ b + (-h)

    graph = graph_of(fn, f32(8, 8), f32(8, 8))
    assert [op.kind for op in graph.ops] == ["dot_general", "tanh", "dot_general", "negate", "add"]
    a, b = graph.arguments
    h, t, u, n, r = (op.results[0] for op in graph.ops)
    liveness = analyse(graph)
    assert liveness.materialised == {a, b, h, t, u, r}, "the negation is recomputed inside the addition"
    assert n not in lifetimes(liveness)
    assert lifetimes(liveness) == {a: (0, 1), b: (0, 3), h: (0, 5), t: (1, 3), u: (2, 5), r: (4, 6)}
    assert liveness.reserved == {r}
    assert [(f.root, f.writes, f.reads) for f in liveness.fusions] == [
        (0, (h,), (a, b)),
        (1, (t,), (h,)),
        (2, (u,), (b, t)),
        (4, (r,), (h, u)),
    ]


def test_results_are_stored_to_the_end_and_arguments_until_their_last_use() -> None:
    graph = graph_of(lambda x, y: (x @ y, jnp.sin(y) @ x), f32(8, 8), f32(8, 8))
    spans, end = lifetimes(analyse(graph)), len(graph.ops) + 1
    assert all(spans[t][1] == end for t in graph.results)
    assert spans[graph.arguments[0]] == (0, len(graph.ops))
    assert spans[graph.arguments[1]][1] < len(graph.ops)


def test_arguments_that_the_caller_keeps_are_stored_to_the_end() -> None:
    graph = graph_of(lambda x, y: jnp.sin(x @ y) @ y, f32(8, 8), f32(8, 8))
    x, y = graph.arguments
    spans = lifetimes(analyse(graph, kept=[x]))
    assert spans[x] == (0, len(graph.ops) + 1)
    assert spans[y] == (0, 3)


def test_donated_state_is_written_in_place() -> None:
    def step(w: Any, x: Any) -> Any:
        return w - 0.1 * (x.T @ x), jnp.sum(x)

    graph = graph_of(step, f32(64, 64), f32(8, 64))
    (w, x), (new, _) = graph.arguments, graph.results
    plain, donated = analyse(graph, kept=[w, x]), analyse(graph, kept=[x], updates={w: new})
    assert lifetimes(donated)[w][1] == lifetimes(donated)[new][0] == graph.tensors[new].producer
    assert peak(graph, plain) - peak(graph, donated) == 64 * 64 * 4


def test_state_that_is_read_after_its_update_is_not_overwritten() -> None:
    graph = graph_of(lambda w: (w * 2, jnp.max(w @ w)), f32(64, 64))
    (w,), (new, _) = graph.arguments, graph.results
    spans = lifetimes(analyse(graph, updates={w: new}))
    assert spans[w][1] > spans[new][0]


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
def test_state_that_is_stored_narrow_is_written_in_place(dtype: str, optimizer: str) -> None:
    """Update a parameter in place if it follows from moments in float32, which are not stored. XLA does the same."""
    update = make_optimizer(optimizer, dtype)

    def step(params: Any, state: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p["a"]) @ p["b"]))(params)
        changes, state = update.update(grads, state, params)
        return optax.apply_updates(params, changes), state

    size = 256
    params = {name: jax.ShapeDtypeStruct((size, size), dtype) for name in "ab"}
    given = (params, jax.eval_shape(update.init, params), jax.ShapeDtypeStruct((8, size), dtype))
    program = trace(step, given, donate_argnums=(0, 1))
    graph = read_graph(program.module)
    named = list(zip(graph.arguments, program.arguments, strict=True))
    updates = {t: graph.results[a.result] for t, a in named if a.result is not None}
    spans = lifetimes(analyse(graph, kept=[graph.arguments[-1]], updates=updates))
    assert all(spans[old][1] <= spans[new][0] for old, new in updates.items() if graph.tensors[old].elements > 1)
    analysis = jax.jit(step, donate_argnums=(0, 1)).lower(*given).compile().memory_analysis()
    total = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    gradients = 2 * size * size * jnp.dtype(dtype).itemsize
    held = peak(graph, analyse(graph, kept=[graph.arguments[-1]], updates=updates))
    # The gradients, and one of them transposed. New moments in addition to the old ones would be two or three times as
    # much.
    assert total + gradients < held <= total + 1.6 * gradients


def test_a_cache_is_written_in_place_and_only_the_slice_is_moved() -> None:
    program = made.decoding()
    graph = read_graph(program.module)
    liveness = analyse(graph, updates={graph.arguments[3]: graph.results[0]})
    assert program.arguments[3].name == "cache"
    (write,) = (f for f in liveness.fusions if graph.ops[f.root].kind == "dynamic_update_slice")
    assert [graph.tensors[t].shape for t in write.moved] == [(made.BATCH, 1, made.DIM)]
    assert graph.arguments[3] not in write.reads
    spans = lifetimes(liveness)
    assert spans[graph.arguments[3]][1] <= spans[graph.results[0]][0] + 1


def test_a_value_that_is_needed_again_is_not_written_over() -> None:
    def fn(cache: Any, new: Any) -> Any:
        return lax.dynamic_update_slice(cache, new, (0, 2)), jnp.max(cache @ cache)

    graph = graph_of(fn, f32(64, 64), f32(64, 1))
    (cache, _), (after, _) = graph.arguments, graph.results
    liveness = analyse(graph, updates={cache: after})
    (write,) = (f for f in liveness.fusions if graph.ops[f.root].kind == "dynamic_update_slice")
    assert cache in write.reads and write.moved == (after,)
    assert lifetimes(liveness)[cache][1] > lifetimes(liveness)[after][0]


@pytest.mark.parametrize("name", made.PROGRAMS)
def test_buffers_are_sound(name: str) -> None:
    program = made.PROGRAMS[name]()
    graph = read_graph(program.module)
    liveness = analyse(graph)
    tensors = [b[0] for b in liveness.buffers if b not in liveness.widths or b[0] not in graph.arguments]
    assert len(set(tensors)) == len(tensors) and set(tensors) <= liveness.materialised
    assert all(0 <= start < stop <= len(graph.ops) + 1 for _, start, stop in liveness.buffers)
    assert set(graph.arguments) <= set(tensors)
    assert {t for f in liveness.fusions for t in f.writes} <= liveness.materialised
    spans = lifetimes(liveness)
    for fusion in liveness.fusions:
        for tensor in fusion.reads:
            if tensor in spans:
                assert spans[tensor][0] <= fusion.root < spans[tensor][1], "what is read is there"


@pytest.mark.heavy
@pytest.mark.parametrize(
    "name",
    ["mlp", "decoder", "decoder without remat", "decoding", "decoding, caches carried", "decoding, caches scanned"],
)
def test_the_peak_is_near_the_compilers(name: str) -> None:
    """Compare the peak with XLA's on one CPU device. Its buffer assignment orders and fuses ops in its own way."""
    program = made.PROGRAMS[name]()
    graph = read_graph(program.module)
    named = list(zip(graph.arguments, program.arguments, strict=True))
    kept = [t for t, a in named if not a.donated]
    updates = {t: graph.results[a.result] for t, a in named if a.donated and a.result is not None}
    compiled = jax.jit(program.fn, donate_argnums=program.donate_argnums).lower(*program.args).compile()
    found = compiled.memory_analysis()
    total = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
    assert peak(graph, analyse(graph, kept, updates)) == pytest.approx(total - found.alias_size_in_bytes, rel=0.25)


def test_the_device_holds_what_goes_to_the_host_until_it_is_sent_and_again_once_it_is_back() -> None:
    def fn(x: Any, w: Any) -> Any:
        away = jax.device_put(x @ w, jax.memory.Space.Host)
        later = lax.fori_loop(0, 4, lambda i, y: jnp.sin(y @ w), x @ (w + 1.0))
        return jax.device_put(away, jax.memory.Space.Device) @ w + later

    graph = graph_of(fn, f32(32, 32), f32(32, 32))
    (sent,), (fetched,) = ([op for op in graph.ops if op.kind == kind] for kind in (TO_HOST, "to_device"))
    assert sent.id < graph.loops[0].start < graph.loops[0].stop <= fetched.id
    spans = lifetimes(analyse(graph))
    (source,), (away,), (back,) = sent.operands, sent.results, fetched.results
    assert spans[source][1] == sent.id + 1 and away not in spans
    assert spans[back][0] == fetched.id
