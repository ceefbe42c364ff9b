"""Plans of mixtures of experts, of GPT-2 and of models with norms between split layers, as transformers' `tp_plan`."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

import autoshard
from autoshard import UserError
from autoshard.exports import export_plan
from autoshard.planning import ParameterUse, Plan, Spec
from autoshard.program import from_torch
from tests import forked


RANKS = 2
LAYER = "model.layers.*"
ATTENTION = {f"{LAYER}.self_attn.{name}_proj.weight": "None,model,None" for name in "qkv"} | {
    f"{LAYER}.self_attn.o_proj.weight": "None,None,model"
}
BLOCK = "transformer.h.*"
WIDTHS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDTHS |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 32, "use_cache": False}
MIXTRAL = ("Mixtral", WIDTHS | {"num_local_experts": 4})
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "mixtral by experts": (
        *MIXTRAL,
        {f"{LAYER}.mlp.experts.gate_up_proj": "None,model,None,None", f"{LAYER}.mlp.gate.weight": "None,model,None"}
        | ATTENTION,
    ),
    "gpt2": (
        "GPT2",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32, "use_cache": False},
        {
            f"{BLOCK}.attn.c_attn.weight": "None,None,model",
            f"{BLOCK}.attn.c_proj.weight": "None,model,None",
            f"{BLOCK}.mlp.c_fc.weight": "None,None,model",
            f"{BLOCK}.mlp.c_fc.bias": "None,model",
            f"{BLOCK}.mlp.c_proj.weight": "None,model,None",
            "transformer.wte.weight": "model,None",
        },
    ),
    "mixtral by width": (*MIXTRAL, {f"{LAYER}.mlp.experts.down_proj": "None,None,None,model"}),
    "qwen3 moe": (
        "Qwen3Moe",
        WIDTHS | EXPERTS,
        {f"{LAYER}.mlp.experts.gate_up_proj": "None,None,model,None"} | ATTENTION,
    ),
    "qwen3 moe, layers differ": (
        "Qwen3Moe",
        WIDTHS | EXPERTS | {"mlp_only_layers": [0]},
        {"model.layers.1.mlp.experts.down_proj": "model,None,None", "model.layers.0.mlp.down_proj.weight": "None,model"}
        | {f"model.layers.{n}.self_attn.q_proj.weight": "model,None" for n in range(2)},
    ),
    "qwen3, tied": (
        "Qwen3",
        WIDTHS | {"head_dim": 8, "tie_word_embeddings": True},
        {"model.embed_tokens.weight": "model,None"} | ATTENTION,
    ),
}
MAKE = """
import json, os, sys
os.environ |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "USE_TORCH_XLA": "0"}  # torch_xla has another `all_to_all_single`
import torch, transformers

def model_of(family, fields):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**fields)
    for name in (f"{family}ForCausalLM", f"{family}LMHeadModel"):
        if hasattr(transformers, name):
            return getattr(transformers, name)(config).eval()
"""
RUN = (
    MAKE
    + """
import runpy
import torch.distributed as dist
import transformers.distributed

folder, port, names = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
rank = 0 if os.fork() else 1
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
               "MASTER_ADDR": "localhost", "MASTER_PORT": port}
torch.set_num_threads(1)
dist.init_process_group("gloo")

def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value

def off(found, wanted):
    return float((whole(found) - wanted).abs().max() / wanted.abs().max())

ids = torch.arange(32).reshape(4, 8) * 7 % 64
told = {}
for name, (family, fields) in names.items():
    model = model_of(family, fields)
    wanted = model(input_ids=ids, labels=ids)
    wanted.loss.backward()
    code = runpy.run_path(f"{folder}/{name}.py")
    split = type(model).from_pretrained(f"{folder}/{name}", distributed_config=code["config"]()).eval()
    with torch.no_grad():
        logits = split(input_ids=ids).logits
    loss = split(input_ids=ids, labels=ids).loss
    whole(loss).backward()
    grads = {key: each.grad for key, each in split.named_parameters()}
    assert grads.keys() == {key for key, each in model.named_parameters() if each.grad is not None}
    told[name] = {
        "logits": off(logits, wanted.logits),
        "loss": off(loss, wanted.loss),
        "gradients": max(off(grads[key], each.grad) for key, each in model.named_parameters()),
        "local": {key: list(p.to_local().shape) for key, p in split.named_parameters() if hasattr(p, "to_local")},
    }
dist.barrier()
if rank == 0:
    print(json.dumps(told))
dist.destroy_process_group()
"""
)
SAVE = MAKE + "model_of(*json.loads(sys.argv[2])).save_pretrained(sys.argv[1])\n"


def planned(name: str) -> tuple[Plan, str]:
    """Return the plan of a case and its code."""
    import torch
    import transformers

    family, fields, pins = CASES[name]
    config = getattr(transformers, f"{family}Config")(**fields)
    head = next(head for end in ("ForCausalLM", "LMHeadModel") if (head := getattr(transformers, family + end, None)))
    with torch.device("meta"):
        module, ids = head(config), torch.zeros(4, 8, dtype=torch.int64)
    program = from_torch(module, ids, train=False)
    (batch,) = (argument.name for argument in program.arguments if argument.role == "batch")
    plan = autoshard.plan(program, topology=f"cpu:{RANKS}", mesh={"model": RANKS}, pins=pins | {batch: "None,None"})
    return plan, export_plan(plan, "transformers", program, force=True)


def rules(text: str) -> dict[str, Any]:
    """Return the tables of an export, evaluated without transformers."""
    names: dict[str, Any] = {}
    exec(text[text.index("TP_PLAN = {") :].partition("\n\ndef config")[0], names)
    return names


def run(folder: Path, names: list[str]) -> dict[str, Any]:
    for name in names:
        (folder / f"{name}.py").write_text(planned(name)[1])
    saves = [["-c", SAVE, str(folder / name), json.dumps(CASES[name][:2])] for name in names]
    assert not any(each.returncode for each in forked.server().run(saves))
    port = str(20000 + os.getpid() % 20000)
    command = ["-c", RUN, str(folder), port, json.dumps({name: CASES[name][:2] for name in names})]
    done = forked.run(command, Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-5000:]
    document = json.loads(done.stdout.splitlines()[-1])
    for name, each in document.items():
        assert each["logits"] < 1e-5 and each["loss"] < 1e-5 and each["gradients"] < 1e-4, name
    return {name: each["local"] for name, each in document.items()}


@pytest.mark.heavy
def test_experts_and_conv1d_compute_what_the_model_does_alone(tmp_path: Path) -> None:
    local = run(tmp_path, ["mixtral by experts", "gpt2"])
    mixtral, gpt2 = local["mixtral by experts"], local["gpt2"]
    assert mixtral["model.layers.1.mlp.experts.gate_up_proj"] == [2, 128, 32], "half of the experts"
    assert mixtral["model.layers.0.mlp.experts.down_proj"] == [2, 32, 64], "as the other weights of its experts"
    assert mixtral["model.layers.0.self_attn.k_proj.weight"] == [8, 32]
    assert "model.layers.0.mlp.gate.weight" not in mixtral
    assert gpt2["transformer.h.0.mlp.c_fc.weight"] == [32, 64] and gpt2["transformer.h.0.mlp.c_fc.bias"] == [64]
    assert gpt2["transformer.h.1.mlp.c_proj.weight"] == [64, 32] and gpt2["transformer.h.1.attn.c_attn.weight"] == [
        32,
        48,
    ]
    assert gpt2["transformer.wte.weight"] == [32, 32]


@pytest.mark.full
def test_other_mixtures_and_norms_between_layers_compute_what_the_model_does_alone(tmp_path: Path) -> None:
    local = run(tmp_path, [name for name in CASES if name not in ("mixtral by experts", "gpt2")])
    assert local["mixtral by width"]["model.layers.0.mlp.experts.gate_up_proj"] == [4, 64, 32]
    assert local["qwen3 moe"]["model.layers.0.mlp.experts.down_proj"] == [4, 32, 16]
    assert local["qwen3 moe, layers differ"]["model.layers.1.mlp.experts.gate_up_proj"] == [2, 64, 32]
    assert local["qwen3 moe, layers differ"]["model.layers.0.mlp.down_proj.weight"] == [32, 32]
    assert local["qwen3, tied"]["model.embed_tokens.weight"] == [32, 32]
    # The class's own rules for weights that the plan leaves whole are not applied.
    assert not any("mlp" in name for name in local["qwen3, tied"])
    assert not any("self_attn" in name for name in local["mixtral by width"])


def made_of(plan: Plan, split: dict[str, tuple[tuple[int, ...], int | None]]) -> Plan:
    """Return a plan of parameters of these shapes, with one dim of each over the devices and one used as a layer."""
    shapes = {name: shape for name, (shape, _) in split.items()} | {"head.weight": (8, 16), "batch.ids": (4, 8)}
    arguments = {name: Spec(((),) * len(shape)) for name, shape in shapes.items()}
    for name, (shape, dim) in split.items():
        arguments[name] = Spec(tuple(("model",) if each == dim else () for each in range(len(shape))))
    whole = Spec(((), (), ()))
    use = ParameterUse("head.weight", Spec(((), ())), (4, 8, 16), whole, (4, 8, 8), whole)
    return dataclasses.replace(
        plan,
        topology="cpu:2",
        mesh={"model": 2},
        device_order=(0, 1),
        arguments=arguments,
        results={},
        pins=(),
        shapes=shapes,
        dtypes=dict.fromkeys(shapes, "float32"),
        roles={name: "batch" if name.startswith("batch") else "parameter" for name in shapes},
        uses=(use,),
    )


def experts(up: tuple[int, ...], down: tuple[int, ...], dims: tuple[int | None, int | None]) -> dict[str, Any]:
    names = (f"{LAYER}.mlp.experts.gate_up_proj", f"{LAYER}.mlp.experts.down_proj")
    return {name: ((2, *shape), dim) for name, shape, dim in zip(names, (up, down), dims, strict=True)}


@pytest.mark.parametrize(
    ("split", "styles"),
    [
        (experts((4, 64, 16), (4, 16, 32), (2, None)), ("packed_colwise", "rowwise")),
        (experts((4, 16, 64), (4, 32, 16), (None, 2)), ("packed_rowwise", "colwise")),  # [experts, in, out]
    ],
)
def test_experts_are_split_by_width_in_either_layout(plan: Plan, split: dict, styles: tuple[str, str]) -> None:
    plan_rules = rules(export_plan(made_of(plan, split), "transformers", force=True))["TP_PLAN"]
    assert plan_rules == dict(zip(split, styles, strict=True)) | {f"{LAYER}.mlp.experts": "moe_tp_experts"}


@pytest.mark.parametrize(
    ("split", "why"),
    [
        (experts((4, 64, 16), (4, 16, 32), (3, 3)), "neither by experts nor by their width"),
        (experts((4, 64, 16), (4, 16, 32), (1, 3)), "neither by experts nor by their width"),
        (experts((3, 64, 16), (3, 16, 32), (1, None)), "3 experts do not divide by 2 devices"),
        (experts((4, 2, 16), (4, 16, 1), (2, None)), "the width of an expert does not divide by 2 devices"),
        (experts((4, 16, 64), (4, 32, 16), (1, 1)), "no style that splits them by experts"),
        (experts((4, 16, 64), (4, 32, 16), (3, 2)) | {f"{LAYER}.mlp.experts.down_proj_bias": ((2, 4, 16), None)},
         "experts with biases have no style"),
        ({f"{LAYER}.mlp.w1": ((2, 4, 16, 32), 1)}, "none of experts that transformers has styles for"),
    ],
)  # fmt: skip
def test_experts_that_no_style_splits_are_refused(plan: Plan, split: dict, why: str) -> None:
    with pytest.raises(UserError, match=why):
        export_plan(made_of(plan, split), "transformers", force=True)


def test_biases_of_experts_go_with_them(plan: Plan) -> None:
    biased = experts((4, 16, 64), (4, 32, 16), (1, 1)) | {f"{LAYER}.mlp.experts.down_proj_bias": ((2, 4, 16), 1)}
    plan_rules = rules(export_plan(made_of(plan, biased), "transformers", force=True))["EP_PLAN"]
    assert plan_rules == dict.fromkeys(biased, "grouped_gemm") | {f"{LAYER}.mlp.experts": "ep_dispatch_experts"}


def test_a_router_with_its_columns_last_is_whole(plan: Plan) -> None:
    router = {f"{LAYER}.mlp.gate.weight": ((2, 8, 4), 2), f"{LAYER}.mlp.gate.bias": ((2, 4), 1)}
    text = export_plan(made_of(plan, experts((4, 64, 16), (4, 16, 32), (2, None)) | router), "transformers", force=True)
    assert f"{LAYER}.mlp.gate.weight: it is the router of experts" in text
    assert f"{LAYER}.mlp.gate" not in rules(text)["TP_PLAN"]


def test_layers_that_differ_are_whole_and_reported(plan: Plan) -> None:
    """Leave layers that differ whole: transformers has one style for a module of all layers."""
    split = {
        "h.0.up.weight": ((32, 8), None), "h.0.up.bias": ((32,), None),
        "h.1.up.weight": ((32, 8), 0), "h.1.up.bias": ((32,), 0),
        "h.1.mlp.up.weight": ((32, 8), 0), "h.1.mlp.up.bias": ((32,), 0),
    }  # fmt: skip
    text = export_plan(made_of(plan, split), "transformers", force=True)
    plan_rules = rules(text)
    assert plan_rules["TP_PLAN"] == {"h.*.mlp.up": "colwise_gather_output"}
    assert "h.*: layers of it differ" in text and "h.*.up" in plan_rules["WHOLE"]


def test_several_layers_in_one_give_whole_values(plan: Plan) -> None:
    """Return whole values: the module slices their columns, which one device's shards do not contain together."""
    split = {
        "attn.qkv.weight": ((24, 8), 0), "attn.qkv.bias": ((24,), 0),
        "attn.out.weight": ((16, 8), 1), "attn.out.bias": ((16,), None),
    }  # fmt: skip
    plan_rules = rules(export_plan(made_of(plan, split), "transformers", force=True))["TP_PLAN"]
    assert plan_rules == {"attn.qkv": "colwise_gather_output", "attn.out": "rowwise_split_input"}
