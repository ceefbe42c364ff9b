"""Updates that a convolution wrote for a scatter of inner slices are copied, as compiled resizes of images have it."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from autoshard.exec.ahead.ahead_process import compile_without_devices
from autoshard.exec.ahead.live_ranges import reserved_bytes
from autoshard.planning import Options, Plan, make_plan
from autoshard.planning.price.evaluate import live_buffers
from autoshard.planning.space.user_constraints import read_asked
from autoshard.program import Program, trace


SIZE, CHANNELS, DEVICES = 32, 256, 8
IMAGES = ("NHWC", "HWIO", "NHWC")


def planned(images: int, dtype: str = "bfloat16") -> tuple[Program, Plan]:
    """Plan the gradients of images that are resized to twice their size, and then convolved."""

    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        large = jax.image.resize(jnp.tanh(x), (images, 2 * SIZE, 2 * SIZE, CHANNELS), "nearest")
        out = jax.lax.conv_general_dilated(large, kernel, (1, 1), "SAME", dimension_numbers=IMAGES)
        return jnp.mean(out.astype(jnp.float32) ** 2)

    shapes = ((images, SIZE, SIZE, CHANNELS), (3, 3, CHANNELS, 128))
    program = trace(jax.grad(loss, (0, 1)), [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes])
    asked = read_asked(dict(zip((each.name for each in program.arguments), ("d,-,-,-", "-,-,-,-"), strict=True)))
    return program, make_plan(program, Options(topology="v5e:2x4", mesh=f"d={DEVICES}", asked=asked)).plan


@pytest.mark.parametrize(
    ("images", "dtype", "copies"),
    [(512, "bfloat16", 1), (512, "float32", 1), (1024, "bfloat16", 0), (1024, "float32", 0)],
)
def test_updates_have_a_copy_unless_a_loop_reads_their_slices(images: int, dtype: str, copies: int) -> None:
    """Try columns of the enlarged images that have 2^20 and 2^21 elements on a device."""
    program, plan = planned(images, dtype)
    priced = plan.graph(program).priced
    ops = priced.model.graph.ops
    size = images // DEVICES * 4 * SIZE**2 * CHANNELS * jnp.dtype(dtype).itemsize
    held = [each for each in live_buffers(priced.model, priced.choices) if each.size == size and each.stop < len(ops)]
    assert len([each for each in held if ops[each.stop].kind == "scatter" and each.stop - each.start == 1]) == copies


@pytest.mark.heavy
def test_memory_of_a_resize_is_what_the_compiler_reserves() -> None:
    if importlib.util.find_spec("libtpu") is None:  # an optional extra
        pytest.skip("libtpu is not installed")
    program, plan = planned(512)
    compiled = compile_without_devices(program, plan, 300.0, quick=True)
    assert plan.prediction.peak_bytes == pytest.approx(reserved_bytes(compiled), rel=0.15)
