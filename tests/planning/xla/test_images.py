"""Layouts of images between convolutions, compared with those of compiled programs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.cost import Topology, make_mesh
from autoshard.planning.price.analysed_program import analyse_program, build_model
from autoshard.planning.price.evaluate import evaluate, solved_buffers
from autoshard.planning.space.decision_model import Model
from autoshard.planning.xla.image_layouts import Image, find_images
from autoshard.program import Program, trace
from tests.graph.programs import f32


def convolved(order: str, examples: int, size: int, width: int = 64) -> Program:
    """Trace a step of two convolutions of images with 3 features, with dims in the order `NCHW` or `NHWC`."""
    kernels = {"NCHW": "OIHW", "NHWC": "HWIO"}[order]

    def step(params: Any, images: Any) -> Any:
        def loss(params: Any) -> Any:
            y = images
            for kernel in params:
                y = jax.nn.relu(
                    lax.conv_general_dilated(y, kernel, (1, 1), "SAME", None, None, (order, kernels, order))
                )
            return jnp.mean(y**2)

        return jax.tree.map(lambda p, g: p - 0.01 * g, params, jax.grad(loss)(params))

    def shape(names: str, **sizes: int) -> Any:
        return f32(*(sizes[name] for name in names))

    params = [shape(kernels, O=width, I=features, H=3, W=3) for features in (3, width)]
    images = shape(order, N=examples, C=3, H=size, W=size)
    return trace(step, (params, images), name="convolved", donate_argnums=(0,), training=True)


def whole(program: Program, topology: str = "v5e:1x1") -> Model:
    """Build the model of a program on one device."""
    parsed = Topology.parse(topology)
    mesh = make_mesh(parsed, {"data": parsed.num_devices})
    return build_model(program, analyse_program(program, parsed.backend), mesh, parsed.usable_bytes)


@pytest.mark.parametrize(
    "local, itemsize, stored",
    [  # examples, height, width and features; the array that a program compiled for v5e stores, in whole tiles
        ((4, 256, 256, 64), 4, (256, 33, 32, 128)),
        ((4, 256, 256, 64), 2, (256, 33, 32, 128)),
        ((4, 128, 128, 128), 4, (128, 17, 32, 128)),
        ((1, 128, 128, 64), 4, (128, 17, 8, 128)),
        ((6, 64, 64, 32), 4, (64, 9, 32, 128)),
        ((8, 256, 256, 64), 4, (256, 256, 8, 128)),
        ((16, 128, 128, 64), 4, (128, 128, 16, 128)),
        ((64, 64, 64, 32), 4, (64, 64, 32, 128)),
        ((128, 64, 64, 64), 4, (64, 64, 64, 128)),
    ],
)
def test_images_have_features_and_examples_in_tiles(
    local: tuple[int, ...], itemsize: int, stored: tuple[int, ...]
) -> None:
    sizes = np.array([local], dtype=np.float64)
    assert Image(0, 3, 4).padding(sizes, itemsize)[0] * np.prod(local) == np.prod(stored)
    turned = sizes[:, [0, 3, 1, 2]]
    assert Image(0, 1, 4).padding(turned, itemsize)[0] * np.prod(local) == np.prod(stored), "the order does not matter"


@pytest.mark.parametrize("order, features", [("NCHW", 1), ("NHWC", 3)])
def test_images_are_found_in_all_convolutions_and_between_them(order: str, features: int) -> None:
    graph = analyse_program(convolved(order, 4, 64), "tpu").graph
    images = find_images(graph)
    assert set(images.values()) == {Image(0, features, 4)}
    for op in graph.ops:
        if op.kind in ("convolution", "maximum", "select", "convert"):
            values = [t for t in (*op.operands, *op.results) if len(graph.tensors[t].shape) == 4]
            large = {t for t in values if graph.tensors[t].elements >= 4 * 3 * 64 * 64 and t not in graph.arguments}
            assert large <= images.keys(), op.name
    assert not images.keys() & set(graph.arguments), "arguments have layouts of their own"


def test_gradients_of_kernels_read_one_shifted_image_for_each_place() -> None:
    """Compare with `bf16[256,32,33,64,3]`, which the program compiled for v5e writes in its forward pass."""

    def shifted(program: Program) -> list[int]:
        model = whole(program)
        nodes = [n for n in model.nodes if n.kind == "op" and model.graph.ops[n.ref].kind == "convolution"]
        terms = [term for node in nodes for term in node.memory]
        sizes = [b.size for b in solved_buffers(model, np.zeros(len(model.nodes), dtype=np.int64))]
        assert all(int(term.usage[0]) in sizes for term in terms), "evaluate adds what the solver does"
        return [int(term.usage[0]) for term in terms]

    assert max(shifted(convolved("NHWC", 4, 256))) == 256 * 33 * 32 * 128 * 3 * 2
    assert not shifted(convolved("NHWC", 8, 128)), "batches that fill a tile's rows are not cut"


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_small_batches_of_images_take_the_memory_and_time_of_the_compiler(order: str) -> None:
    """Compare with the step compiled for v5e: 399 MiB at its peak, and 3.25 ms in its schedule.

    The shifted images are joined while two of them are in main memory, of which the prediction has one on the chip.
    """
    model = whole(convolved(order, 4, 256))
    step = evaluate(model, np.zeros(len(model.nodes), dtype=np.int64))
    assert step.peak_bytes / 2**20 == pytest.approx(399, rel=0.18)
    assert step.step_time_s == pytest.approx(3.25e-3, rel=0.2)
