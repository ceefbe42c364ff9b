"""Attention by cuDNN: equal to scores in memory without a GPU, and jax's own calls with one."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.errors import UserError
from autoshard.exec.apply.exported_step import jax_export
from autoshard.graph import find_attentions, read_graph
from autoshard.planning import Options, make_plan, settled_options
from autoshard.program import Program, open_source, trace
from autoshard.program.kernels import splash_attention
from autoshard.program.kernels.cudnn_attention import _cudnn_backward, _cudnn_forward, _Scores, cudnn_attention
from autoshard.program.kernels.dot_attention import attend


BATCH, HEADS, GROUP, SEQ, DIM = 4, 2, 2, 64, 16


def given(dtype: Any = np.float32) -> list[Any]:
    random = np.random.default_rng(0)
    shapes = [(BATCH, HEADS, GROUP, SEQ, DIM), *[(BATCH, HEADS, SEQ, DIM)] * 2, (BATCH, HEADS, GROUP, SEQ, DIM)]
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


def gradients(attention: Any) -> Any:
    def loss(q: Any, k: Any, v: Any, weights: Any) -> Any:
        return (attention(q, k, v) * weights).sum()

    return jax.value_and_grad(loss, (0, 1, 2))


def plain(q: Any, k: Any, v: Any, **options: Any) -> Any:
    mixed = attend(q.reshape(BATCH, -1, SEQ, DIM), k, v, **options)
    return mixed.reshape(BATCH, SEQ, HEADS, GROUP, DIM).transpose(0, 2, 3, 1, 4)


def same(found: Any, wanted: Any) -> None:
    for left, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(left, right, rtol=0, atol=1e-5 * float(np.abs(right).max()))


@pytest.mark.parametrize("options", [{"causal": False}, {"causal": True, "window": 9, "scale": 0.3}])
def test_values_and_gradients_are_those_of_scores_in_memory(options: dict[str, Any]) -> None:
    result = jax.jit(gradients(functools.partial(cudnn_attention, **options)))(*given())
    same(result, jax.jit(gradients(functools.partial(plain, **options)))(*given()))


@functools.cache
def step() -> Any:
    return gradients(functools.partial(cudnn_attention, causal=True))


def test_devices_compute_their_batch_and_heads() -> None:
    program = trace(step(), tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given()), name="cudnn")
    plan = make_plan(program, Options(topology="cpu:8", mesh="data=4,model=2")).plan
    (forward, backward) = plan.calls
    assert forward.operands[0].dims[:2] == backward.results[1].dims[:2] == (("data",), ("model",))
    same(plan.jit(step())(*given()), jax.jit(step())(*given()))


@functools.cache
def llama(attention: str) -> Program:
    return open_source("hf:llama-tiny", train=True, batch=16, seq=128, attention=attention)


@pytest.mark.full
def test_scores_reach_no_memory_of_a_gpu() -> None:
    whole, fused = (make_plan(llama(each), Options(topology="h100:8", mesh="data=8")) for each in ("plain", "cudnn"))
    assert fused.plan.prediction.step_time_s < whole.plan.prediction.step_time_s
    # The chosen plans split different dims, so memory is compared under one baseline.
    alike = (made.baseline_plans["data_parallel"].prediction.peak_bytes for made in (whole, fused))
    assert next(alike) > 1.8 * next(alike)
    text = jax_export(fused.plan, llama("cudnn"))
    assert b"__cudnn$fmhaSoftmax" in text and b"__cudnn$fmhaSoftmaxBackward" in text


def test_auto_is_cudnn_for_gpus_wherever_it_can_be() -> None:
    assert settled_options({"attention": "auto"}, "h100:8")["attention"] == "auto:cudnn"
    assert settled_options({}, "h100:8") == {"preferred": {"attention": "auto:cudnn"}}
    assert llama("auto:cudnn").fingerprint == llama("cudnn").fingerprint
    narrow = open_source("hf:llama-tiny", infer=True, batch=2, seq=32, attention="auto:cudnn", dtype="fp32")
    assert narrow.notes == ("An attention stays plain: cuDNN's attention multiplies bfloat16 or float16, not float32.",)


def test_work_is_that_of_the_scores_that_a_mask_leaves() -> None:
    graph = read_graph(llama("cudnn").module)
    forward, backward = (graph.ops[each.op] for each in find_attentions(graph))
    product = 2 * 16 * 8 * 128 * 128 * 8 // 2
    assert (forward.flops, backward.flops) == (2 * product, 5 * product)
    assert all(op.opaque is not None and op.opaque.head == 8 for op in (forward, backward))


def cuda_calls(fn: Any, *args: Any) -> list[tuple[str, str, str]]:
    """Return the target, configuration and types of cuDNN's calls."""
    text = jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    matches = re.findall(r'custom_call @(__cudnn\S+?)\(.*?backend_config = ("(?:[^"\\]|\\.)*").*?: (\(.*)', text)
    return sorted(matches)


@pytest.mark.parametrize("window", [None, 32])
def test_cudnn_is_called_as_jax_calls_it(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    from jax._src.cudnn import fused_attention_stablehlo as fused

    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    q, k, v, gradient = given(jnp.bfloat16)
    merged = q.reshape(BATCH, -1, SEQ, DIM)
    options = {"scale": 0.25, "mask_type": fused.MaskType.CAUSAL, "qkv_layout": "BNTH", "sliding_window_length": window}

    def theirs(q: Any, k: Any, v: Any) -> Any:
        return jax.vjp(lambda *x: fused.dot_product_attention(*x, **options), q, k, v)[1](q)

    def ours(q: Any, k: Any, v: Any, of: Any) -> Any:
        scores = _Scores(True, window, 0.25)
        mixed, sums = _cudnn_forward(q, k, v, scores=scores)
        return _cudnn_backward(q, k, v, mixed, sums, of, scores=scores)

    found = cuda_calls(ours, q, k, v, gradient)
    assert len(found) == 2 and found == cuda_calls(theirs, merged, k, v)


@pytest.mark.parametrize(
    ("changed", "options", "sentence"),
    [
        ({}, {"causal": True, "softcap": 5.0}, "cuDNN's attention takes no capped scores"),
        ({}, {"causal": True, "bias": jnp.zeros((SEQ, SEQ))}, "its scores have a bias or a mask of their own"),
        ({"dtype": "float32"}, {"causal": True}, "cuDNN's attention multiplies bfloat16 or float16, not float32"),
        ({"size": 20}, {"causal": True}, "heads of 20 are not what cuDNN's attention takes on every GPU"),
        (
            {"size": 136},
            {"causal": True},
            "heads of 136 are not what cuDNN's attention takes on every GPU: multiples of 8 up to 128",
        ),
        ({"keys": 128}, {"causal": True}, "cuDNN's causal attention takes as many queries as keys, not 64 of 128"),
    ],
)
def test_what_cudnn_cannot_take_is_reported(changed: dict[str, Any], options: dict[str, Any], sentence: str) -> None:
    size, keys = changed.get("size", DIM), changed.get("keys", SEQ)
    dtype = changed.get("dtype", "bfloat16")
    query, key = jnp.zeros((2, 2, SEQ, size), dtype), jnp.zeros((2, 2, keys, size), dtype)
    with (
        splash_attention.attention_kernel("cudnn", []),
        pytest.raises(UserError, match=f"attention `cudnn` cannot be: {re.escape(sentence)}"),
    ):
        attend(query, key, key, **options)
