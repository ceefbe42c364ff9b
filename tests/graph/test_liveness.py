"""What reaches memory, and how long each value is held."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.graph import Liveness, OpClass, OpGraph, analyse, read_graph
from tests.graph import programs as made
from tests.graph.programs import bf16, f32, graph_of, ops


def lifetimes(liveness: Liveness) -> dict[int, tuple[int, int]]:
    """Without the narrow copies of stacks, which have their stack's name."""
    return {b[0]: b[1:] for b in reversed(liveness.buffers)}


def peak(graph: OpGraph, liveness: Liveness) -> int:
    size = {t.id: t.bytes for t in graph.tensors}
    return max(
        sum(size[t] for t, start, stop in liveness.buffers if start <= moment < stop)
        for moment in range(len(graph.ops) + 1)
    )


def carry_of(graph: OpGraph, shape: tuple[int, ...], loop: int = 0) -> Any:
    (found,) = (c for c in graph.loops[loop].carries if graph.tensors[c.body].shape == shape)
    return found


def test_a_chain_by_hand() -> None:
    #       0: dot a@b -> h    1: tanh h -> t    2: negate h -> n     3: dot t@b -> u    4: add u, n -> r
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
    assert lifetimes(liveness) == {a: (0, 1), b: (0, 3), h: (0, 5), t: (1, 3), u: (2, 5), r: (0, 6)}
    assert [(f.root, f.writes, f.reads) for f in liveness.fusions] == [
        (0, (h,), (a, b)),
        (1, (t,), (h,)),
        (2, (u,), (b, t)),
        (4, (r,), (h, u)),
    ]


def test_pointwise_chains_stay_inside_one_fusion() -> None:
    graph = graph_of(lambda x: jnp.exp(jnp.sin(x) * 2) + 1, f32(8, 8))
    liveness = analyse(graph)
    (fusion,) = liveness.fusions
    assert (fusion.reads, fusion.writes) == (graph.arguments, graph.results)
    assert liveness.materialised == {*graph.arguments, *graph.results}


def test_a_value_is_kept_when_recomputing_it_would_read_more() -> None:
    def fn(a: Any, b: Any, c: Any) -> Any:
        total = a + b + c
        return jnp.sum(total * 2, 0), jnp.max(total, 1)

    graph = graph_of(fn, *[f32(64, 64)] * 3)
    (total,) = (op.results[0] for op in ops(graph, "add") if graph.tensors[op.results[0]].producer == 1)
    assert total in analyse(graph).materialised
    once = graph_of(lambda a: (jnp.sum(jnp.sin(a) * 2, 0), jnp.max(jnp.sin(a), 1)), f32(64, 64))
    assert all(op.results[0] not in analyse(once).materialised for op in ops(once, "sine"))


def recurrence(decay: Any, value: Any, axis: int = 1) -> Any:
    """A gated recurrence as `lax.associative_scan` has it: halves at every level, put together by padding."""
    pair = (jax.nn.sigmoid(decay), value)
    return lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), pair, axis=axis)[1]


@pytest.mark.parametrize("tpu", [False, True])
def test_on_tpus_pads_between_elements_are_kernels(tpu: bool) -> None:
    def loss(decay: Any, value: Any, w: Any) -> Any:
        return jnp.sum(recurrence(decay @ w, value).sum(-1) ** 2)

    shape = f32(4, 64, 32, 8)
    graph = graph_of(jax.grad(loss, (0, 1)), shape, shape, f32(8, 8))
    liveness = analyse(graph, fused_matmuls=tpu)
    between = [op for op in ops(graph, "pad") if op.strided and graph.tensors[op.results[0]].elements]
    assert len(between) > 20 and all(op.strided == (1,) for op in between)
    roots = {fusion.root for fusion in liveness.fusions}
    assert all(op.id in roots for op in between if op.op_class is OpClass.HEAVY) == tpu


def test_on_tpus_what_is_taken_apart_is_computed_once() -> None:
    def fn(x: Any) -> Any:
        whole = jnp.exp(x)
        return whole[:, :8] * whole[:, 8:]

    graph = graph_of(fn, f32(4, 16, 8))
    whole = ops(graph, "exponential")[0].results[0]
    assert whole in analyse(graph, fused_matmuls=True).materialised
    assert whole not in analyse(graph).materialised


@pytest.mark.parametrize("axis, apart", [(0, False), (1, True), (2, True)])
def test_on_tpus_steps_through_tiles_are_kernels(axis: int, apart: bool) -> None:
    def half(x: Any) -> Any:
        return lax.slice_in_dim(jnp.sin(x), 0, 16, stride=2, axis=axis) * 2

    graph = graph_of(half, f32(16, 16, 16))
    (step,) = ops(graph, "slice")
    assert step.strided == (axis,)
    assert (step.results[0] in analyse(graph, fused_matmuls=True).materialised) == apart


def test_of_a_value_in_memory_only_the_slice_is_read() -> None:
    graph = graph_of(lambda x, y: x[:, :2] + y, f32(8, 64), f32(8, 2))
    (fusion,) = analyse(graph).fusions
    assert sorted(graph.tensors[t].shape for t in fusion.reads) == [(8, 2), (8, 2)]
    assert lifetimes(analyse(graph))[graph.arguments[0]] == (0, 2), "though all of it is held until then"


def test_what_a_matmul_reads_is_written_but_for_cheap_moves() -> None:
    graph = graph_of(lambda x, w: jnp.sin(x) @ w.T.astype(jnp.float32), f32(8, 4), f32(6, 4))
    liveness = analyse(graph)
    assert ops(graph, "sine")[0].results[0] in liveness.materialised
    assert all(op.results[0] not in liveness.materialised for op in ops(graph, "transpose"))
    (matmul,) = (f for f in liveness.fusions if graph.ops[f.root].kind == "dot_general")
    assert graph.arguments[1] in matmul.reads


@pytest.mark.parametrize("fused", [True, False])
def test_tpus_compute_activations_inside_the_matmuls_that_take_them(fused: bool) -> None:
    """An MLP's gradient: kept are the matmuls' results, and without it what follows from them too."""

    def loss(w: Any, x: Any) -> Any:
        for k in range(3):
            x = jax.nn.gelu(x @ w[k])
        return jnp.sum(x)

    graph = graph_of(jax.grad(loss), tuple(f32(64, 64) for _ in range(3)), f32(256, 64))
    liveness = analyse(graph, fused_matmuls=fused)
    products = {op.results[0] for op in ops(graph, "dot_general")}
    stored = [t for t in liveness.materialised if graph.tensors[t].shape == (256, 64) and t not in graph.arguments]
    assert stored and (set(stored) <= products) is fused


def test_attention_finds_its_operands_stored_on_tpus_too() -> None:
    def fn(q: Any, k: Any) -> Any:
        return jnp.einsum("bsd,btd->bst", jnp.sin(q), k)

    graph = graph_of(fn, f32(2, 8, 4), f32(2, 8, 4))
    assert ops(graph, "sine")[0].results[0] in analyse(graph, fused_matmuls=True).materialised


def test_a_sum_is_stored_as_narrow_as_it_is_made() -> None:
    """Not in the wide dtype in which several consumers go on."""

    def fn(a: Any, b: Any, c: Any) -> Any:
        wide = (a + b + c).astype(jnp.float32)
        return jnp.sum(wide * 2, 0), jnp.max(wide, 1)

    graph = graph_of(fn, *[bf16(64, 64)] * 3)
    liveness = analyse(graph)
    held = {graph.tensors[t].dtype for t in liveness.materialised if graph.tensors[t].shape == (64, 64)}
    made = [t for t in liveness.materialised if graph.tensors[t].shape == (64, 64) and t not in graph.arguments]
    assert held == {"bfloat16"} and len(made) == 1


def test_results_are_held_to_the_end_and_arguments_until_their_last_use() -> None:
    graph = graph_of(lambda x, y: (x @ y, jnp.sin(y) @ x), f32(8, 8), f32(8, 8))
    spans, end = lifetimes(analyse(graph)), len(graph.ops) + 1
    assert all(spans[t][1] == end for t in graph.results)
    assert spans[graph.arguments[0]] == (0, len(graph.ops))
    assert spans[graph.arguments[1]][1] < len(graph.ops)


def test_arguments_that_the_caller_keeps_are_held_to_the_end() -> None:
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


# Loops


def scanned(x: Any, w: Any) -> Any:
    return lax.scan(lambda c, p: (jnp.tanh(c @ p), c), x, w)


def test_a_carried_value_has_one_buffer_for_the_whole_loop() -> None:
    graph = graph_of(scanned, f32(8, 4), f32(5, 4, 4))
    (loop,) = graph.loops
    spans = lifetimes(analyse(graph))
    carry = carry_of(graph, (8, 4))
    assert loop.start > 0
    assert spans[carry.body] == (0, len(graph.ops) + 1), "the result is the same buffer, there from the start"
    assert carry.update not in spans and carry.result not in spans
    assert spans[graph.arguments[1]] == (0, loop.stop), "the weights are read by every trip"


def test_stacked_outputs_are_held_from_the_start_of_their_loop_to_its_use() -> None:
    def fn(x: Any, w: Any) -> Any:
        last, saved = scanned(x, w)
        return lax.scan(lambda c, s: (c @ s.T @ s, None), last, saved, reverse=True)[0]

    graph = graph_of(fn, f32(8, 4), f32(5, 4, 4))
    forward, backward = graph.loops
    saved = carry_of(graph, (5, 8, 4))
    liveness = analyse(graph)
    assert lifetimes(liveness)[saved.body] == (forward.start, backward.stop)
    writes = [f for f in liveness.fusions if graph.ops[f.root].kind == "dynamic_update_slice"]
    assert [graph.tensors[t].shape for f in writes for t in f.moved] == [(1, 8, 4)]
    reads = [f for f in liveness.fusions if f.root >= backward.start and graph.ops[f.root].kind == "dot_general"]
    shapes = {graph.tensors[t].shape for f in reads for t in f.reads}
    assert (1, 8, 4) in shapes and (5, 8, 4) not in shapes, "a trip reads one slice of the stack"


def test_saved_activations_cost_their_whole_stack() -> None:
    with_remat, without = made.decoder(), made.decoder(remat=False)
    kept, full = (read_graph(p.module) for p in (with_remat, without))
    stack = made.LAYERS * made.BATCH * made.SEQ * made.DIM * 4
    gained = peak(full, analyse(full)) - peak(kept, analyse(kept))
    assert gained > 2 * stack, "at least the inputs of more than two matmuls a layer"
    (saved,) = (c for c in kept.loops[0].carries if kept.tensors[c.body].shape[:1] == (made.LAYERS,))
    assert kept.tensors[saved.body].bytes == stack


def _decoding_layers(carried: bool, donated: bool = True) -> tuple[OpGraph, Liveness]:
    graph = read_graph(made.decoding_layers(carried).module)
    cache, after = graph.arguments[3], graph.results[0]
    return graph, analyse(graph, () if donated else (cache,), {cache: after} if donated else {})


def copies(graph: OpGraph, liveness: Liveness, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [copy for copy in liveness.copied if graph.tensors[copy[0]].shape == shape]


def test_caches_that_a_loop_carries_are_written_in_place() -> None:
    graph, liveness = _decoding_layers(carried=True)
    (loop,) = graph.loops
    cache = graph.tensors[graph.arguments[3]]
    held = carry_of(graph, cache.shape)
    spans = lifetimes(liveness)
    assert spans[cache.id] == (0, loop.start) and spans[held.body] == (loop.start, len(graph.ops) + 1)
    assert copies(graph, liveness, cache.shape) == []
    whole = [t.id for t in graph.tensors if t.shape == cache.shape]
    assert not {t for f in liveness.fusions for t in (*f.moved, *f.reads)}.intersection(whole)
    assert (1, *cache.shape[1:]) in {graph.tensors[t].shape for f in liveness.fusions for t in f.reads}


def test_caches_that_a_scan_takes_and_gives_are_held_twice_and_copied() -> None:
    graph, liveness = _decoding_layers(carried=False)
    (loop,) = graph.loops
    cache = graph.tensors[graph.arguments[3]]
    held = carry_of(graph, cache.shape)
    spans = lifetimes(liveness)
    assert spans[cache.id] == (0, len(graph.ops) + 1), "what is carried is copied into it at the end"
    assert spans[held.body] == (loop.start, len(graph.ops) + 1)
    assert copies(graph, liveness, cache.shape) == [(graph.results[0], -1)]
    moved = [graph.tensors[t].shape for f in liveness.fusions for t in f.moved]
    assert cache.shape[1:] in moved and (1, *cache.shape[1:]) in moved, (
        "one layer is made anew, then put into the stack"
    )


def test_a_cache_that_the_caller_keeps_is_copied_before_the_loop_that_writes_into_it() -> None:
    graph, liveness = _decoding_layers(carried=True, donated=False)
    cache = graph.tensors[graph.arguments[3]]
    held = carry_of(graph, cache.shape)
    assert copies(graph, liveness, cache.shape) == [(held.body, -1)]
    assert lifetimes(liveness)[cache.id][1] == len(graph.ops) + 1


def test_what_starts_a_loop_and_is_needed_later_is_copied() -> None:
    def fn(x: Any, w: Any) -> Any:
        first = x @ w
        last = lax.fori_loop(0, 4, lambda i, c: jnp.tanh(c @ w), first)
        return last @ first

    graph = graph_of(fn, f32(8, 8), f32(8, 8))
    spans = lifetimes(analyse(graph))
    carry = carry_of(graph, (8, 8))
    assert spans[carry.init] == (0, len(graph.ops))
    assert spans[carry.body][0] == graph.loops[0].start
    used_up = graph_of(lambda x, w: lax.fori_loop(0, 4, lambda i, c: jnp.tanh(c @ w), x @ w), f32(8, 8), f32(8, 8))
    carry = carry_of(used_up, (8, 8))
    assert carry.init not in (spans := lifetimes(analyse(used_up)))
    assert spans[carry.body] == (used_up.tensors[carry.init].producer, len(used_up.ops) + 1)


def test_one_value_that_starts_two_carried_ones_is_held_twice() -> None:
    def fn(x: Any, w: Any) -> Any:
        first = x @ w
        return lax.fori_loop(0, 4, lambda i, c: (c[0] @ w, jnp.tanh(c[1] @ w)), (first, first))

    graph = graph_of(fn, f32(8, 8), f32(8, 8))
    bodies = [c.body for c in graph.loops[0].carries if graph.tensors[c.body].shape == (8, 8)]
    spans = lifetimes(analyse(graph))
    assert len(bodies) == 2 and all(body in spans for body in bodies)


def test_nested_loops_share_the_outer_ones_buffer() -> None:
    def inner(c: Any, w: Any) -> Any:
        return lax.fori_loop(0, 4, lambda i, c: jnp.tanh(c @ w), c), None

    graph = graph_of(lambda x, w: lax.scan(inner, x, w)[0], f32(8, 4), f32(5, 4, 4))
    outer, nested = (carry_of(graph, (8, 4), loop) for loop in (0, 1))
    spans = lifetimes(analyse(graph))
    assert spans[outer.body] == (0, len(graph.ops) + 1)
    assert not {nested.body, nested.update, nested.result, outer.update, outer.result} & set(spans)


def test_values_of_an_outer_scope_outlive_the_loop_that_reads_them() -> None:
    def fn(x: Any, w: Any, b: Any) -> Any:
        bias = jnp.sin(b @ b)
        return lax.fori_loop(0, 4, lambda i, c: jnp.tanh(c @ w + bias), x)

    graph = graph_of(fn, f32(8, 8), f32(8, 8), f32(8, 8))
    (loop,) = graph.loops
    spans = lifetimes(analyse(graph))
    sine = ops(graph, "sine")[0].results[0]
    held = spans[sine] if sine in spans else spans[ops(graph, "dot_general")[0].results[0]]
    assert held[1] == loop.stop


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


@pytest.mark.parametrize(
    "name",
    ["mlp", "decoder", "decoder without remat", "decoding", "decoding, caches carried", "decoding, caches scanned"],
)
def test_the_peak_is_near_the_compilers(name: str) -> None:
    """XLA for one CPU device, whole: its buffer assignment orders and fuses ops in its own way."""
    program = made.PROGRAMS[name]()
    graph = read_graph(program.module)
    named = list(zip(graph.arguments, program.arguments, strict=True))
    kept = [t for t, a in named if not a.donated]
    updates = {t: graph.results[a.result] for t, a in named if a.donated and a.result is not None}
    compiled = jax.jit(program.fn, donate_argnums=program.donate_argnums).lower(*program.args).compile()
    found = compiled.memory_analysis()
    total = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes
    assert peak(graph, analyse(graph, kept, updates)) == pytest.approx(total - found.alias_size_in_bytes, rel=0.25)


@pytest.mark.parametrize("masked", [True, False])
def test_scores_are_stored_as_what_the_matmul_goes_on_to(masked: bool) -> None:
    def fn(a: Any, b: Any) -> Any:
        scores = (a @ b).astype(jnp.float32)
        return jax.nn.softmax(jnp.sin(scores) if masked else scores)

    graph = graph_of(fn, bf16(8, 8), bf16(8, 8))
    liveness = analyse(graph)
    product = ops(graph, "dot_general")[0].results[0]
    (buffer,) = (b for b in liveness.buffers if b[0] == product)
    assert liveness.itemsize(graph, buffer) == (4 if masked else 2)


def test_a_stack_that_a_loop_narrows_is_narrowed_once_before_it() -> None:
    def fn(stack: Any, x: Any) -> Any:
        return lax.scan(lambda c, w: (c @ w.astype(jnp.bfloat16), None), x, stack)[0]

    graph = graph_of(fn, f32(4, 8, 8), bf16(8, 8))
    liveness = analyse(graph)
    (loop,) = graph.loops
    stack = graph.arguments[0]
    assert [(b, liveness.itemsize(graph, b)) for b in liveness.buffers if b[0] == stack and b[1]] == [
        ((stack, loop.start, loop.stop), 2)
    ]
