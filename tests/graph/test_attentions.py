"""Attention that one op computes: it is recognised, with its factors and the values around it."""

import pytest

from autoshard.graph import find_attentions, read_graph
from autoshard.program import DecoderDims, decoder_program


DIMS = DecoderDims(layers=2, width=64, mlp_width=128, heads=4, kv_heads=2, head_size=16, vocabulary=128)


@pytest.mark.parametrize(("attention", "exchange"), [("flash", "auto"), ("flash", "ring"), ("splash", "auto")])
def test_each_kernel_is_found_and_what_stands_between_it_and_the_projections(attention: str, exchange: str) -> None:
    program = decoder_program(DIMS, batch=2, seq=256, attention=attention, exchange=exchange, optimizer="sgd")
    graph = read_graph(program.module)
    attentions = find_attentions(graph)
    forward = [each for each in attentions if each.forward]
    assert len(forward) == 2 and len(attentions) > 2, "in a loop and computed again, and the gradients"
    for each in attentions:
        assert each.ring is (exchange == "ring")
        assert each.heads == (2, 2)
        assert (each.queries == each.keys) is each.ring
        assert not each.leading & each.sequence
        shapes = {graph.tensors[t].shape[dim] for t, dim in each.values.items()}
        assert shapes == {256}, "the dim that is said to be the sequence is as long"
        assert each.of_queries <= set(each.values)
    makers = {graph.ops[graph.tensors[t].producer].kind for t in forward[0].values if graph.tensors[t].producer >= 0}
    assert "dot_general" in makers, "the projection's result is the first of them"


def test_scores_of_a_programs_own_matmuls_are_not() -> None:
    program = decoder_program(DIMS, batch=2, seq=64, attention="plain", optimizer="sgd")
    assert find_attentions(read_graph(program.module)) == ()
