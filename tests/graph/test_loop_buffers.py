"""Buffers of loops: carried, stacked, copied and narrowed values."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.graph import Liveness, OpGraph, analyse, read_graph
from tests.graph import programs as made
from tests.graph.buffers import TPU, carry_of, lifetimes, peak
from tests.graph.programs import bf16, f32, graph_of, ops


TRUTH = jax.ShapeDtypeStruct((), jnp.bool_)


def scanned(x: Any, w: Any) -> Any:
    return lax.scan(lambda c, p: (jnp.tanh(c @ p), c), x, w)


def test_a_carried_value_has_one_buffer_for_the_whole_loop() -> None:
    graph = graph_of(scanned, f32(8, 4), f32(5, 4, 4))
    (loop,) = graph.loops
    liveness = analyse(graph)
    spans = lifetimes(liveness)
    carry = carry_of(graph, (8, 4))
    assert loop.start > 0
    assert spans[carry.body] == (loop.start, len(graph.ops) + 1), "the result is the same buffer"
    assert carry.body in liveness.reserved
    assert carry.update not in spans and carry.result not in spans
    assert spans[graph.arguments[1]] == (0, loop.stop), "the weights are read by every trip"


def test_stacked_outputs_are_stored_from_the_start_of_their_loop_to_its_use() -> None:
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
    found = [each for each in liveness.extra_traffic if graph.tensors[each.tensor].shape == shape]
    assert all(each.count == 2 for each in found), "read and written"
    return [(each.tensor, each.block) for each in found]


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


def test_caches_that_a_scan_takes_and_gives_are_stored_twice_and_copied() -> None:
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


def test_one_value_that_starts_two_carried_ones_is_stored_twice() -> None:
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
    assert spans[outer.body] == (graph.loops[0].start, len(graph.ops) + 1)
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


def test_a_stack_that_loops_in_a_loop_take_apart_is_copied_for_them_if_it_is_written_over() -> None:
    def fn(stack: Any, parts: Any) -> Any:
        def layers(x: Any) -> Any:
            return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, stack)[0].sum()

        total = lax.scan(lambda t, x: (t + layers(x), None), jnp.zeros(()), parts)[0]
        return stack - total

    graph = graph_of(fn, f32(4, 8, 8), f32(3, 16, 8))
    stack, (result,) = graph.arguments[0], graph.results
    outer = next(loop for loop in graph.loops if loop.parent < 0)

    def copies(**options: Any) -> list[tuple[tuple[int, int, int], int]]:
        liveness = analyse(graph, **options)
        return [(b, liveness.itemsize(graph, b)) for b in liveness.buffers if b[0] == stack and b[1]]

    assert copies(updates={stack: result}, rules=TPU) == [((stack, outer.start, outer.stop), 4)]
    assert copies(rules=TPU) == copies(updates={stack: result}) == []


def test_a_narrowed_stack_has_one_narrow_copy_for_loops_in_a_loop() -> None:
    """Hold the narrow copy alone. Programs compiled for v6e have no copy of the wide stack for their loops."""

    def fn(stack: Any, parts: Any) -> Any:
        def layers(x: Any) -> Any:
            return lax.scan(lambda c, w: (jnp.tanh(c @ w.astype(jnp.bfloat16)), None), x, stack)[0].sum()

        total = lax.scan(lambda t, x: (t + layers(x), None), jnp.zeros((), jnp.bfloat16), parts)[0]
        return stack - total

    graph = graph_of(fn, f32(4, 8, 8), jax.ShapeDtypeStruct((3, 16, 8), jnp.bfloat16))
    stack, (result,) = graph.arguments[0], graph.results
    outer = next(loop for loop in graph.loops if loop.parent < 0)
    liveness = analyse(graph, updates={stack: result}, rules=TPU)
    copies = [(b, liveness.itemsize(graph, b)) for b in liveness.buffers if b[0] == stack and b[1]]
    assert copies == [((stack, outer.start, outer.stop), 2)]


def test_a_carried_value_that_starts_two_of_a_loop_within_is_stored_once_more() -> None:
    """Allocate one more buffer: one inner carry aliases the outer value, and the other needs memory of its own."""

    def outer(i: Any, c: Any) -> Any:
        a, b = lax.fori_loop(0, 4, lambda j, pair: (jnp.tanh(pair[0] @ pair[1]), pair[1] @ pair[0]), (c, c))
        return a + b

    graph = graph_of(lambda x, w: lax.fori_loop(0, 3, outer, x @ w), f32(8, 8), f32(8, 8))
    carried = carry_of(graph, (8, 8))
    within = [c.body for c in graph.loops[1].carries if graph.tensors[c.body].shape == (8, 8)]
    spans = lifetimes(analyse(graph))
    assert len(within) == 2
    assert carried.body in spans and sum(body in spans for body in within) == 1


@pytest.mark.heavy
def test_an_argument_that_starts_what_replaces_it_is_copied_into_if_a_matmul_reads_it() -> None:
    """Copy the result: the loop's buffer is written while the matmul reads the argument that the result aliases."""

    def fn(x: Any, w: Any) -> Any:
        return lax.fori_loop(0, 4, lambda i, c: jnp.tanh(c @ w), x @ w)

    shapes = f32(64, 64), f32(64, 64)
    graph = graph_of(fn, *shapes)
    (x, _), (after,) = graph.arguments, graph.results
    liveness = analyse(graph, updates={x: after})
    assert copies(graph, liveness, (64, 64)) == [(after, -1)]
    assert lifetimes(liveness)[x] == (0, len(graph.ops) + 1)
    memory = jax.jit(fn, donate_argnums=0).lower(*shapes).compile().memory_analysis()
    assert memory.alias_size_in_bytes == 64 * 64 * 4 <= memory.temp_size_in_bytes


@pytest.mark.heavy
def test_a_cache_that_is_written_twice_is_one_buffer_for_us_and_for_the_compiler() -> None:
    def fn(cache: Any, new: Any) -> Any:
        cache = lax.dynamic_update_slice(cache, new @ new, (0, 2))
        return lax.dynamic_update_slice(cache, new, (32, 0))

    shapes = f32(1024, 32), f32(32, 32)
    graph = graph_of(fn, *shapes)
    (cache, _), (after,) = graph.arguments, graph.results
    liveness = analyse(graph, updates={cache: after})
    assert liveness.extra_traffic == ()
    first = next(op for op in graph.ops if op.kind == "dynamic_update_slice")
    assert lifetimes(liveness)[cache] == (0, first.id)
    size = graph.tensors[cache].bytes
    assert peak(graph, liveness) < 1.2 * size
    memory = jax.jit(fn, donate_argnums=0).lower(*shapes).compile().memory_analysis()
    assert memory.alias_size_in_bytes == size and memory.temp_size_in_bytes < 0.2 * size


def test_what_a_branch_needs_is_needed_no_longer_than_its_op() -> None:
    """Free the value after its op in a branch. A loop would need it again in its next trip."""

    def chain(x: Any, w: Any) -> Any:
        return jnp.sin(jnp.cos(jnp.tanh(x @ w)) @ x) @ x

    branch = graph_of(lambda x, w, yes: lax.cond(yes, chain, lambda x, w: x, x, w), f32(8, 8), f32(8, 8), TRUTH)
    looped = graph_of(lambda x, w: lax.fori_loop(0, 4, lambda i, x: chain(x, w), x), f32(8, 8), f32(8, 8))
    for graph, until_stop in ((branch, False), (looped, True)):
        w = graph.arguments[1]
        read = next(op for op in graph.ops if w in op.operands and op.kind == "dot_general")
        loop = graph.loops[read.loop]
        assert read.id + 1 < loop.stop
        assert lifetimes(analyse(graph))[w] == (0, loop.stop if until_stop else read.id + 1)
