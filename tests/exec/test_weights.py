"""Weights from safetensors files in a plan's parameters and back: each device reads and writes its own part."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from autoshard.errors import UserError
from autoshard.exec.apply import weight_files
from autoshard.planning import Options, Plan, make_plan
from autoshard.program import Program, host_array, open_source, read_config, trace
from tests.exec.planned_programs import handmade


SMALL: dict[str, Any] = {"batch": 8, "seq": 32}


def planned(config: str, **options: Any) -> tuple[Program, Plan]:
    program = open_source(f"hf:{config}", **SMALL, **options)
    return program, make_plan(program, Options(topology="cpu:8", mesh={"data": 4, "model": 2}, time_limit=20)).plan


def model_of(config: str) -> Any:
    _, fields = read_config(config)
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields)).eval()


def tensors(params: dict[str, Any], program: Program) -> dict[str, np.ndarray]:
    """Return the model's tensors by their own names."""
    found = {}
    for name, members in program.weights.items():
        for number, member in enumerate(members):
            found[member] = np.asarray(params[name] if len(members) == 1 else params[name][number])
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(("config", "options"), [("llama-tiny", {"train": True, "dtype": "fp32"}), ("gpt2-tiny", {})])
def test_weights_of_transformers_are_loaded_and_written(config: str, options: dict[str, Any], tmp_path: Path) -> None:
    program, plan = planned(config, **options)
    model = model_of(config)
    # The base model's file omits its name from the names of its tensors, as those of GPT-2 on the hub do.
    saved = getattr(model, model.base_model_prefix) if config == "gpt2-tiny" else model
    saved.save_pretrained(tmp_path / "theirs", max_shard_size="200KB")
    params = plan.load_weights(tmp_path / "theirs", program)
    dtype = program.args[0][next(iter(params))].dtype
    own = {name: host_array(value).astype(dtype) for name, value in model.named_parameters()}
    found = tensors(params, program)
    assert set(found) == set(own) and all(np.array_equal(found[name], own[name]) for name in own)
    wanted = dict(zip(plan.arguments, plan.in_shardings, strict=True))
    assert all(array.sharding.is_equivalent_to(wanted[name], array.ndim) for name, array in params.items())
    assert not options or any(not array.is_fully_replicated for array in params.values())
    files = plan.save_weights(params, tmp_path / "ours", program)
    assert [file.name for file in files] == ["model.safetensors"]
    again = plan.load_weights(tmp_path / "ours", program)
    assert all(np.array_equal(array, again[name]) for name, array in params.items())
    if options:
        model.config.save_pretrained(tmp_path / "ours")
        read = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        ids = torch.arange(64).reshape(2, 32) % 100
        assert torch.equal(read(ids).logits, model(ids).logits)
        args = program.make_args(0)
        placed = tuple(jax.device_put(leaf) for leaf in args[1:])
        assert np.isfinite(jax.tree.leaves(plan.jit(program.fn)(params, *placed))[-1])


def test_no_more_is_read_than_a_device_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = open_source("hf:llama-tiny", **SMALL)
    split = "model.layers.*.mlp.up_proj.weight"
    plan = handmade(program, {"data": 4, "model": 2}, {split: "data,model,-"})
    model_of("llama-tiny").save_pretrained(tmp_path)
    read: dict[str, list[int]] = {}
    part = weight_files.Files.part

    def counted(self: Any, key: str, index: tuple[slice, ...]) -> Any:
        found = part(self, key, index)
        read.setdefault(key, []).append(found.size)
        return found

    monkeypatch.setattr(weight_files.Files, "part", counted)
    array = plan.load_weights(tmp_path, program)[split]
    assert array.sharding.shard_shape(array.shape) == (array.shape[0] // 4, array.shape[1] // 2, array.shape[2])
    halves = [array.shape[1] // 2 * array.shape[2]] * 2
    assert [read[key] for key in program.weights[split]] == [halves] * array.shape[0], "each half of a layer once"


def test_several_files_have_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, plan = planned("gpt2-tiny")
    model_of("gpt2-tiny").save_pretrained(tmp_path / "theirs")
    params = plan.load_weights(tmp_path / "theirs" / "model.safetensors", program)
    monkeypatch.chdir(tmp_path)
    relative = plan.load_weights("theirs", program)
    assert all(np.array_equal(array, relative[name]) for name, array in params.items())
    monkeypatch.setattr(weight_files, "FILE_BYTES", 100_000)
    files = plan.save_weights(params, tmp_path / "ours", program)
    index = json.loads((tmp_path / "ours" / weight_files.INDEX).read_text())
    assert len(files) > 2 and set(index["weight_map"].values()) == {file.name for file in files}
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in params.values())
    again = plan.load_weights("ours", program)
    assert all(np.array_equal(array, again[name]) for name, array in params.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]


def test_what_cannot_be_read_or_written_is_reported(tmp_path: Path) -> None:
    program, plan = planned("gpt2-tiny")
    with pytest.raises(UserError, match="there is no folder or file"):
        plan.load_weights(tmp_path / "none", program)
    with pytest.raises(UserError, match="holds no weights"):
        plan.load_weights(tmp_path, program)
    model_of("llama-tiny").save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match=r"has no `transformer\..*` among its \d+ tensors"):
        plan.load_weights(tmp_path / "other", program)
    _, fields = read_config("gpt2-tiny")
    config = AutoConfig.for_model(**fields | {"vocab_size": 77})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "small")
    with pytest.raises(UserError, match=r"`transformer.wte.weight` is of shape \[77, "):
        plan.load_weights(tmp_path / "small", program)
    (tmp_path / "indexed").mkdir()
    for text in ("[]", "{}", '{"weight_map": {"a": 1}}'):
        (tmp_path / "indexed" / weight_files.INDEX).write_text(text)
        with pytest.raises(UserError, match="is no index of weights: it has no `weight_map` from tensors to files"):
            plan.load_weights(tmp_path / "indexed", program)
    (tmp_path / "indexed" / weight_files.INDEX).write_text('{"weight_map": {"a": "none.safetensors"}}')
    with pytest.raises(UserError, match="none.safetensors` cannot be read as safetensors"):
        plan.load_weights(tmp_path / "indexed", program)
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"broken.safetensors` cannot be read as safetensors"):
        plan.load_weights(tmp_path / "broken.safetensors", program)
    with pytest.raises(UserError, match="exists and is no empty folder"):
        plan.save_weights(dict.fromkeys(program.weights, jax.numpy.zeros(1)), tmp_path, program)
    with pytest.raises(UserError, match="the parameters are not those of gpt2-tiny"):
        plan.save_weights({"w": jax.numpy.zeros(1)}, tmp_path / "new", program)
    handmade = trace(lambda x: x * 2, (jax.ShapeDtypeStruct((8,), "float32"),), name="double")
    with pytest.raises(UserError, match="double has no weights that files name"):
        plan.load_weights(tmp_path, handmade)
    assert not (tmp_path / "new").exists()
