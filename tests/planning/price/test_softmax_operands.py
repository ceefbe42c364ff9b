"""Memory of the masks and constants that kernels of softmaxes read."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from autoshard.exec.ahead.ahead_process import compile_without_devices
from autoshard.exec.ahead.live_ranges import reserved_bytes
from autoshard.planning import Options, make_plan
from autoshard.planning.price.evaluate import live_buffers
from autoshard.planning.space.user_constraints import read_asked
from autoshard.program import trace


@pytest.mark.parametrize(("topology", "groups", "arrays"), [("v6e:2x4", 4, 3), ("v6e:2x4", 1, 0), ("v5e:2x4", 4, 0)])
def test_a_softmax_of_grouped_heads_reads_its_mask_and_constants(topology: str, groups: int, arrays: int) -> None:
    """Plan causal attention of 8 query heads, with one head of keys for each group; compare with the compiler."""
    rows, heads = 4096, 8

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.mean(jax.nn.dot_product_attention(q, k, v, is_causal=True).astype(jnp.float32) ** 2)

    shapes = [jax.ShapeDtypeStruct((16, rows, heads // each, 128), jnp.bfloat16) for each in (1, groups, groups)]
    program = trace(jax.grad(loss, (0, 1, 2)), shapes)
    pins = {argument.name: ("data", None, None, None) for argument in program.arguments}
    plan = make_plan(
        program, Options(topology=topology, mesh="data=8", refine_axes=False, asked=read_asked(pins=pins))
    ).plan
    priced = plan.graph(program).priced
    scores = 2 * heads * rows * rows
    read = [each for each in live_buffers(priced.model, priced.choices) if each.size in (scores, 4 * scores)]
    assert len([each for each in read if each.tensor == -1]) == arrays
    if arrays and importlib.util.find_spec("libtpu") is not None:  # an optional extra
        compiled = reserved_bytes(compile_without_devices(program, plan, 300.0, True))
        assert plan.prediction.peak_bytes == pytest.approx(compiled, rel=0.1)
