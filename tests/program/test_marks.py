"""Policies by value: the values of layers that are saved, recomputed and offloaded, and wrong names."""

import functools
import re

import jax
import numpy as np
import pytest
import torch
from hf_reference import close
from torch import nn
from torch_modules import Chain

from autoshard.errors import UserError
from autoshard.graph import analyse, read_graph
from autoshard.program import Program, from_torch, open_source
from autoshard.program.remat_marks import chosen_name, short_names
from autoshard.program.remat_policy import Policy, read_policy


AGAIN = "rematted_computation"


@functools.cache
def llama(remat: str, **options) -> Program:
    return open_source("hf:llama-tiny", train=True, batch=4, seq=128, remat=remat, **options)


def again(program: Program) -> list[str]:
    """Return the kinds of the heavy ops that the backward pass recomputes."""
    graph = read_graph(program.module)
    return sorted(op.kind for op in graph.ops if AGAIN in op.name and op.kind in ("dot_general", "custom_call"))


def stacks(program: Program) -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes of each layer's saved values, on the device and on the host."""
    graph = read_graph(program.module)
    away = analyse(graph).hosted
    found: dict[str, list[tuple[int, ...]]] = {"device": [], "host": []}
    for op in graph.ops:
        if op.kind == "dynamic_update_slice" and op.loop >= 0 and "transpose" not in op.name:
            found["host" if op.results[0] in away else "device"].append(graph.tensors[op.results[0]].shape)
    return {place: sorted(shapes) for place, shapes in found.items()}


def test_values_are_found_by_the_modules_that_made_them() -> None:
    values = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "context", "self_attn.o_proj")
    mlp = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert llama("full").savable == ("input", *values, *mlp)
    small = {"train": True, "batch": 4, "seq": 16, "remat": "full"}
    gpt2 = open_source("hf:gpt2-tiny", **small)
    assert gpt2.savable == ("input", "attn.c_attn", "context", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert {"experts.gate_up_proj", "experts.down_proj"} < set(open_source("hf:mixtral-tiny", **small).savable)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0), 3, enable_nested_tensor=False)
    savable = from_torch(encoder, torch.randn(5, 2, 16), train=True, remat="full").savable
    assert set(savable) == {"input", "in_proj", "context", "out_proj", "linear1", "linear2"}


HIDDEN, QUERY, KEYS, INNER = (4, 4, 128, 64), (4, 4, 128, 64), (4, 4, 128, 32), (4, 4, 128, 128)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("remat", "computed", "device", "host"),
    [
        ("full", 8, [HIDDEN], []),
        ("full,keep=q_proj/self_attn.k_proj", 6, [HIDDEN, QUERY, KEYS], []),
        ("full,offload=input", 8, [], [HIDDEN]),
        ("full,keep=up_proj,offload=gate_proj/input", 6, [INNER], [INNER, HIDDEN]),
        ("dots,offload=q_proj", 2, [HIDDEN, KEYS, KEYS, HIDDEN, INNER, INNER], [QUERY]),
    ],
)
def test_a_policy_says_where_each_value_is(remat: str, computed: int, device: list, host: list) -> None:
    program = llama(remat)
    assert len(again(program)) == computed
    assert stacks(program) == {"device": sorted(device), "host": sorted(host)}


@pytest.mark.few(1)
@pytest.mark.parametrize("kernel", ["splash", "cudnn"])
def test_a_saved_context_spares_the_attention_kernel(kernel: str) -> None:
    assert again(llama("full", attention=kernel)).count("custom_call") == 1
    kept = llama("full,keep=context", attention=kernel)
    assert again(kept).count("custom_call") == 0
    assert stacks(kept)["device"] == sorted([HIDDEN, (4, 4, 4, 2, 128, 8), (4, 4, 4, 2, 128)])
    away = llama("full,offload=context", attention=kernel)
    assert stacks(away)["host"] == sorted([(4, 4, 4, 2, 128, 8), (4, 4, 4, 2, 128)])


def test_the_first_layers_have_a_policy_of_their_own() -> None:
    program = llama("full,offload=input:3+full,keep=q_proj")
    assert stacks(program) == {"device": [], "host": [(3, *HIDDEN[1:])]}
    assert len(again(program)) == 15, "one layer by itself needs no loop"


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("remat", "scan"),
    [
        ("full,offload=fc/input", True),
        ("full,keep=fc:2+none", True),
        ("full,keep=fc", False),
        *(pytest.param(remat, True, marks=pytest.mark.full) for remat in ("full,keep=fc", "dots,offload=fc")),
        *(
            pytest.param(remat, False, marks=pytest.mark.full)
            for remat in ("full,offload=fc/input", "dots,offload=fc", "full,keep=fc:2+none")
        ),
    ],
)
def test_every_policy_computes_the_same_step(remat: str, scan: bool) -> None:
    torch.manual_seed(0)
    module = Chain(4).eval()
    inputs = torch.randn(3, 8), torch.randn(8)

    def step(remat: str) -> tuple[Program, list]:
        program = from_torch(module, inputs, train=True, optimizer="sgd", remat=remat, scan=scan)
        return program, jax.tree.leaves(jax.jit(program.fn)(*program.make_args(0)))

    plain, wanted = step("full:2+none" if ":" in remat else "none")
    program, found = step(remat)
    assert [a.name for a in program.arguments] == [a.name for a in plain.arguments]
    assert len(wanted) == len(found)
    for a, b in zip(wanted, found, strict=True):
        close(b, np.asarray(a))


def test_values_that_no_policy_names_are_left_as_they_are() -> None:
    for base in ("full", "dots"):
        text = str(jax.make_jaxpr((program := llama(base)).fn)(*program.args))
        assert "checkpoint[" in text or "remat2[" in text
        assert " name[" not in text
    named = llama("full,keep=q_proj")
    assert str(jax.make_jaxpr(named.fn)(*named.args)).count(" name[") >= 1


def test_names_are_the_shortest_ends_that_mean_one_value() -> None:
    paths = ["input", "layer.0.SelfAttention.q", "layer.1.EncDecAttention.q", "layer.2.DenseReluDense.wi"]
    assert short_names(paths) == dict(zip(paths, ["input", "SelfAttention.q", "EncDecAttention.q", "wi"], strict=True))
    assert chosen_name("self_attn.q_proj", ["q_proj", "self_attn.q_proj"]) == "self_attn.q_proj"
    assert chosen_name("self_attn.q_proj", ["_proj", "proj"]) is None


def test_policies_are_read_and_written() -> None:
    policy = read_policy("full, offload=input ,keep = a/b")
    assert policy == Policy("full", ("a", "b"), ("input",)) and str(policy) == "full,keep=a/b,offload=input"


@pytest.mark.parametrize(
    ("remat", "text"),
    [
        ("full,keep=q_proj/wq", "names `wq`, which is no value of `llama-tiny`: its layers have context, down_proj, "),
        (
            "none,offload=input",
            "`none` recomputes nothing, so every value stays on the device; write",
        ),
        ("full,keep=input,offload=input", "names `input` twice; a value stays on the device or goes to the host, once"),
        ("full,keep=", "does not exist; use `none`, `dots` or `full`, with values as in `full,keep="),
        ("full,hold=input", "does not exist"),
        ("full,keep=input,keep=context", "does not exist"),
        ("full,keep=input:0+none", "does not exist"),
    ],
)
def test_a_policy_that_cannot_be_says_what_can(remat: str, text: str) -> None:
    with pytest.raises(UserError, match=re.escape(text)):
        llama(remat)
