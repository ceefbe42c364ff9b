"""The code for transformers' `tp_plan` and torchtitan's `parallelize` runs, and computes the unplanned results."""

import ast
import dataclasses
import json
import math
import os
import runpy
from pathlib import Path

import pytest

from autoshard import UserError
from autoshard.cli import main
from autoshard.errors import FormError
from autoshard.exports import export_plan
from autoshard.planning import ParameterUse, Plan, Spec, stack_names
from tests import forked


RANKS = 4
LAYER = "model.layers.*"
SHAPES = {
    "model.embed_tokens.weight": (64, 32),
    f"{LAYER}.self_attn.q_proj.weight": (2, 32, 32),
    f"{LAYER}.self_attn.k_proj.weight": (2, 16, 32),
    f"{LAYER}.self_attn.v_proj.weight": (2, 16, 32),
    f"{LAYER}.self_attn.o_proj.weight": (2, 32, 32),
    f"{LAYER}.mlp.gate_proj.weight": (2, 64, 32),
    f"{LAYER}.mlp.up_proj.weight": (2, 64, 32),
    f"{LAYER}.mlp.down_proj.weight": (2, 32, 64),
    f"{LAYER}.input_layernorm.weight": (2, 32),
    f"{LAYER}.post_attention_layernorm.weight": (2, 32),
    "model.norm.weight": (32,),
    "lm_head.weight": (64, 32),
}
SPLIT = {"embed_tokens": 0, "q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0}
SPLIT |= {"down_proj": 1, "lm_head": 0}
FILE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
    vocab_size=64, max_position_embeddings=32,
)
model = LlamaForCausalLM(config).eval()
ids = torch.randint(0, 64, (4, 8))
"""
RUN = """
import json, os, runpy, sys
folder = sys.argv[1]
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaForCausalLM
import autoshard
import autoshard.exec.dtensor.distributed_module
from transformers.distributed import DistributedConfig

rank = 0
for number in range(1, 4):
    if not os.fork():
        rank = number
        break
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4",
               "MASTER_ADDR": "localhost", "MASTER_PORT": sys.argv[2]}
torch.set_num_threads(1)
dist.init_process_group("gloo")
net = runpy.run_path(f"{folder}/net.py")
found = {}


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def compare(name, model, ids, wanted):
    loss = whole(model(input_ids=ids, labels=ids).loss)
    loss.backward()
    found[name] = {
        "loss": float((loss - wanted).abs() / wanted),
        "local": {key: list(p.to_local().shape) for key, p in model.named_parameters() if hasattr(p, "to_local")},
        "gradients": {key: whole(p.grad) for key, p in model.named_parameters() if p.grad is not None},
    }


wanted = net["model"](input_ids=net["ids"], labels=net["ids"]).loss
wanted.backward()
grads = {key: p.grad for key, p in net["model"].named_parameters()}
code = runpy.run_path(f"{folder}/transformers.py_")
model = LlamaForCausalLM.from_pretrained(f"{folder}/weights", distributed_config=code["config"]()).eval()
compare("transformers", model, net["ids"], wanted.detach())
for name in ("tp", "fsdp"):
    code = runpy.run_path(f"{folder}/{name}.py")
    mesh = code["make_mesh"]("cpu")
    model = runpy.run_path(f"{folder}/net.py")["model"]
    code["parallelize"](model, mesh)
    ids = net["ids"]
    if "fsdp" in code["MESH"]:
        ids = ids.chunk(2)[mesh["fsdp"].get_local_rank()]
    compare(name, model, ids, wanted.detach())
    if "fsdp" in code["MESH"]:
        del found[name]["loss"]  # of a part of the batch
model = runpy.run_path(f"{folder}/net.py")["model"]
plan = autoshard.load(f"{folder}/plan.json")
mesh = init_device_mesh("cpu", tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
plan.distribute(model, mesh, gather_outputs=True)
model.train().gradient_checkpointing_enable()
compare("distribute", model, net["ids"], wanted.detach())
asked = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones(4, 4).long(), "pad_token_id": 0}
ahead = [each.eval().generate(net["ids"][:, :4], **asked) for each in (net["model"], model)]
found["distribute"]["generated"] = bool((ahead[0] == ahead[1]).all())
for each in found.values():
    assert each["gradients"].keys() == grads.keys()
    off = {key: (each["gradients"][key] - grad).abs().max() / grad.abs().max() for key, grad in grads.items()}
    each["gradients"] = float(max(off.values()))
dist.barrier()
if rank == 0:
    print(json.dumps(found))
dist.destroy_process_group()
"""


def llama_plan(plan: Plan, mesh: dict[str, int], split: dict[str, int]) -> Plan:
    """Return a plan of the file's model with a dim of some modules' weights over `model` and the batch over `data`."""
    arguments, uses = {}, []
    for name, shape in SHAPES.items():
        stacked, kind = "*" in name, name.split(".")[-2]
        dims: list[tuple[str, ...]] = [()] * len(shape)
        if kind in split:
            dims[stacked + split[kind]] = ("model",)
        arguments[name] = Spec(tuple(dims))
        if len(shape) - stacked == 2:
            out, width = shape[stacked:]
            taken, given = ((4, 8, 1), (4, 8, width)) if kind == "embed_tokens" else ((4, 8, width), (4, 8, out))
            whole = Spec(((), (), ()))
            uses.append(ParameterUse(name, Spec(tuple(dims[stacked:])), taken, whole, given, whole))
    arguments["batch.input_ids"] = Spec((("data",) if "data" in mesh else (), ()))
    shapes = SHAPES | {"batch.input_ids": (4, 8)}
    return dataclasses.replace(
        plan,
        topology=f"cpu:{math.prod(mesh.values())}",
        mesh=mesh,
        device_order=tuple(range(math.prod(mesh.values()))),
        arguments=arguments,
        results={},
        pins=(),
        shapes=shapes,
        dtypes=dict.fromkeys(shapes, "float32"),
        roles={name: "batch" if name.startswith("batch") else "parameter" for name in shapes},
        uses=tuple(uses),
    )


@pytest.mark.full
def test_the_code_computes_what_the_module_does_alone(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FILE)
    runpy.run_path(str(tmp_path / "net.py"))["model"].save_pretrained(tmp_path / "weights")
    for name, form, mesh in (
        ("transformers.py_", "transformers", {"model": RANKS}),
        ("tp.py", "torchtitan", {"model": RANKS}),
        ("fsdp.py", "torchtitan", {"data": 2, "model": 2}),
    ):
        (tmp_path / name).write_text(export_plan(llama_plan(plan, mesh, SPLIT), form, force=True))
    whole = llama_plan(plan, {"data": 2, "model": 2}, SPLIT)
    whole.save(tmp_path / "plan.json")
    port = str(20000 + os.getpid() % 20000)
    run = forked.run(["-c", RUN, str(tmp_path), port], Path(__file__).parents[2])
    assert run.returncode == 0, run.stderr[-5000:]
    document = json.loads(run.stdout.splitlines()[-1])
    for name, each in document.items():
        assert each.get("loss", 0.0) < 1e-5 and each["gradients"] < 1e-4, name
    for name in ("transformers", "tp"):
        local = document[name]["local"]
        assert local["model.layers.1.self_attn.q_proj.weight"] == [8, 32]
        assert local["model.layers.0.mlp.down_proj.weight"] == [32, 16]
        assert local["model.embed_tokens.weight"] == [16, 32] and local["lm_head.weight"] == [16, 32]
    assert document["distribute"]["generated"], "token by token, with a cache"
    local = document["distribute"]["local"]
    assert local["model.layers.1.self_attn.q_proj.weight"] == [16, 32] and local["lm_head.weight"] == [32, 32]
    assert local["model.layers.0.mlp.down_proj.weight"] == [32, 32]
    assert document["fsdp"]["local"]["model.layers.1.self_attn.q_proj.weight"] == [8, 32]


def test_modules_that_do_not_meet_take_and_give_whole_values(plan: Plan) -> None:
    text = export_plan(llama_plan(plan, {"model": RANKS}, {"gate_proj": 0, "up_proj": 0, "o_proj": 1}), "transformers")
    names: dict[str, object] = {}
    exec(text.partition("from transformers")[0] + text[text.index("TP_SIZE") :].partition("def config")[0], names)
    assert names["TP_PLAN"] == {
        f"{LAYER}.self_attn.o_proj": "rowwise_split_input",
        f"{LAYER}.mlp.gate_proj": "colwise_gather_output",
        f"{LAYER}.mlp.up_proj": "colwise_gather_output",
    }
    assert "values that stay split around model.layers.*.mlp.gate_proj" in text


def test_a_stack_of_some_layers_has_a_name_for_each() -> None:
    assert stack_names("layers.[1::2].mlp", 2) == ["layers.1.mlp", "layers.3.mlp"]
    assert stack_names("layers.[0:2].mlp", 2) == ["layers.0.mlp", "layers.1.mlp"]
    assert stack_names("layers.*.mlp", 7) == ["layers.*.mlp"]


def test_what_no_style_says_is_reported(plan: Plan) -> None:
    made = llama_plan(plan, {"data": 2, "model": 2}, SPLIT | {"input_layernorm": 0, "q_proj": 0})
    text = export_plan(made, "torchtitan")
    assert f"{LAYER}.input_layernorm.weight: it is of no linear layer or embedding; it is whole here." in text
    assert "input_layernorm" not in text.partition("parallelize_module(")[2]
    assert "FSDP splits the first dim of each" in text


@pytest.mark.parametrize("form", ["transformers", "torchtitan"])
def test_what_no_module_splits_is_refused(plan: Plan, form: str) -> None:
    split = llama_plan(plan, {"model": RANKS}, SPLIT)
    with pytest.raises(UserError, match="does not say how modules use their parameters"):
        export_plan(dataclasses.replace(split, uses=()), form, force=True)
    whole = dataclasses.replace(split, arguments={n: Spec.replicated(len(split.shapes[n])) for n in split.arguments})
    with pytest.raises(UserError, match="nothing would be split"):
        export_plan(whole, form, force=True)


FILE = """
import torch
from transformers.pytorch_utils import Conv1D

model = torch.nn.Sequential(Conv1D(256, 64), torch.nn.GELU(), Conv1D(64, 256))
inputs = torch.zeros(1, 8, 64)


def loss(output):
    return output.square().mean()
"""


def test_a_plan_for_a_form_that_cannot_be_exported_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plan one sequence on four devices: no batch to split, and no linear layer."""
    (tmp_path / "net.py").write_text(FILE)
    options = ["--train", "--topology", "h100:4", "--mesh", "model=4", "--for", "torchtitan"]
    assert main(["plan", str(tmp_path / "net.py"), *options, "--out", str(tmp_path / "plan.json")]) == 3
    said = "the plan found for torchtitan cannot be exported: in the torchtitan form nothing would be split"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "plan.json").exists()


def test_fsdp_without_tensor_parallelism_splits_no_module(plan: Plan) -> None:
    made = llama_plan(plan, {"data": 8}, {})
    with pytest.raises(UserError, match="nothing would be split"):
        export_plan(made, "transformers", force=True)
    text = export_plan(made, "torchtitan", force=True)
    assert "MESH = {'fsdp': 8}" in text and "fully_shard(module" in text and "parallelize_module" not in text


@pytest.mark.parametrize("form", ["transformers", "torchtitan", "fsdp2", "accelerate"])
def test_an_axis_that_splits_one_sequence_is_none_of_the_batch(plan: Plan, form: str) -> None:
    """Refuse it: each process of FSDP would compute its part of the sequence as if it were a sequence."""
    made = llama_plan(plan, {"data": 2, "model": 2}, SPLIT)
    one = {name: (1, 8) if name.startswith("batch") else shape for name, shape in made.shapes.items()}
    arguments = {**made.arguments, "batch.input_ids": Spec(((), ("data",)))}
    sequence = dataclasses.replace(made, arguments=arguments, shapes=one, axis_roles={})
    with pytest.raises(FormError, match="along data would all do the same|the plan splits no batch"):
        export_plan(sequence, form, force=True)


@pytest.mark.parametrize("form", ["transformers", "torchtitan"])
def test_a_hostile_name_stays_a_string(plan: Plan, form: str) -> None:
    made = llama_plan(plan, {"model": RANKS}, SPLIT)
    old, new = "lm_head.weight", "a'b\"\nimport os\\{}.weight"
    (use,) = (use for use in made.uses if use.parameter == old)

    def renamed(named: dict) -> dict:
        return {new if name == old else name: value for name, value in named.items()}

    hostile = dataclasses.replace(
        made,
        arguments=renamed(made.arguments),
        shapes=renamed(made.shapes),
        dtypes=renamed(made.dtypes),
        roles=renamed(made.roles),
        uses=(*(each for each in made.uses if each is not use), dataclasses.replace(use, parameter=new)),
    )
    code = ast.parse(export_plan(hostile, form))
    assert new.removesuffix(".weight") in {node.value for node in ast.walk(code) if isinstance(node, ast.Constant)}
    assert [type(each) for each in code.body] == [type(each) for each in ast.parse(export_plan(made, form)).body]
