"""Who is told of the ops that run on the XLA device."""

import pytest

from tests.exec.torch_xla_hook.torch_xla_processes import run_checks


pytest.importorskip("torch_xla")


def test_ops_are_told_of_at_their_kernels_where_these_are_stood_in_for():
    """A mode, which slows every op down, is there for the others only."""
    found = run_checks("torch_xla_inner_checks", "auto", "told_ops", AUTOSHARD_STRICT="1")["told_ops"]
    assert found["outer"] == [
        ["aten.mm.default 0", "aten.mm.default 1"],
        ["aten.mm.default 0 1", "aten.mm.default 1 1"],
    ]
    apart = ["aten.addmm.default 0", "aten.addmm.default with bias 0"]  # the product, and the bias added to it
    assert found["inner"] == [apart, [f"{kind} 1" for kind in apart]]
    assert found["moded"] == ["aten.tanh.default 0"] and found["modes"] == [False, True]
    assert found["difference"] < 1e-5
    assert found["stood_in"] == {"of another kind": 0, "of the kind": 1, "all": 1}
