"""Dims that a plan pads are named, with the share of the step that the pads take."""

import numpy as np
import pytest

from autoshard.exec.hlo.compiled_flops import FlopCheck
from autoshard.planning.explain.uneven_splits import NOTICEABLE, find_uneven, uneven_lines
from autoshard.planning.price.evaluate import evaluate
from autoshard.planning.price.replicated_work import factor_name
from autoshard.planning.price.step_ledger import itemise
from tests.planning import programs as made
from tests.planning.explain.test_words import choose


def test_the_pads_of_a_batch_are_said() -> None:
    """Compare with a batch of the padded size, whose work is as much."""
    outcomes, found = {}, {}
    for batch in (100, 128):
        model = made.model_of(made.wide_mlp(batch=batch), "v6e:8x8", "data=64")
        groups = made.groups(model)
        choices = choose(model, {"data": "batch"}, {})
        for op in model.graph.ops:
            if op.id in model.op_node and op.rule is not None:
                named = [factor_name(model, groups, op, factor) for factor in range(len(op.rule.sizes))]
                states = model.nodes[model.op_node[op.id]].states
                choices[model.op_node[op.id]] = np.flatnonzero(states[:, 0] == named.index("batch"))[0]
        outcomes[batch] = evaluate(model, choices)
        found[batch] = find_uneven(itemise(model, choices), groups)
    (uneven, *others), flops = found[100]
    assert not others and uneven.words == "the batch of 100 is padded to 128 over data"
    assert flops == pytest.approx(1.28)
    assert outcomes[100].compute_s == pytest.approx(outcomes[128].compute_s, rel=0.01)
    assert 0 < uneven.seconds <= uneven.empty * outcomes[100].compute_s
    assert uneven_lines([uneven], 2 * uneven.seconds) == [
        "the batch of 100 is padded to 128 over data: 22% of its compute is empty, 50% of the step; "
        "128 would take the same time."
    ]
    assert not uneven_lines([uneven], 1.01 * uneven.seconds / NOTICEABLE)
    assert found[128] == ([], 1.0)


@pytest.mark.parametrize(("compiled", "others"), [(128.0, False), (150.0, True)])
def test_pads_explain_compiled_flops(compiled: float, others: bool) -> None:
    check = FlopCheck(100.0, compiled, 0.0, None, 1.28, "the batch of 100 is padded to 128 over data")
    assert ": the batch of 100 is padded to 128 over data" in check.complaint
    assert ("several devices do the same work" in check.complaint) == others
