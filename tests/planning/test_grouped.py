"""Grouped convolutions: every strategy computes the right gradients, with and without idle axes."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from autoshard.exec import measure
from autoshard.graph import read_graph
from autoshard.planning.explain.plan_pins import region_of
from autoshard.planning.space.op_strategies import heavy_strategies
from autoshard.planning.xla.axis_assignments import WHOLE
from autoshard.planning.xla.spatial_splits import in_region
from autoshard.program import trace
from tests.exec.planned_programs import handmade
from tests.graph.programs import f32
from tests.planning.test_spatial import SAME, Case, check, convolution, found, mesh_of, three


IMAGES = f32(8, 8, 8, 8)
FORWARD, INPUT, KERNEL = three("depthwise", convolution(1, SAME, feature_group_count=8), IMAGES, f32(8, 1, 3, 3))
PAIRS = three("in pairs", convolution(1, SAME, feature_group_count=4), IMAGES, f32(8, 2, 3, 3))
SPREAD = convolution(1, ((2, 2), (2, 2)), rhs_dilation=(2, 2), feature_group_count=8)
APART = convolution(1, ((1, 2), (1, 2)), lhs_dilation=(2, 2), feature_group_count=8)


@pytest.mark.parametrize(
    ("case", "mesh", "dim"),
    [
        (KERNEL, "4x2", 0),
        (KERNEL, "2x2x2", 2),
        (PAIRS[2], "4x2", 0),
        (PAIRS[2], "4x2", 2),
        (three("spread", SPREAD, IMAGES, f32(8, 1, 3, 3))[2], "4x2", 0),
        (three("apart", APART, IMAGES, f32(8, 1, 3, 3))[2], "4x2", 0),
        (INPUT, "4x2", 1),
        (FORWARD, "8", 1),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
)
def test_a_dim_split_over_one_axis_with_idle_ones(case: Case, mesh: str, dim: int) -> None:
    """Split the batch (0), groups (1) or height (2) of images over one axis. Compare values and bytes on the wire."""
    _, graph, op = found(case)
    assert op.rule is not None and op.grouped
    (factor,) = op.rule.operands[0][dim]
    sizes = list(mesh_of(mesh).axes.values())
    states = heavy_strategies(graph, op, sizes, "cpu")
    (row,) = np.flatnonzero((states == [factor, *[WHOLE] * (len(sizes) - 1)]).all(axis=1))
    assert in_region(op, states)[row]
    check(case, mesh_of(mesh), states[row : row + 1])


def test_other_convolutions_are_left_to_the_partitioner_unless_split_in_space() -> None:
    case = three("plain", convolution(1, SAME), IMAGES, f32(8, 8, 3, 3))[2]
    _, _, op = found(case)
    assert op.rule is not None and not op.grouped
    batch, height = op.rule.operands[0][0][0], op.rule.operands[0][2][0]
    assert in_region(op, np.array([[batch, WHOLE], [height, WHOLE]])).tolist() == [False, True]


def test_in_a_region_by_hand_a_convolution_of_groups_stays_whole() -> None:
    """Offer only the whole op: the plan cannot open its own region inside a manual one."""
    _, graph, op = found(FORWARD)
    inside = dataclasses.replace(op, manual=("data",), halos=())
    assert (heavy_strategies(graph, op, [2, 4], "cpu") != WHOLE).any()
    assert (heavy_strategies(graph, inside, [2, 4], "cpu") == WHOLE).all()


def test_left_to_the_partitioner_the_gradient_comes_out_doubled() -> None:
    """Run one step of SGD on a depthwise kernel, images split over `data`, `model` idle. A region corrects it."""

    def step(kernel: Any, images: Any) -> Any:
        def loss(kernel: Any) -> Any:
            return (convolution(1, SAME, feature_group_count=8)(images, kernel) ** 2).mean()

        return kernel - jax.grad(loss)(kernel)

    program = trace(step, (f32(8, 1, 3, 3), IMAGES), name="deep")
    graph = read_graph(program.module)
    gradient = [op for op in graph.ops if op.kind == "convolution"][-1]
    assert gradient.rule is not None
    ((batch,), *_), mesh = gradient.rule.operands[0], {"data": 4, "model": 2}
    region = region_of(graph, gradient, np.array([[batch, WHOLE]]), list(mesh))
    assert region.summed == ("data",)
    images = program.arguments[1].name
    plan = handmade(program, mesh, {images: "data,-,-,-"})
    checks = [
        measure(program, dataclasses.replace(plan, regions=regions), steps=1, warmup=0, check=True).check
        for regions in ((), (region,))
    ]
    assert [check is not None and check.passed for check in checks] == [False, True]
