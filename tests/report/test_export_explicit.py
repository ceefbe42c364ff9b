"""Plans exported to JAX's explicit sharding mode: the file runs, its types are the plan's, its hints are needed."""

import ast
import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import UserError
from autoshard.errors import FormError
from autoshard.exports import export_plan
from autoshard.exports.plan_exports import make_export
from autoshard.planning import FORMS, ParameterUse, Plan, Spec, load_plan, price_form


STEP = """
import jax
import jax.numpy as jnp


def step(params, ids, y):
    def loss(params):
        x = params["table"][ids]

        def layer(x, w):
            h = jax.nn.relu(x @ w["up"])
            return x + h @ w["down"], None

        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
        return jnp.mean((x - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def program():
    shape = jax.ShapeDtypeStruct
    layers = {"up": shape((2, 32, 64), "float32"), "down": shape((2, 64, 32), "float32")}
    params = {"layers": layers, "table": shape((48, 32), "float32")}
    return step, (params, shape((16,), "int32"), shape((16, 32), "float32"))
"""

PINS = {
    "params.layers.up": "None,None,model",
    "params.layers.down": "None,model,None",
    "params.table": "model,None",
    "ids": "data",
    "y": "data,None",
}


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a step, its plan, and the plan's export to a folder."""
    folder = tmp_path_factory.mktemp("explicit")
    (folder / "step.py").write_text(STEP)
    plan = autoshard.plan(str(folder / "step.py"), topology="cpu:8", mesh={"data": 4, "model": 2}, pins=PINS)
    plan.save(folder / "plan.json")
    (folder / "shardings.py").write_text(export_plan(plan, "explicit"))
    return folder


def values(args: Any) -> Any:
    random = np.random.default_rng(0)

    def made(leaf: Any) -> Any:
        ids = random.integers(0, 48, leaf.shape)
        return ids.astype("int32") if leaf.dtype == "int32" else random.normal(size=leaf.shape).astype("float32")

    return jax.tree.map(made, args)


def hinted(folder: Path, without: str = "") -> Any:
    """Return the step with each hint in its line, except for one."""
    text = STEP
    written = {
        'params["table"][ids]': 'params["table"].at[ids].get(out_sharding=at("step.py:8 gather"))',
        'h @ w["down"]': 'jnp.matmul(h, w["down"], out_sharding=at("step.py:12 dot_general"))',
    }
    for plain, explicit in written.items():
        assert plain in text
        text = text if without and without in explicit else text.replace(plain, explicit)
    path = folder / f"hinted{len(without)}.py"
    path.write_text("from shardings import at, hint" + text)
    sys.modules["shardings"] = load(folder / "shardings.py")
    try:
        return load(path).step
    finally:
        del sys.modules["shardings"]


def axes(leaf: Any) -> Any:
    """Return the spec in an array's type."""
    return jax.typeof(leaf).sharding.spec


def padded(spec: Spec) -> Any:
    """Convert a spec to the form of types: an entry for every dim."""
    return jax.sharding.PartitionSpec(*(None if not dim else dim[0] if len(dim) == 1 else dim for dim in spec.dims))


def check_equal(found: Any, wanted: Any, plan: Plan) -> None:
    specs = list(plan.results.values())
    for leaf, reference, spec in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), specs, strict=True):
        np.testing.assert_allclose(leaf, reference, rtol=0, atol=2e-6 * float(np.abs(reference).max()))
        assert axes(leaf) == padded(spec)


@pytest.mark.heavy
def test_a_step_with_the_hints_computes_the_same_and_its_types_are_the_plans(folder: Path):
    plan, module, exported = load_plan(folder / "plan.json"), load(folder / "step.py"), load(folder / "shardings.py")
    _, args = module.program()
    given = values(args)
    wanted = jax.jit(module.step)(*given)
    assert set(exported.HINTS) == {"step.py:8 gather", "step.py:12 dot_general"}
    step = hinted(folder)
    check_equal(exported.jit(step, args)(*given), wanted, plan)
    mesh = exported.make_mesh()
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Explicit}
    for leaf, spec in zip(jax.tree.leaves(exported.put(given, mesh)), plan.arguments.values(), strict=True):
        assert axes(leaf) == padded(spec)
    # Without a mesh, the hints have no effect.
    for leaf, reference in zip(jax.tree.leaves(jax.jit(step)(*given)), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(leaf, reference)


@pytest.mark.parametrize("place", ["gather", "dot_general"])
def test_jax_asks_where_the_file_says_so(folder: Path, place: str):
    exported = load(folder / "shardings.py")
    _, args = load(folder / "step.py").program()
    with pytest.raises(Exception, match="out_sharding") as raised:
        exported.jit(hinted(folder, without=place), args)
    assert type(raised.value).__name__ == "ShardingTypeError"
    assert (
        f"'step.py:{8 if place == 'gather' else 12} {place}': P('data'),  # 16x32; asks"
        in (folder / "shardings.py").read_text()
    )


@pytest.mark.heavy
def test_the_step_as_it_was_planned_runs_unchanged(folder: Path):
    plan, module, exported = load_plan(folder / "plan.json"), load(folder / "step.py"), load(folder / "shardings.py")
    _, args = module.program()
    given = values(args)
    check_equal(exported.jit_unchanged(module.step, args, donate_argnums=0)(*given), jax.jit(module.step)(*given), plan)


def test_values_that_are_gathered_before_use_have_hints():
    """Split parameters over the batch's axis, as FSDP does: the plan gathers them before use, types would not."""

    def step(w: Any, x: Any) -> Any:
        return jax.nn.relu(x @ w)

    shape = jax.ShapeDtypeStruct
    args = (shape((64, 64), "float32"), shape((4096, 64), "float32"))
    program = autoshard.trace(step, args)
    plan = autoshard.plan(program, topology="v5e:2x2", mesh={"data": 4}, pins={"w": "data,None", "x": "data,None"})
    text = export_plan(plan, "explicit", program)
    assert re.search(r"'test_export_explicit.py:\d+ dot_general operand 1': P\(\),  # 64x64; what it takes", text)
    assert "asks`" in text and "; asks" not in text


def test_hints_are_priced() -> None:
    """Price FSDP with tensor parallelism. Propagation alone loses the split of hidden values."""

    advised: Any = None

    def constrained(x: Any) -> Any:
        return x if advised is None else jax.lax.with_sharding_constraint(x, advised)

    def step(w: Any, x: Any, y: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean((jax.nn.gelu(constrained(x @ w["up"])) @ w["down"] - y) ** 2)

        return jax.tree.map(lambda p, g: p - g, w, jax.grad(loss)(w))

    def array(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, "bfloat16")

    w = {"up": array(8192, 32768), "down": array(32768, 8192)}
    program = autoshard.trace(step, (w, array(65536, 8192), array(65536, 8192)))
    pins = {"w.up": "data,None", "w.down": "None,data", "x": "data,None", "y": "data,None"}
    plan = autoshard.plan(program, topology="v5e:4x4", mesh={"data": 4, "model": 4}, pins=pins)
    export = make_export(plan, "explicit", program)
    bare = price_form(plan, program, dataclasses.replace(FORMS["explicit"], hints=False))
    assert export.prediction is not None and bare is not None
    assert export.prediction.step_time_s < 1.02 * plan.prediction.step_time_s < 0.9 * bare.step_time_s
    with pytest.raises(FormError, match="the jax form cannot hold this plan") as raised:
        make_export(plan, "jax", program)
    named = re.search(
        r"lose a split are at [\w.]+:\d+ \(dot_general, 65536x32768, P(\('data', 'model'\))\)", str(raised.value)
    )
    assert named is not None
    mesh = jax.sharding.AbstractMesh((4, 4), ("data", "model"))
    advised = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*ast.literal_eval(named[1])))
    program = autoshard.trace(lambda w, x, y: step(w, x, y), (w, array(65536, 8192), array(65536, 8192)))
    again = autoshard.plan(program, topology="v5e:4x4", mesh={"data": 4, "model": 4}, pins=pins)
    export = make_export(again, "jax", program)
    assert export.prediction is not None
    assert export.prediction.step_time_s < 0.95 * bare.step_time_s


def test_the_first_lines_say_what_is_left_out(folder: Path):
    plan = load_plan(folder / "plan.json")
    lines = (folder / "shardings.py").read_text().splitlines()
    assert lines[1].startswith("# Predicted with what this form holds: a step of ")
    assert "`jit_unchanged`, without the hints: " in lines[1]
    assert f"the {len(plan.pins)} intermediates that the plan pins; types decide" in lines[2]
    assert re.fullmatch(r"# Not expressed here: \d+ of the pins, which are of gradients: .*", lines[3])
    gone = dataclasses.replace(plan, provenance={**plan.provenance, "source": {"program": "gone.py"}})
    text = export_plan(gone, "explicit")
    assert "# Not expressed here: hints inside of the step, for which its program is needed." in text
    assert "HINTS = {\n}" in text


@pytest.mark.heavy
def test_what_no_jax_code_says_is_refused(folder: Path, tmp_path: Path):
    plan = load_plan(folder / "plan.json")
    whole = Spec.replicated(2)
    torch = dataclasses.replace(plan, uses=(ParameterUse("0.weight", whole, (8, 8), whole, (8, 8), whole),))
    with pytest.raises(UserError, match=r"is of a torch module: export it with --to jax"):
        export_plan(torch, "explicit")
    for program, what in (("hf:gpt2", "a model that is made"), ("gone.mlir", "a file of a compiler")):
        other = dataclasses.replace(plan, provenance={**plan.provenance, "source": {"program": program}})
        with pytest.raises(UserError, match=what):
            export_plan(other, "explicit")
    other.save(tmp_path / "other.json")
    command = [sys.executable, "-m", "autoshard", "export", str(tmp_path / "other.json"), "--to", "explicit"]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].endswith("export it with --to jax, or plan a JAX step.")
