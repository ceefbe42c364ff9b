"""Dots that compilers turn into products and sums: the answer of `is_sum` against programs of real compilers."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest

from autoshard.exec import compile_plan
from autoshard.graph import is_sum, read_graph
from autoshard.planning import Options, make_plan
from autoshard.program import trace


PLUGIN = pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="no CUDA plugin")
DOTS = {
    "bsdn,bsn->bsd": True,  # a matrix times a vector, in batches
    "bsd,bsn->bsdn": True,  # an outer product
    "gskx,gskx->gsk": True,  # a product of all dims
    "sd,d->s": True,
    "sd,dn->sn": False,
    "bsd,bnd->bsn": False,
}
SIZES = {"b": 8, "s": 128, "d": 256, "n": 16, "g": 8, "k": 2, "x": 8}


@pytest.mark.heavy
@pytest.mark.parametrize("topology", [pytest.param("h100:1", marks=[PLUGIN, pytest.mark.full]), "v5e:1x1"])
def test_compilers_keep_a_matmul_where_neither_side_is_a_vector(topology: str) -> None:
    operands = [
        tuple(
            jax.ShapeDtypeStruct(tuple(SIZES[d] for d in dims), jnp.float32) for dims in form.split("->")[0].split(",")
        )
        for form in DOTS
    ]

    def products(pairs: list[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
        return [
            jnp.einsum(form, jnp.sin(left), jnp.cos(right)) for form, (left, right) in zip(DOTS, pairs, strict=True)
        ]

    program = trace(products, (operands,))
    rules = [op.rule for op in read_graph(program.module).ops if op.kind == "dot_general"]
    assert [rule is not None and is_sum(rule) for rule in rules] == list(DOTS.values())
    plan = make_plan(program, Options(topology=topology, mesh="data=1")).plan
    hlo = compile_plan(program, plan, 300.0).hlo
    assert hlo is not None
    kept = re.findall(r"= \S+ (?:dot|convolution)\(", hlo)
    assert len(kept) == list(DOTS.values()).count(False)
