"""Ways to serve as JAX shardings: for every weight of a model, and run on eight devices with the results of one."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autoshard import cli
from autoshard.program import Program, open_source
from autoshard.serving import (
    ServingEngine,
    ServingLimits,
    ServingPlan,
    ServingRequests,
    check_serving,
    jax_shardings,
    plan_serving,
    serving_specs,
)
from tests.command import run


pytestmark = pytest.mark.heavy  # every layout is traced or run

SEQUENCES, PLACES = 16, 32
NAMES = ("llama-tiny", "gemma2-tiny", "mixtral-tiny", "deepseek-v3-tiny", "gpt2-tiny")


def planned(
    name: str, engine: ServingEngine, engines: int, prompt_engines: int = 0, prompts: ServingEngine | None = None
) -> ServingPlan:
    """Return a made-up way to serve on 8 chips. For tiny models, independent copies would be best."""
    plan = plan_serving(f"hf:{name}", "v5e:2x4", ServingRequests(16, 16))
    prompts = engine if prompt_engines and prompts is None else prompts
    point = dataclasses.replace(
        plan.best, engine=engine, engines=engines, prompt_engines=prompt_engines, prompts=prompts
    )
    return dataclasses.replace(plan, best=point)


def loaded(text: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(compile(text, "shardings.py", "exec"), namespace)
    return namespace


def decoding(name: str) -> Program:
    return open_source(f"hf:{name}", serve="decode", batch=SEQUENCES, seq=PLACES, cache=PLACES, dtype="float32")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "engine", "engines"),
    [
        ("llama-tiny", ServingEngine(4), 2),
        ("llama-tiny", ServingEngine(8), 1),  # 4 key-value heads
        pytest.param("llama-tiny", ServingEngine(4, 2), 1, marks=pytest.mark.full),
        ("gemma2-tiny", ServingEngine(2, 2), 2),
        ("mixtral-tiny", ServingEngine(2, 2, 4), 2),
        pytest.param("mixtral-tiny", ServingEngine(4, 2), 1, marks=pytest.mark.full),
        ("deepseek-v3-tiny", ServingEngine(2, 4, 8), 1),
        pytest.param("deepseek-v3-tiny", ServingEngine(4, 1), 2, marks=pytest.mark.full),
        ("gpt2-tiny", ServingEngine(2), 4),
    ],
)
def test_a_step_so_laid_out_computes_what_one_device_does(name: str, engine: ServingEngine, engines: int):
    import jax

    module = loaded(jax_shardings(planned(name, engine, engines)))
    program = decoding(name)
    assert program.make_args is not None
    arguments = program.make_args(0)
    mesh = module["serving_mesh"](module["SIZES"], jax.devices()[:8])
    assert math.prod(mesh.shape.values()) == 8
    shardings = [module["sharding"](mesh, each.name, len(each.shape)) for each in program.arguments]
    leaves, tree = jax.tree.flatten(arguments)
    assert len(leaves) == len(shardings)
    placed = [jax.device_put(leaf, each) for leaf, each in zip(leaves, shardings, strict=True)]
    # Every device stores its part of the cache's sequences, and of the available heads.
    held = {
        each.name: leaf.addressable_shards[0].data.nbytes for each, leaf in zip(program.arguments, placed, strict=True)
    }
    cache = {each.name: leaf.nbytes / held[each.name] for each, leaf in zip(program.arguments, leaves, strict=True)}
    kept = 1 if name.startswith("deepseek") else 4
    parts = engines * engine.attention * math.gcd(engine.tensor, kept)
    assert {share for key, share in cache.items() if key.startswith("cache.")} == {parts}
    step = jax.jit(program.fn)
    alone, laid = step(*arguments), step(*jax.tree.unflatten(tree, placed))
    for one, other in zip(jax.tree.leaves(alone), jax.tree.leaves(laid), strict=True):
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        assert np.abs(one - other).max() <= 2e-5 * max(1e-6, np.abs(one).max())


@pytest.mark.few(2)
@pytest.mark.parametrize("name", NAMES)
def test_every_weight_has_its_spec_and_no_other(name: str):
    plan = planned(name, ServingEngine(4), 2)
    specs = serving_specs(plan.config, plan.decoder, ServingEngine(4), 2)
    module = loaded(jax_shardings(plan))
    program = decoding(name)
    mesh = module["serving_mesh"](module["SIZES"])
    for each in program.arguments:
        assert len(module["sharding"](mesh, each.name, len(each.shape)).spec) == len(each.shape)
    names = {re.sub(r"\.(\d+|\[[^]]*\])\.", ".*.", each.name) for each in program.arguments}
    assert {each for each in names if not each.startswith(("cache.", "batch."))} == set(specs.weights)


def test_whole_experts_are_dealt_out_or_each_is_split():
    plan = planned("mixtral-tiny", ServingEngine(2, 2, 4), 2)
    whole = serving_specs(plan.config, plan.decoder, ServingEngine(2, 2, 4), 2)
    split = serving_specs(plan.config, plan.decoder, ServingEngine(2, 2), 2)
    name = "model.layers.*.mlp.experts.gate_up_proj"
    assert whole.weights[name] == (("group", "kv"), (), ()) and not whole.joined
    assert split.weights[name] == ((), ("group", "kv"), ()) and split.joined == {name: "gate and up"}
    assert "# gate and up in turns, not one after the other" in jax_shardings(
        planned("mixtral-tiny", ServingEngine(2, 2), 2)
    )


def test_engines_apart_have_meshes_of_their_own():
    import jax

    module = loaded(jax_shardings(planned("llama-tiny", ServingEngine(2), 4, prompt_engines=1)))
    assert module["PROMPT_SIZES"] == {"engine": 1, "kv": 2} and module["DECODE_SIZES"] == {"engine": 3, "kv": 2}
    devices = jax.devices()
    prompts = module["serving_mesh"](module["PROMPT_SIZES"], devices[:2])
    decoding = module["serving_mesh"](module["DECODE_SIZES"], devices[2:8])
    assert not {*prompts.devices.flat} & {*decoding.devices.flat}
    assert module["sharding"](decoding, "batch.input_ids", 2).spec == jax.sharding.PartitionSpec("engine", None)


def test_engines_for_prompts_may_split_otherwise():
    import jax

    text = jax_shardings(planned("llama-tiny", ServingEngine(2, 2), 2, 1, ServingEngine(4)))
    assert "1 engine of 4 devices compute prompts, and 1 engine of 4 devices (in each 2 groups" in " ".join(
        text.split()
    )
    module = loaded(text)
    assert module["PROMPT_SIZES"] == {"engine": 1, "kv": 4}
    assert module["DECODE_SIZES"] == {"engine": 1, "group": 2, "kv": 2}
    prompts = module["serving_mesh"](module["PROMPT_SIZES"], jax.devices()[:4])
    decoding = module["serving_mesh"](module["DECODE_SIZES"], jax.devices()[4:8])
    name = "model.layers.*.mlp.up_proj.weight"
    assert module["sharding"](prompts, name, 3, prompts=True).spec == jax.sharding.PartitionSpec(None, "kv", None)
    split = jax.sharding.PartitionSpec(None, ("group", "kv"), None)
    assert module["sharding"](decoding, name, 3).spec == split


def test_dtypes_are_reported_and_what_does_not_divide_is_whole():
    plan = plan_serving("hf:gpt2-xl", "v5e:2x4", ServingRequests(100, 100, "int8", "fp8"))
    point = dataclasses.replace(plan.best, engine=ServingEngine(5), engines=1)
    text = jax_shardings(plan, point)
    assert "WEIGHT_DTYPE = jnp.int8" in text and "CACHE_DTYPE = jnp.float8_e4m3fn" in text
    assert '"transformer.wte.weight": P(None, None)' in text  # 5 does not divide 50257 words
    assert '"transformer.h.*.attn.c_attn.weight": P(None, "kv"),  # queries, keys and values in turns' in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_the_command_writes_the_file_and_checks_it_with_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "shardings.py"
    line = "serve-plan hf:llama-tiny --topology v5e:2x2 --input 96 --output 32 --check --quiet"
    done = run(*line.split(), "--jax", str(file), "--json")
    assert done.returncode == 0, done.stderr
    assert "serving_mesh" in loaded(file.read_text())
    document = json.loads(done.stdout)
    decode, prefill = document["checked"]
    assert (decode["kind"], prefill["kind"]) == ("decode", "prefill") and decode["length"] == 96 + 16
    assert decode["sequences"] == document["best"]["batch"] * document["best"]["engines"]
    for step in document["checked"]:
        assert step["failed"] == [] and 0 < step["free_s"] <= 1.001 * step["planned_s"]
        assert 0 < step["planned_bytes"] < step["estimate_bytes"] * 10
    assert cli.main([*line.split(), "--weights", "int8"]) == 2
    assert "--check plans programs whose weights and caches have 16 bits" in capsys.readouterr().err


@pytest.mark.full
def test_plans_of_its_steps_are_near_the_closed_form():
    limits = ServingLimits(token_s=0.01)
    plan = plan_serving("hf:llama3-8b", "v6e:2x4", ServingRequests(1000, 1000), limits)
    for step in check_serving(plan):
        assert step.laid_out is not None and step.free is not None and not step.failed
        planned = step.laid_out.prediction
        assert planned.peak_bytes == pytest.approx(step.estimate.peak_bytes, rel=0.03)
        assert planned.step_time_s == pytest.approx(step.estimate.step_time_s, rel=0.2)
        assert step.laid_out.mesh == {"kv": 8}
        assert step.free.prediction.step_time_s <= planned.step_time_s
