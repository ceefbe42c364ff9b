"""Plans name the ops that are predicted worse than usual, and the calls whose work nobody states."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from autoshard.base.units import format_bytes
from autoshard.graph import read_graph
from autoshard.planning import Options, Plan, load_plan, make_plan, save_plan
from autoshard.planning.explain import prediction_errors
from autoshard.planning.explain.prediction_errors import (
    ClassError,
    class_errors,
    counts,
    elementwise_recurrences,
    recurrent_dots,
    unsure_lines,
)
from autoshard.planning.record.plan_parts import Unsure
from autoshard.program import trace
from experiments.fidelity import ordinary
from tests.graph.programs import f32


def recurrent(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, each: (jnp.tanh(each + h @ w), None), x[0], x)[0]


def layers(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, each: (jnp.tanh(h @ each), None), x, w)[0]


def microbatches(w: Any, x: Any) -> Any:
    def one(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, jax.grad(lambda w: jnp.mean(jnp.tanh(part @ w) @ w))(w)), None

    return jax.lax.scan(one, jnp.zeros_like(w), x)[0]


@pytest.mark.parametrize(
    ("fn", "args", "count"),
    [
        (lambda w, x: jax.grad(lambda w: jnp.mean(recurrent(w, x)))(w), (f32(64, 64), f32(16, 32, 64)), 2),
        (lambda w, x: jax.grad(lambda w: jnp.mean(layers(w, x)))(w), (f32(8, 64, 64), f32(32, 64)), 0),
        (microbatches, (f32(64, 64), f32(4, 32, 64)), 0),
    ],
)
def test_recurrences_are_neither_layers_nor_microbatches(fn: Callable[..., Any], args: tuple[Any, ...], count: int):
    """Count the dots of a state with one weight: one forward, and one that passes the gradient to the step before."""
    assert len(recurrent_dots(read_graph(trace(fn, args).module))) == count


def normalised(w: Any, x: Any) -> Any:
    def layer(h: Any, each: Any) -> tuple[Any, None]:
        h = h + jnp.tanh(h @ each)
        return h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6), None

    return jax.lax.scan(layer, x, w)[0]


def decayed(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, each: (jnp.exp(each * w) * h + each, None), x[0], x)[0]


@pytest.mark.parametrize(
    ("fn", "args", "loops"),
    [
        (lambda w, x: jax.grad(lambda w: jnp.mean(decayed(w, x)))(w), (f32(64), f32(16, 32, 64)), 2),
        (lambda w, x: jax.grad(lambda w: jnp.mean(recurrent(w, x)))(w), (f32(64, 64), f32(16, 32, 64)), 0),
        (lambda w, x: jax.grad(lambda w: jnp.mean(layers(w, x)))(w), (f32(8, 64, 64), f32(32, 64)), 0),
        (lambda w, x: jax.grad(lambda w: jnp.mean(normalised(w, x)))(w), (f32(8, 64, 64), f32(32, 64)), 0),
        (microbatches, (f32(64, 64), f32(4, 32, 64)), 0),
    ],
)
def test_loops_that_scale_what_they_carry_are_elementwise_recurrences(
    fn: Callable[..., Any], args: tuple[Any, ...], loops: int
) -> None:
    graph = read_graph(trace(fn, args).module)
    found = elementwise_recurrences(graph, recurrent_dots(graph))
    assert len({graph.ops[op].loop for op in found}) == loops


def test_a_plan_of_a_selective_scan_has_a_range() -> None:
    def step(w: Any, x: Any) -> Any:
        return w - jax.grad(lambda w: jnp.mean(decayed(w, x)))(w)

    plan = planned(step, (f32(1024), f32(256, 64, 1024)))
    assert plan.time_within is not None and plan.time_within > 1.3
    assert plan.warnings[0].startswith("elementwise recurrences have ")


def indexed(width: int) -> Plan:
    def fn(table: Any, indices: Any) -> Any:
        return table.at[indices].add(jnp.tanh(table[indices]))

    return planned(fn, (f32(8192, width), jax.ShapeDtypeStruct((65536,), "int32")))


def planned(fn: Callable[..., Any], args: tuple[Any, ...], topology: str = "v5e:2x4") -> Plan:
    return make_plan(trace(fn, args), Options(topology=topology, mesh={"data": 8})).plan


def convolved(topology: str = "v5e:2x4") -> Plan:
    def fn(kernel: Any, images: Any) -> Any:
        def loss(kernel: Any) -> Any:
            form = ("NHWC", "HWIO", "NHWC")
            return jnp.mean(
                jnp.tanh(jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=form))
            )

        return kernel - jax.grad(loss)(kernel)

    return planned(fn, (f32(3, 3, 64, 64), f32(64, 32, 32, 64)), topology)


WORSE = ClassError(programs=7, time=1.9, memory=3.14)


def with_errors(monkeypatch: pytest.MonkeyPatch, errors: Mapping[str, ClassError]) -> None:
    monkeypatch.setattr(prediction_errors, "class_errors", lambda compiler: errors)


def test_a_plan_of_badly_predicted_ops_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with_errors(monkeypatch, {"convolutions": WORSE})
    plan = convolved()
    (unsure,) = plan.unsure
    assert unsure.ops == "convolutions" and unsure.time_share > 0.25 and 0 < unsure.memory_share <= 1
    assert (plan.time_within, plan.memory_within) == (1.9, 3.14)
    assert plan.warnings[0] == (
        f"convolutions have {unsure.time_share:.0%} of the predicted step and {unsure.memory_share:.0%} of the peak: "
        "6 of 7 such programs took within a factor 1.9 of the predicted time, and reserved within a factor "
        "3.1 of the predicted memory; `autoshard plan --compile` asks the compiler, in seconds for a small step."
    )
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").unsure == plan.unsure


def test_usual_errors_leave_no_trace_in_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with_errors(monkeypatch, {"convolutions": ClassError(7, 1.25, 1.1)})
    plan = convolved()
    save_plan(plan, tmp_path / "plan.json")
    assert plan.unsure == () and plan.time_within is plan.memory_within is None
    assert "unsure" not in json.loads((tmp_path / "plan.json").read_text())


def test_unmeasured_ops_are_named_and_cpus_have_none(monkeypatch: pytest.MonkeyPatch):
    with_errors(monkeypatch, {})
    (unsure,) = convolved().unsure
    assert unsure.time_within is unsure.memory_within is None and unsure.programs == 0
    assert "no compiled program of our tables has them" in unsure_lines((unsure,), 1, 2)[0]
    assert convolved("cpu:8").unsure == ()


def test_a_peak_near_the_limit_may_not_fit():
    unsure = Unsure("convolutions", 0.5, 0.5, 1.9, 3.14, 7)
    assert "so it may not fit" in unsure_lines((unsure,), 4, 10)[0]
    for peak in (3, 11):
        assert "may not fit" not in unsure_lines((unsure,), peak, 10)[0]


def test_rows_are_narrow_below_the_lanes_of_a_tile(monkeypatch: pytest.MonkeyPatch):
    with_errors(monkeypatch, {})
    assert [each.ops for each in indexed(16).unsure] == ["gathers and scatters of narrow rows"]
    assert [each.ops for each in indexed(4096).unsure] == ["gathers and scatters"]
    assert [each.ops for each in indexed(512).unsure] == ["gathers and scatters of narrow rows"], "a shard of each row"


def test_rows_with_maxima_of_rows_are_apart(monkeypatch: pytest.MonkeyPatch):
    """Plan a softmax over the edges of each node, whose rows alone would be of another class."""
    with_errors(monkeypatch, {})

    def fn(x: Any, senders: Any, receivers: Any) -> Any:
        rows = x[senders]
        scores = jnp.exp(rows[:, 0] - jax.ops.segment_max(rows[:, 0], receivers, 8192)[receivers])
        return jax.ops.segment_sum(rows * scores[:, None], receivers, 8192)

    ids = jax.ShapeDtypeStruct((65536,), "int32")
    named = {each.ops for each in planned(fn, (f32(8192, 4096), ids, ids)).unsure}
    assert "gathers and scatters with maxima of rows" in named and "gathers and scatters" not in named


def test_memory_alone_does_not_count():
    assert counts(0.25, 0.0) and counts(0.1, 0.5)
    assert not counts(0.05, 0.9) and not counts(0.2, 0.4)


def test_the_stored_errors_are_those_of_the_table():
    """Take the second worst of ten, as factors in both directions, of rows in which the class counts."""
    times = [1.0, 1.1, 1.2, 0.5, 1.3, 1.4, 1.5, 0.8, 4.0, 3.0]
    known = {
        f"{seed:03d} v5e:2x4 d=8": {
            "classes": {"sorts": (0.3, 0.0), "windows": (0.01, 0.9)},
            "seconds": {"predicted": ratio, "compiled": 1.0},
            "memory": {"predicted": 1, "compiled": 2},
        }
        for seed, ratio in enumerate(times)
    }
    known["000 h100:8 d=8"] = {**known["000 v5e:2x4 d=8"], "classes": {}}
    assert ordinary.class_errors(known)["errors"] == {"TPU": {"sorts": {"programs": 10, "time": 3.0, "memory": 2.0}}}
    for compiler in ("TPU", "GPU"):
        assert all(each.time >= 1 and each.memory >= 1 for each in class_errors(compiler).values())


def double(x: Any, out: Any) -> None:
    out[...] = x[...] * 2


def kernel(estimate: Any = None) -> Callable[..., Any]:
    block = pl.BlockSpec((128, 512), lambda i: (i, 0))

    def fn(x: Any, w: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        made = pl.pallas_call(
            double, out_shape=shape, grid=(8,), in_specs=[block], out_specs=block, cost_estimate=estimate
        )
        return made(x) @ w

    return fn


def called(x: Any, w: Any) -> Any:
    return jax.ffi.ffi_call("my_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x) @ w


def back(x: Any, w: Any) -> Any:
    return jax.pure_callback(lambda a: np.asarray(a) * 2, jax.ShapeDtypeStruct(x.shape, x.dtype), x) @ w


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (
            kernel(),
            [
                "`double` states no work: it is split along data, and counts as no FLOPs and 512.00 KiB of memory "
                "traffic on a device; state FLOPs with the cost_estimate of its pallas_call, or "
                'autoshard.register_rule("double", ..., flops="...").'
            ],
        ),
        (kernel(pl.CostEstimate(flops=10**9, transcendentals=0, bytes_accessed=10**7)), []),
        (
            called,
            [
                "custom call `my_target` (jit(called)/ffi_call) has no sharding rule and states no work: every device "
                "repeats it whole ({share:.1%} of the step, as no FLOPs and {moved} of memory traffic); give it both "
                'with autoshard.register_rule("my_target", "b ... -> b ...", flops="...").'
            ],
        ),
        (
            back,
            [
                "custom call `xla_ffi_python_cpu_callback` (pure_callback) has no sharding rule and states no work: "
                "every device repeats it whole ({share:.1%} of the step, as no FLOPs and {moved} of memory traffic); "
                "it is Python on the host, whose time is not in the prediction."
            ],
        ),
    ],
)
def test_a_call_of_unknown_work_is_named_with_what_is_assumed(fn: Callable[..., Any], said: list[str]):
    plan = planned(fn, (f32(1024, 512), f32(512, 512)))
    lines = [line for line in plan.warnings if "no FLOPs" in line]
    for unruled in plan.unruled:
        (moved,) = (each.moved_bytes for each in plan.ops if each.kind == unruled.kind)
        said = [line.format(share=unruled.share, moved=format_bytes(moved)) for line in said]
    assert lines == said


def test_a_kernel_without_work_is_not_sure():
    """Store the class of calls of unknown work, for which the compiler is no help."""
    plan = planned(called, (f32(1024, 512), f32(512, 512)))
    assert [each.ops for each in plan.unsure] == ["calls of unknown work"]
    assert unsure_lines(plan.unsure, 1, 2) == []
