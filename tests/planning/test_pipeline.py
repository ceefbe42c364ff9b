"""A program written as a pipeline: its stages are recognised, split and connected by permutes. It runs correctly."""

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.exec import measure
from autoshard.graph import FactorKind
from autoshard.planning import Options, PlanResult, make_plan, read_asked
from autoshard.program import Program, trace
from tests.graph.programs import f32, graph_of, ops
from tests.scripts import load_script


def example() -> ModuleType:
    return load_script("examples/pipeline.py")


@functools.cache
def planned() -> tuple[Program, PlanResult]:
    program = trace(example().step, example().arguments(layers=1, microbatches=4), name="pipeline")
    return program, make_plan(program, Options(topology="cpu:8", mesh="stage=4,data=2"))


def test_stages_are_found_and_split() -> None:
    _, made = planned()
    over = [
        words.removesuffix(" over stage").split(" and ") for words in made.plan.words if words.endswith(" over stage")
    ]
    assert any("stage" in names for names in over), made.plan.words
    stacked = {name: spec for name, spec in made.plan.arguments.items() if ".stages." in name}
    assert len(stacked) == 8 and all(spec.dims[0] == ("stage",) for spec in stacked.values())


def test_handing_on_is_a_permute_of_one_stages_work() -> None:
    _, made = planned()
    module = example()
    permutes = [c for c in made.plan.prediction.collectives if c.kind == "collective-permute"]
    ticks = 4 + module.STAGES - 1
    assert {c.axes for c in permutes} == {("stage",)} and sum(c.count for c in permutes) == 2 * ticks
    work = module.MICROBATCH * module.LENGTH * module.WIDTH * 4
    assert all(c.wire_bytes in (c.count * work, c.count * work // 2) for c in permutes)


def test_the_planned_pipeline_equals_the_unplanned() -> None:
    program, made = planned()
    measured = measure(program, made.plan, steps=1, warmup=0, check=True)
    assert measured.check is not None and measured.check.passed
    assert measured.counts_compiled.get("collective-permute", 0) >= 2 * 7
    assert measured.wire_compiled["stage"] == pytest.approx(measured.wire_predicted["stage"], rel=0.2)


def test_the_pipeline_computes_what_its_layers_do_in_turn() -> None:
    module = example()
    params, _ = module.arguments(layers=1, microbatches=3)
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32) * 0.1, params["stages"])
    x = rng.normal(size=(3, 2, 16, module.WIDTH)).astype(np.float32)
    wanted = x.reshape(6, 16, module.WIDTH)
    for number in range(module.STAGES):
        wanted = module.layer(wanted, jax.tree.map(lambda leaf, n=number: leaf[n, 0], weights))
    np.testing.assert_allclose(module.pipeline(weights, x).reshape(wanted.shape), wanted, rtol=1e-4, atol=1e-4)


def test_stages_may_be_pinned_or_excluded_from_an_axis() -> None:
    program, _ = planned()
    made = make_plan(
        program, Options(topology="cpu:8", mesh="stage=4,data=2", asked=read_asked(axis_only={"stage": "stage"}))
    ).plan
    for name, spec in made.arguments.items():
        assert not any("stage" in axes for axes in spec.dims[1:]), name


# Rolls in the graph


@pytest.mark.parametrize(
    "fn, shift",
    [
        (lambda x: jnp.roll(x, 1, 0), 1),
        (lambda x: jnp.roll(x, -3, 0), 5),
        (lambda x: jnp.concatenate([x[6:], x[:6]]), 2),
        (lambda x: jax.linear_transpose(lambda y: jnp.roll(y, 1, 0), x)(x)[0], 7),
    ],
)
def test_a_roll_is_one_op(fn: Any, shift: int) -> None:
    graph = graph_of(fn, f32(8, 4))
    (op,) = ops(graph, "rotate")
    assert op.operands == graph.arguments and op.shift == shift
    assert op.rule is not None and op.rule.kinds == (FactorKind.PERMUTATION, FactorKind.PARALLEL)
    assert len(op.operand_uses) == 2 and not any(o.operands for o in graph.ops if o.kind in ("slice", "pad"))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.concatenate([x[:6], x[6:]]),
        lambda x: jnp.concatenate([x[5:], x[:5], x[:1]]),
        lambda x: jnp.concatenate([x[7:], x[:6], x[:1]]),
        lambda x: jnp.concatenate([x[1:], x[1:2]]),
        lambda x: jnp.concatenate([x[::2], x[1::2]]),
        lambda x: lax.pad(x[:7], 0.0, [(1, 0, 0), (0, 0, 0)]) + lax.pad(x[:1], 0.0, [(7, 0, 0), (0, 0, 0)]),
    ],
)
def test_what_is_no_roll_is_left_alone(fn: Any) -> None:
    assert not ops(graph_of(fn, f32(8, 4)), "rotate")
