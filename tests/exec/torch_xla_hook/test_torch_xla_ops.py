"""Observers of the ops that run on the XLA device."""

from typing import Any

import pytest

from tests.exec.torch_xla_hook.torch_xla_processes import run_checks


pytest.importorskip("torch_xla")


@pytest.fixture(scope="module")
def everything() -> dict[str, dict[str, Any]]:
    names = ("auto", "told_ops", "made_inside", "told_parts", "composed", "on_host", "chunked")
    return run_checks("torch_xla_inner_checks", *names, AUTOSHARD_STRICT="1", XLA_AUTO_SPMD_MESH="4,2")


def test_ops_that_are_described_make_what_they_make_alone(everything: dict[str, dict[str, Any]]):
    """Create tensors inside of an observed block: views of them stay views under a mode too."""
    found = everything["made_inside"]
    assert found["same graph"]
    assert max(found["differences"]) == 0


def test_ops_are_described_at_their_kernels_where_these_are_stood_in_for(everything: dict[str, dict[str, Any]]):
    """Use a dispatch mode, which slows every op, only for ops without a stand-in kernel."""
    found = everything["told_ops"]
    assert found["outer"] == [
        ["aten.mm.default 0", "aten.mm.default 1"],
        ["aten.mm.default 0 1", "aten.mm.default 1 1"],
    ]
    apart = ["aten.addmm.default 0", "aten.addmm.default with bias 0"]  # the product, and the sum with the bias
    assert found["inner"] == [apart, [f"{kind} 1" for kind in apart]]
    assert found["moded"] == ["aten.tanh.default 0"] and found["modes"] == [False, True]
    assert found["difference"] < 1e-5
    assert found["stood_in"] == {"of another kind": 0, "of the kind": 1, "all": 1}


def test_a_loop_is_described_as_one_op_and_two_convolutions_apart(everything: dict[str, dict[str, Any]]):
    """Report two products for a convolution's backward pass: the gradients of its input and of its weight."""
    found = everything["told_parts"]
    assert found["loop"] == [["xla.scan", [[3], [5, 3]]]]
    kind = "aten.convolution_backward.default"
    assert found["backward"] == [
        [kind, [[1, 2, 5, 5], None, None]],
        [f"{kind} of weight", [None, [3, 2, 3, 3], [3]]],
    ]
    assert found["difference"] < 1e-5


def test_ops_that_pytorch_xla_lacks_are_computed_on_the_device(everything: dict[str, dict[str, Any]]):
    """Compose bags, weight norm, losses, windows and `interpolate` of other ops: on the host they cut the step."""
    found = everything["composed"]
    assert max(found["differences"]) < 1e-5 and len(found["differences"]) == 34
    assert found["host"] == []


def test_what_is_computed_on_the_host_is_put_together_from_shards(everything: dict[str, dict[str, Any]]):
    """Assemble host ops' operands from shards: otherwise PyTorch/XLA compiles a program for each one in every step."""
    found = everything["on_host"]
    assert {"aten::_logcumsumexp", "aten::median.dim_values"} <= set(found["host"]) and any(found["split"])
    assert max(found["differences"]) < 1e-5
    assert found["compiled"][-3:] == [0, 0, 0]
    assert max(found["saved"]) < 1e-5 and found["saving"] == 0


def test_chunks_are_slices(everything: dict[str, dict[str, Any]]):
    """Compare chunks, such as an LSTM's gates, and strided views. Only the chunks become slices."""
    found = everything["chunked"]
    assert not any(found[name][0] for name in ("gates", "unlike", "lstm"))
    assert max(off for _, off in found.values()) < 1e-6
