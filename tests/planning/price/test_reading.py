"""What a plan reads of a program before anything is priced."""

from typing import Any

import jax
import numpy as np
import pytest

from autoshard.planning.price.evaluate import evaluate
from autoshard.planning.space.overlap import Overlap
from autoshard.program import trace
from tests.graph.programs import f32
from tests.planning import programs


def step(state: Any, x: Any) -> Any:
    return state - 0.1 * (x.T @ x), x.sum()


def test_donated_state_is_written_over_and_other_state_is_not() -> None:
    """The state counts once where the caller gives it away, and beside its update where the caller keeps it.

    XLA's own assignment says what is held: the product lies where the updated state of a caller who keeps it goes.
    """
    given = (f32(1024, 1024), f32(8, 1024))
    for donated in ((), (0,)):
        program = trace(step, given, name="update", donate_argnums=donated)
        model = programs.model_of(program, "cpu:8", "data=8")
        held = evaluate(model, np.zeros(len(model.nodes), dtype=np.int64)).peak_bytes
        found = jax.jit(step, donate_argnums=donated).lower(*given).compile().memory_analysis()
        total = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
        assert held == pytest.approx(total + found.temp_size_in_bytes, rel=0.02)


def test_what_goes_into_an_update_is_a_gradient() -> None:
    """Of a step without moments too: its sum may run beside what follows, and is stored as what it is."""
    model = programs.model_of(trace(step, (f32(1024, 1024), f32(8, 1024)), name="update"), "v5e:2x2", "data=4")
    made = {reshard.overlap for reshard in model.reshards if model.nodes[reshard.source].kind == "op"}
    assert made and made <= {Overlap.GRADIENTS, Overlap.GRADIENTS_AT_MATMUL}
    kinds = {term.kind for node in model.nodes for term in node.memory}
    assert "gradients" in kinds
