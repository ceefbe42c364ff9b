"""Batch norms of StableHLO files on eight CPU devices: XLA's own values, split by batch and by channels."""

import functools
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from autoshard.graph import FactorKind, read_graph
from autoshard.planning import Options, make_plan
from autoshard.program import Program, load_artifact


X, ROW = "tensor<2048x6x10x12xf32>", "tensor<12xf32>"
TAKES = {"training": [X, ROW, ROW], "inference": [X, *[ROW] * 4], "grad": [X, ROW, ROW, ROW, X]}
GIVES = {"training": [X, ROW, ROW], "inference": [X], "grad": [X, ROW, ROW]}


def norm(kind: str, element: str = "f32") -> str:
    takes, gives = ([t.replace("f32", element) for t in side[kind]] for side in (TAKES, GIVES))
    arguments = [f"%a{k}" for k in range(len(takes))]
    signature = ", ".join(f"{a}: {t}" for a, t in zip(arguments, takes, strict=True))
    results = ", ".join(f"%0#{k}" for k in range(len(gives))) if len(gives) > 1 else "%0"
    return f"""
func.func public @main({signature}) -> ({", ".join(gives)}) {{
  %0{f":{len(gives)}" if len(gives) > 1 else ""} = "stablehlo.batch_norm_{kind}"({", ".join(arguments)}) {{
    epsilon = 1.0e-2 : f32, feature_index = 3 : i64}} : ({", ".join(takes)}) -> ({", ".join(gives)})
  return {results} : {", ".join(gives)}
}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("norms")


def program(folder: Path, kind: str, element: str = "f32") -> Program:
    path = folder / f"{kind}_{element}.mlir"
    path.write_text(norm(kind, element))
    return load_artifact(path)


@functools.cache
def values(kind: str) -> list[Any]:
    random = np.random.default_rng(0)
    shapes = [tuple(int(n) for n in re.findall(r"(\d+)x", kind)) for kind in TAKES[kind]]
    return [random.uniform(0.5, 2, size=shape).astype("float32") for shape in shapes]


@pytest.mark.parametrize("kind", sorted(TAKES))
def test_values_are_those_of_the_op(folder: Path, kind: str) -> None:
    source = program(folder, kind)
    plan = make_plan(source, Options(topology="cpu:8", mesh="data=8")).plan
    assert plan.unruled == ()
    assert plan.arguments[next(iter(plan.arguments))].dims[0] == ("data",)
    assert f"batch_norm_{kind}" in jax.jit(source.fn).lower(*source.args).as_text()
    wanted, found = jax.jit(source.fn)(*values(kind)), plan.jit(source.fn)(*values(kind))
    for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(np.abs(a).max()))


@pytest.mark.parametrize("kind", ["training", "grad"])
def test_only_rows_of_sums_are_communicated(folder: Path, kind: str) -> None:
    source = program(folder, kind)
    plan = make_plan(source, Options(topology="cpu:8", mesh="data=8")).plan
    text = plan.lower(source.fn, *source.args).compile().as_text()
    assert "all-gather(" not in text
    assert "all-reduce(" in text
    assert "f32[2048,6,10,12]" not in text, "no device holds the whole tensor"


def test_channels_are_parallel_and_the_rest_is_summed() -> None:
    sums = [op for op in read_graph(norm("training").encode()).ops if op.kind == "reduce" and op.rule is not None]
    assert len(sums) == 2
    for op in sums:
        assert op.rule is not None
        kinds = {n: kind for n, kind in zip(op.rule.sizes, op.rule.kinds, strict=True)}
        assert kinds[12] is FactorKind.PARALLEL
        assert {kinds[n] for n in (2048, 6, 10)} == {FactorKind.REDUCTION}


@pytest.mark.parametrize("element", ["bf16", "f16"])
def test_short_floats_are_summed_in_long_ones(element: str) -> None:
    graph = read_graph(norm("training", element).encode())
    assert {graph.tensors[op.results[0]].dtype for op in graph.ops if op.kind == "reduce"} == {"float32"}
    assert {graph.tensors[t].dtype for t in graph.results} == {{"bf16": "bfloat16", "f16": "float16"}[element]}
