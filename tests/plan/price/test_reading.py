"""What a plan reads of a program before anything is priced."""

from typing import Any

import numpy as np

from autoshard.plan.model._overlap import Overlap
from autoshard.plan.price._predict import evaluate
from autoshard.program import trace
from tests.graph.programs import f32
from tests.plan import programs


def step(state: Any, x: Any) -> Any:
    return state - 0.1 * (x.T @ x), x.sum()


def test_donated_state_is_written_over_and_other_state_is_not() -> None:
    """The state counts once where the caller gives it away, and beside its update where the caller keeps it."""

    def peak(*donated: int) -> int:
        program = trace(step, (f32(1024, 1024), f32(8, 1024)), name="update", donate_argnums=donated)
        model = programs.model_of(program, "cpu:8", "data=8")
        return evaluate(model, np.zeros(len(model.nodes), dtype=np.int64)).peak_bytes

    assert peak() - peak(0) == 4 * 1024 * 1024


def test_what_goes_into_an_update_is_a_gradient() -> None:
    """Of a step without moments too: its sum may run beside what follows, and is stored as what it is."""
    model = programs.model_of(trace(step, (f32(1024, 1024), f32(8, 1024)), name="update"), "v5e:2x2", "data=4")
    made = {reshard.overlap for reshard in model.reshards if model.nodes[reshard.source].kind == "op"}
    assert made and made <= {Overlap.GRADIENTS, Overlap.GRADIENTS_AT_MATMUL}
    kinds = {term.kind for node in model.nodes for term in node.memory}
    assert "gradients" in kinds
