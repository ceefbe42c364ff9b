"""Grouped convolutions in a captured graph: a batch that fills all axes, one that does not, and one that is marked."""

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from autoshard.exec.torch_xla_hook.planning.capture_planning import Decision, decide, splits
from autoshard.exec.torch_xla_hook.values.live_marks import LiveMesh
from autoshard.planning import Spec
from autoshard.program import trace
from tests.graph.programs import f32
from tests.planning.test_spatial import SAME, convolution


SOME = Spec((("data",), (), (), ()))
WIDTH = 64


def decided(rows: int, mesh: dict[str, int], marked: Spec | None = None) -> tuple[Decision, str]:
    """Plan a step of SGD on a depthwise kernel and a projection over `rows` images. Return it and the images' name."""

    def step(params: Any, images: Any, labels: Any) -> Any:
        def loss(params: Any) -> Any:
            hidden = convolution(1, SAME, feature_group_count=WIDTH)(images, params["kernel"])
            return ((hidden.mean((2, 3)) @ params["head"] - labels) ** 2).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    shapes = {"kernel": f32(WIDTH, 1, 3, 3), "head": f32(WIDTH, 16)}
    program = trace(step, (shapes, f32(rows, WIDTH, 16, 16), f32(rows, 16)), name="groups")
    (images,) = (number for number, a in enumerate(program.arguments) if len(a.shape) == 4 and a.shape[0] == rows)
    live = LiveMesh(mesh, range(8))
    split = {} if marked is None else {images: live.write(marked)}
    taken: Any = SimpleNamespace(program=program, split=split, users=frozenset(split))
    return decide(taken, "cpu:8", live, {}), program.arguments[images].name


def split_of(found: Decision, name: str) -> Spec:
    return found.plan.arguments[name]


def test_a_batch_that_divides_fills_all_axes() -> None:
    found, images = decided(16, {"data": 4, "model": 2})
    assert split_of(found, images).dims[0] == ("data", "model")
    assert any("over all axes or none" in note for note in found.notes)


@pytest.mark.parametrize("rows", [12, 4, 9])
def test_a_batch_that_does_not_divide_stays_whole_and_says_so(rows: int) -> None:
    """Leave a batch of 12 rows whole: it divides by 4, but an idle other axis would double the kernel's gradient."""
    found, images = decided(rows, {"data": 4, "model": 2})
    assert not splits(found.plan) and not found.plan.regions
    assert not any(axes for pin in found.plan.pins for axes in pin.spec.dims)
    (said,) = (note for note in found.notes if "not split" in note)
    assert f"{images} has {rows} rows, no multiple of the 8 devices" in said and said in found.plan.warnings


def test_on_one_axis_nothing_is_idle() -> None:
    found, images = decided(16, {"data": 8})
    assert split_of(found, images).dims[0] == ("data",) and not any("idle" in note for note in found.notes)


def test_a_mark_that_leaves_an_axis_idle_is_saved_with_a_warning() -> None:
    found, images = decided(16, {"data": 4, "model": 2}, SOME)
    assert split_of(found, images) == SOME
    (said,) = (note for note in found.plan.warnings if "model idle" in note)
    assert said.startswith(f"{images} is split 16/data x ") and "wrong gradients" in said
