"""Analysis of a program before anything is priced."""

import dataclasses
import pickle
from typing import Any

import jax
import numpy as np
import pytest

from autoshard.planning.price.analysed_program import planned_part
from autoshard.planning.price.evaluate import evaluate
from autoshard.planning.space.overlap import Overlap
from autoshard.program import Role, open_source, trace
from tests.graph.programs import f32
from tests.planning import programs


def step(state: Any, x: Any) -> Any:
    return state - 0.1 * (x.T @ x), x.sum()


def test_donated_state_is_written_over_and_other_state_is_not() -> None:
    """Count the state once if the caller donates it, else the state and its update.

    The reference is XLA's own buffer assignment. If the state is not donated, the product shares the buffer of its
    update.
    """
    given = (f32(1024, 1024), f32(8, 1024))
    for donated in ((), (0,)):
        program = trace(step, given, name="update", donate_argnums=donated)
        model = programs.model_of(program, "cpu:8", "data=8")
        held = evaluate(model, np.zeros(len(model.nodes), dtype=np.int64)).peak_bytes
        analysis = jax.jit(step, donate_argnums=donated).lower(*given).compile().memory_analysis()
        total = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        assert held == pytest.approx(total + analysis.temp_size_in_bytes, rel=0.02)


def test_what_goes_into_an_update_is_a_gradient() -> None:
    """Recognise gradients in a step without moments as well: their sum may overlap, and is stored as a gradient.

    Nothing is left to overlap with the last sum.
    """

    def two(state: Any, x: Any, y: Any) -> Any:
        return (step(state[0], x)[0], step(state[1], y)[0]), x.sum()

    given = ((f32(1024, 1024), f32(1024, 1024)), f32(8, 1024), f32(8, 1024))
    model = programs.model_of(trace(two, given, name="update"), "v5e:2x2", "data=4")
    sums = [reshard for reshard in model.reshards if model.nodes[reshard.source].kind == "op"]
    assert {model.graph.ops[reshard.op].kind for reshard in sums} == {"dot_general"}
    last = max(reshard.op for reshard in sums)
    made = {reshard.overlap for reshard in sums if reshard.op < last}
    assert made and made <= {Overlap.GRADIENTS, Overlap.GRADIENTS_AT_MATMUL}
    assert {reshard.overlap for reshard in sums if reshard.op == last} <= {Overlap.NETWORK, Overlap.NETWORK_AT_MATMUL}
    kinds = {term.kind for node in model.nodes for term in node.memory}
    assert "gradients" in kinds


def test_new_values_of_donated_state_are_no_gradients() -> None:
    """Count moments and parameters by hand in a step that updates them one after the other."""

    def update(parameter: Any, moment: Any, gradient: Any) -> Any:
        moment = 0.9 * moment + gradient
        return parameter - moment, moment

    given = tuple(f32(1024, 1024) for _ in range(3))
    program = trace(update, given, name="update", donate_argnums=(0, 1), training=True)
    roles = (Role.PARAMETER, Role.OPTIMIZER_STATE, Role.BATCH)
    arguments = [dataclasses.replace(a, role=r) for a, r in zip(program.arguments, roles, strict=True)]
    model = programs.model_of(dataclasses.replace(program, arguments=tuple(arguments)), "v5e:2x2", "data=4")
    made = {(start, stop) for tensor, start, stop in model.liveness.buffers if tensor in model.graph.results}
    kinds = {term.kind for node in model.nodes for term in node.memory if (term.start, term.stop) in made}
    assert kinds == {"parameters", "optimizer_state"}


@pytest.mark.few(1)
@pytest.mark.parametrize("source", ["hf:llama-tiny", "hf:mixtral-tiny", "hf:t5-tiny"])
def test_a_freshly_traced_program_can_be_sent_to_helpers(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send a freshly traced program, which refers to closures as a cached one does not."""
    monkeypatch.setenv("AUTOSHARD_CACHE_DIR", "")
    program = open_source(source, train=True, batch=8, seq=64)
    received = pickle.loads(pickle.dumps(planned_part(program)))
    assert received.module == program.module and received.arguments == program.arguments
