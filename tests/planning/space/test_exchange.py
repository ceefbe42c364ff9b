"""Attention with a split sequence: its exchange of queries, keys and values is forced, named, priced and refused."""

import dataclasses
import functools

import numpy as np
import pytest

from autoshard.cost import Topology, make_mesh
from autoshard.errors import UserError
from autoshard.graph import find_attentions
from autoshard.planning import Options, Plan, make_plan, read_asked
from autoshard.planning.price.analysed_program import analyse_program, build_model
from autoshard.planning.price.evaluate import evaluate
from autoshard.planning.solve.mesh_solve import Terms, solve_within
from autoshard.planning.solve.time_weights import even_weights, normalise
from autoshard.planning.space.attention_exchange import check_exchange, exchange_words, moved_axes
from autoshard.planning.space.named_layouts import Uses, stated
from autoshard.planning.xla.axis_assignments import WHOLE
from autoshard.program import DecoderDims, Program, decoder_program


DIMS = DecoderDims(layers=2, width=512, mlp_width=1024, heads=8, kv_heads=4, head_size=64, vocabulary=512)
SEQ = 8192


@functools.cache
def program(exchange: str, dims: DecoderDims = DIMS, attention: str = "flash") -> Program:
    return decoder_program(dims, batch=2, seq=SEQ, attention=attention, exchange=exchange, optimizer="sgd")


@functools.cache
def planned(exchange: str, groups: str) -> Plan:
    options = Options(
        topology="v5p:2x2x2", mesh="context=8", calibration=False, refine_axes=False,
        asked=read_asked(pins={"batch.*": "None,context"}, axis_only={"context": groups}),
    )  # fmt: skip
    return make_plan(program(exchange), options).plan


def said(exchange: str, groups: str = "sequence") -> list[str]:
    return [line for line in planned(exchange, groups).words if "gathered" in line or "ring" in line or "heads" in line]


def kinds(plan: Plan) -> set[str]:
    return {each.kind for each in plan.prediction.collectives if "attention" in each.cause or "ffi_call" in each.cause}


def test_a_split_sequence_gathers_keys_and_values_or_sends_them_around() -> None:
    assert said("gather") == ["keys and values gathered over context"]
    assert said("auto") == said("gather")
    assert said("ring") == ["ring over context"]
    assert "collective-permute" in kinds(planned("ring", "sequence"))
    assert "collective-permute" not in kinds(planned("gather", "sequence"))


def test_permutes_of_a_ring_are_counted_by_turn() -> None:
    """Count a ring's permutes: seven of keys and values forward in two layers, and again in the gradient plus one."""
    forward = find_attentions(analyse_program(program("ring"), "tpu").graph)
    assert [each.forward for each in forward] == [True, True, False], "the forward pass is computed again"
    permutes = [c for c in planned("ring", "sequence").prediction.collectives if c.kind == "collective-permute"]
    assert sum(c.count for c in permutes) == 2 * (7 + 7 + 7 + 7 + 1)
    pair = 2 * 4 * SEQ // 8 * 64 * 2  # bytes of keys and values: sequences, heads, tokens of a device, head size
    assert sum(c.wire_bytes for c in permutes) == 2 * pair * (2 * 3 * 7 + 4 * 8)
    assert any(c.exposed_s < c.seconds for c in permutes)


def waiting(seq: int) -> tuple[float, float]:
    """Return the seconds of the permutes of a ring of eight, and the exposed ones, with all sequences split."""
    wide = dataclasses.replace(DIMS, kv_heads=8, head_size=128)  # 2k tokens of a device compute less than they send
    small = decoder_program(wide, batch=2, seq=seq, exchange="ring", optimizer="sgd")
    mesh = make_mesh(Topology.parse("v5p:2x2x2"), {"context": 8})
    reading = analyse_program(small, "tpu")
    model = build_model(small, reading, mesh, 1 << 62)
    whole = wait = 0.0
    for each in find_attentions(reading.graph):
        node = model.nodes[model.op_node[each.op]]
        (state,) = np.flatnonzero(np.isin(node.states[:, 0], sorted(each.sequence)))
        for inner in node.inner:
            seconds, waits = inner.times(model.collectives, int(state))
            whole, wait = whole + float(seconds[0]), wait + float(waits[0])
    return whole, wait


def test_long_sequences_hide_the_ring_and_short_ones_do_not() -> None:
    """Compare two lengths: compute grows with the square of the sequence, the permuted bytes with its length."""
    shares = [wait / whole for whole, wait in map(waiting, (16384, 262144))]
    assert shares[0] > 0.4
    assert shares[1] < 0.06, "the way home of the gradients' sums alone"


def free(exchange: str) -> tuple[str, ...]:
    """Return the words of a plan that splits the sequence in all matmuls. Its attention may use the exchange."""
    made = decoder_program(DIMS, batch=2, seq=65536, exchange=exchange, optimizer="sgd")
    mesh = make_mesh(Topology.parse("v5p:2x2x1"), {"context": 4})
    reading = analyse_program(made, "tpu")
    model = build_model(made, reading, mesh, 1 << 62)
    held = stated(model, reading.groups, "held", Uses((), (), (), context=(0,), exchange="heads"))
    assert held is not None or exchange == "ring"
    if held is None:  # a ring splits its sequence
        held = stated(model, reading.groups, "held", Uses((), (), (), context=(0,), exchange="ring"))
        assert held is not None
    kernels = {model.op_node[each.op] for each in find_attentions(reading.graph)}
    allowed = {node: mask for node, mask in held.allowed.items() if node not in kernels}
    solved = solve_within(model, normalise(even_weights(model)), Terms(None, 20.0, 0, allowed=allowed))
    evaluate(model, solved.choices)  # raises on forbidden pairs
    return exchange_words(model, solved.choices)


def test_heads_are_exchanged_where_that_is_asked_for() -> None:
    assert free("heads") == ("heads exchanged over context",)
    assert free("gather") == ("keys and values gathered over context",)
    assert free("ring") == ("ring over context",)
    assert free("auto") == free("heads"), "which is the fastest here"


def test_an_exchange_moves_an_axis_between_the_sequence_and_another_dim() -> None:
    source, target = np.array([[2, WHOLE], [1, 2]]), np.array([[1, WHOLE], [2, WHOLE]])
    moved = moved_axes(source, target, (2,))
    assert moved[0, 0].tolist() == [True, False], "axis 0: the sequence becomes heads"
    assert moved[0, 1].tolist() == [False, False]
    assert moved[1, 1].tolist() == [True, False], "and back; axis 1 is gathered"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("exchange", "attention", "mesh", "line"),
    [
        ("heads", "flash", {"context": 16}, "a mesh axis that divides the 4 key-value heads of an attention"),
        ("heads", "flash", {"context": 8}, ""),  # 4 heads of keys and 2 of queries each, on parts of the axis
        ("heads", "flash", {"context": 4}, ""),
        ("heads", "plain", {"context": 4}, "for attention that a kernel computes, and the program has none"),
        ("ring", "plain", {"context": 8}, ""),
        ("ring", "flash", {"context": 1}, "a ring needs a mesh axis that divides"),
    ],
)
def test_what_cannot_be_says_why(exchange: str, attention: str, mesh: dict[str, int], line: str) -> None:
    made = program(exchange, attention=attention)
    count = int(np.prod(list(mesh.values())))
    given = make_mesh(Topology.parse({16: "v5p:2x2x4", 8: "v5p:2x2x2", 4: "v5p:2x2x1", 1: "v5e:1x1"}[count]), mesh)
    graph = analyse_program(made, "tpu").graph
    if not line:
        check_exchange(made, graph, given)
        return
    with pytest.raises(UserError) as error:
        check_exchange(made, graph, given)
    assert line in str(error.value) and str(error.value).count(". ") == 0


def test_a_name_that_there_is_not() -> None:
    with pytest.raises(UserError, match="exchange `tree` is not known; use auto, gather, heads or ring"):
        program("tree")


def test_a_ring_that_no_attention_can_have() -> None:
    windowed = dataclasses.replace(DIMS, window=512, global_every=1)
    made = program("ring", dims=dataclasses.replace(windowed, layers=2))
    graph = analyse_program(made, "tpu").graph
    check_exchange(made, graph, None)  # the last layer of a group sees everything
