"""Pipelines on chips whose compiler schedules the gradient of the head last."""

from autoshard.cost import Topology, make_mesh
from autoshard.planning.price.analysed_program import LATE_IN_STAGES, analyse_program, build_model
from autoshard.program import DecoderDims, Pipeline, decoder_program


DIMS = DecoderDims(
    layers=4, width=256, mlp_width=512, heads=2, kv_heads=2, head_size=128, vocabulary=4096, gated=True, tied=False
)


def test_they_hold_the_gradients_of_logits_through_the_backward_pass() -> None:
    program = decoder_program(DIMS, batch=8, seq=128, attention="flash", pipeline=Pipeline(2, 4))
    reading = analyse_program(program, "tpu")
    last, held = max(loop.stop for loop in reading.graph.loops), {}
    for chip in ("v6e", "v5e"):
        mesh = make_mesh(Topology.parse(f"{chip}:2x2"), {"stage": 2, "data": 2})
        liveness = build_model(program, reading, mesh, 1 << 34, staged=True).liveness
        shapes = [(reading.graph.tensors[t], stop) for t, _, stop in liveness.buffers]
        held[chip] = max(stop for tensor, stop in shapes if tensor.shape == (8, 128, 4096) and tensor.loop < 0) >= last
    assert LATE_IN_STAGES == {"v6e"} and held == {"v6e": True, "v5e": False}


def test_without_stages_the_compilers_for_v5p_and_tpu7x_hold_them_too() -> None:
    program = decoder_program(DIMS, batch=8, seq=128, attention="flash")
    reading = analyse_program(program, "tpu")
    last, held = max(loop.stop for loop in reading.graph.loops), {}
    for chip, shape in (("v5p", "2x2x1"), ("tpu7x", "2x2x1"), ("v6e", "2x2"), ("v5e", "2x2")):
        topology = Topology.parse(f"{chip}:{shape}")
        mesh = make_mesh(topology, {"data": topology.num_devices})
        liveness = build_model(program, reading, mesh, 1 << 34).liveness
        shapes = [(reading.graph.tensors[t], stop) for t, _, stop in liveness.buffers]
        held[chip] = max(stop for tensor, stop in shapes if tensor.shape == (8, 128, 4096) and tensor.loop < 0) >= last
    assert held == {"v5p": True, "tpu7x": True, "v6e": False, "v5e": False}
