"""Low-rank adapters of frozen weights, compared with PEFT in eager torch, and frozen weights in 8 and 4 bits."""

import warnings
from typing import Any

import jax
import numpy as np
import peft
import pytest
import torch
from transformers.pytorch_utils import Conv1D

import autoshard
from autoshard.errors import UserError
from autoshard.program import Role, open_source, parse_lora
from autoshard.program.config_files import read_config
from autoshard.program.jax import optimizers
from autoshard.program.torch.torch_function import TorchFunction
from autoshard.program.torch.torch_module import from_torch
from autoshard.program.torch_ops.low_rank_layers import QuantisedLinear, dequantised, quantised
from tests.program.hf_reference import STEP, close, random_batch, real_model


MESH = {"data": 4, "model": 2}


def with_peft(model: Any, targets: list[str]) -> Any:
    """Return `model` with PEFT's adapters of rank 4, whose values are all random."""
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=targets, init_lora_weights=False, lora_dropout=0.1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out")  # PEFT sets it for each layer
        return peft.get_peft_model(model, config).eval().get_base_model()


@pytest.mark.parametrize(
    ("config", "targets"),
    [
        pytest.param("llama-tiny", ["q_proj", "v_proj"], marks=pytest.mark.full),
        ("gpt2-tiny", ["c_attn", "mlp.c_proj"]),
        pytest.param("mixtral-tiny", ["self_attn.q_proj", "o_proj"], marks=pytest.mark.full),
        pytest.param("bert-tiny", ["query", "attention.output.dense"], marks=pytest.mark.full),
    ],
)
def test_a_planned_step_equals_pefts_in_eager_torch(
    config: str, targets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "LEARNING_RATE", STEP)
    _, fields = read_config(config)
    model = with_peft(
        real_model(fields, **({"experts_implementation": "eager"} if "mixtral" in config else {})), targets
    )
    function = TorchFunction(model, frozen_apart=True)
    params, buffers = function.values(), function.buffer_values()
    options: dict[str, Any] = {"experts": "slots:all"} if "mixtral" in config else {}
    lora = f"r=4,alpha=12,targets={'/'.join(targets)}"
    program = open_source(f"hf:{config}", train=True, dtype="fp32", optimizer="sgd", lora=lora, **options)
    assert program.args[0].keys() == params.keys()
    assert program.args[3].keys() == buffers.keys()
    batch = random_batch(program, 2, labels=fields["vocab_size"])
    inputs = {name: torch.tensor(value).long() for name, value in batch.items()}
    labels = inputs.pop("labels")
    cached = {} if "bert" in config else {"use_cache": False}
    loss = torch.nn.functional.cross_entropy(model(**inputs, **cached).logits.flatten(0, -2), labels.flatten())
    loss.backward()
    for parameter in model.parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            parameter.data = parameter.grad
    grads = function.values()

    plan = autoshard.plan(program, topology="cpu:8", mesh=MESH)
    after, _, value = plan.jit(program.fn)(params, program.make_args(0)[1], batch, buffers)
    close(value, loss.detach().numpy())
    for name in params:
        close(after[name], params[name] - STEP * grads[name])


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 128), Conv1D(32, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(torch.nn.Module):
    """Blocks with layers of both kinds, a head, and attention that computes its own projections."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.attention = torch.nn.MultiheadAttention(32, 2, batch_first=True)
        self.head = torch.nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.attention(x, x, x)[0])


X = torch.randn(8, 6, 32, generator=torch.Generator().manual_seed(1))


def adapted(lora: str, **options: Any) -> Any:
    return from_torch(Net(), (X,), train=True, lora=lora, optimizer="sgd", **options)


def test_a_torch_module_is_copied_and_trained_as_by_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "LEARNING_RATE", STEP)
    module = Net()
    program = from_torch(module, (X,), train=True, lora="r=4,alpha=12,targets=up/down", optimizer="sgd")
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert isinstance(module.blocks[0].up, torch.nn.Linear)
    theirs = with_peft(Net(), ["up", "down"])
    function = TorchFunction(theirs, frozen_apart=True)
    made = program.make_args(0)
    start = function.values()
    assert made[0].keys() == start.keys()
    for name, value in made[3].items():
        np.testing.assert_array_equal(value, function.buffer_values()[name])
    loss = theirs(X).square().mean()
    loss.backward()
    for parameter in theirs.parameters():
        if parameter.grad is not None:
            parameter.data = parameter.grad
    plan = autoshard.plan(program, topology="cpu:8", mesh=MESH)
    after, _, value = plan.jit(program.fn)(start, made[1], {"x": X.numpy()}, made[3])
    close(value, loss.detach().numpy())
    for name, gradient in function.values().items():
        close(after[name], start[name] - STEP * gradient)


def test_all_linear_layers_but_heads_have_adapters_by_default() -> None:
    def sides(program: Any) -> set[str]:
        names = {a.name for a in program.arguments if a.role is Role.PARAMETER}
        return {name.rpartition(".lora_")[0].removeprefix("model.layers.*.") for name in names}

    assert sides(adapted("4")) == {"blocks.*.up", "blocks.*.down", "head"}
    assert sides(open_source("hf:gpt2-tiny", train=True, lora="4", batch=2, seq=8)) == {
        f"transformer.h.*.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert "lm_head" not in sides(open_source("hf:llama-tiny", train=True, lora="4", batch=2, seq=8))


def test_the_update_is_zero_at_first_and_the_same_each_time() -> None:
    first, second = (adapted("r=4").make_args(0)[0] for _ in range(2))
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])
        assert np.any(value) == ("lora_A" in name)


@pytest.mark.parametrize("form", ["int8", "int4", "nf4"])
def test_a_stored_weight_is_near_the_weight(form: str) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    weight[3] = 0.0
    codes, absmax = quantised(weight, form)
    assert codes.dtype == torch.int8
    bits = (8 * codes.numel() + 32 * absmax.numel()) / weight.numel()
    assert bits == pytest.approx({"int8": 8 + 32 / 256, "int4": 4.5, "nf4": 4.5}[form])
    error = (dequantised(codes, absmax, form, torch.float32) - weight).abs()
    assert not error[3].any()
    largest = {"int8": 0.5 / 127, "int4": 0.5 / 7, "nf4": 0.5 * (1 - 0.6961928)}[form]
    blocks = error.reshape(64, absmax.shape[1], -1).amax(-1)
    assert torch.all(blocks <= largest * 1.001 * absmax)


def test_codes_of_nf4_are_the_nearest_values() -> None:
    values = dequantised(*quantised(torch.linspace(-1, 1, 1002).reshape(2, 501), "nf4"), "nf4", torch.float32)
    known = torch.unique(values)
    assert len(known) == 16
    assert {0.0, 1.0, -1.0} < set(known.tolist())
    given = torch.linspace(-1, 1, 1002)
    nearest = known[(given[:, None] - known).abs().argmin(1)].reshape(2, 501)
    # The second row has its own maximum, 1; the first has -1.
    assert (values - nearest).abs().max() < 0.1
    assert (values == nearest).float().mean() > 0.99


@pytest.mark.parametrize("form", [*(pytest.param(form, marks=pytest.mark.full) for form in ("int8", "int4")), "nf4"])
def test_a_step_on_a_stored_base_equals_eager_torch(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizers, "LEARNING_RATE", STEP)
    program = adapted(f"r=4,targets=up/down,base={form}")
    twin = program.eager
    assert twin is not None
    module = twin.host_module(0)
    assert isinstance(module.head, QuantisedLinear)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    theirs, ours = (run(module, {"x": X.numpy()}) for run in (twin.run, twin.run_traced))
    close(ours[0], theirs[0])
    assert ours[1].keys() == theirs[1].keys() > {"blocks.0.up.lora_A.default.weight"}
    for name, gradient in theirs[1].items():
        close(ours[1][name], gradient, 2e-5)
    params, state, batch, buffers = program.make_args(0)
    plan = autoshard.plan(program, topology="cpu:8", mesh=MESH)
    wanted = jax.jit(program.fn)(params, state, batch, buffers)
    for mine, other in zip(
        jax.tree.leaves(plan.jit(program.fn)(params, state, batch, buffers)), jax.tree.leaves(wanted), strict=True
    ):
        close(mine, other, 2e-5)


def test_a_stored_base_is_dequantised_again_in_the_backward_pass() -> None:
    program = open_source("hf:llama-tiny", train=True, lora="r=4,base=nf4", batch=2, seq=8)
    scans = [each for each in jax.make_jaxpr(program.fn)(*program.args).eqns if each.primitive.name == "scan"]
    stored = {a.shape for a in program.arguments if a.role is Role.FROZEN}
    weights = {(shape[0], 2 * shape[1], shape[2]) for shape in stored if len(shape) == 3}
    assert len(scans) == 2
    # The scan of the forward pass stacks neither codes nor weights for the backward pass.
    assert not {each.aval.shape for each in scans[0].outvars} & (weights | {s for s in stored if len(s) == 3})
    absmax = next(a for a in program.arguments if a.name.endswith("q_proj.base_layer.weight_absmax"))
    assert str(absmax.dtype) == "float32"


def test_memory_and_flops_know_what_is_frozen() -> None:
    options: dict[str, Any] = {"train": True, "batch": 8, "seq": 64}
    lora, all_trained = (open_source("hf:llama-tiny", **options, **more) for more in ({"lora": "4"}, {}))
    plan = autoshard.plan(lora, topology="v5e:2x4", mesh={"data": 8})
    trained = {name for name, role in plan.roles.items() if role == "parameter"}
    state = {name for name, role in plan.roles.items() if role == "optimizer_state"} - {"optimizer.count"}
    assert state == {f"optimizer.{moment}.{name}" for moment in ("mu", "nu") for name in trained}
    fsdp = plan.baselines["fsdp"]
    assert plan.prediction.memory["frozen_parameters"] > plan.prediction.memory["parameters"]
    assert fsdp.memory["frozen_parameters"] < 0.25 * plan.baselines["data_parallel"].memory["frozen_parameters"]
    assert lora.model_flops and all_trained.model_flops
    # Two of three passes, and the pass of the scores; adapters add a little.
    assert 0.66 < lora.model_flops / all_trained.model_flops < 0.85
    assert open_source("hf:llama-tiny", **options, lora="r=4,base=nf4").model_flops == lora.model_flops


def test_a_frozen_weight_is_cast_to_the_compute_dtype() -> None:
    program = adapted("r=4,targets=up/down", dtype="bfloat16")
    text = str(jax.make_jaxpr(program.fn)(*program.args))
    assert "dot_general" in text
    kinds = {line.split(" = ")[0].split(":")[-1][:4] for line in text.splitlines() if " dot_general" in line}
    assert kinds == {"bf16"}


def test_commas_may_separate_targets() -> None:
    assert parse_lora("16,targets=q_proj,v_proj,alpha=8") == parse_lora("r=16,alpha=8,targets=q_proj/v_proj")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "the rank is a whole number above 0"),
        ("r=x", "--lora r=x: the rank is a whole number above 0, such as r=16"),
        ("alpha=3", "has no rank; add r=16"),
        ("r=4,rank=3", "--lora has no `rank`; its keys are r, alpha, targets and base"),
        ("r=4,alpha", "`alpha` has no value"),
        ("r=4,r=5", "has `r` twice"),
        ("r=4,alpha=-1", "alpha=-1: alpha is a number above 0"),
        ("r=4,base=fp4", "base=fp4 is not known; use int8, int4 or nf4"),
        ("r=4,targets=q//v", "targets=q//v has an empty name"),
    ],
)
def test_a_wrong_option_is_named(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_lora(text)


def test_what_cannot_have_adapters_is_named() -> None:
    with pytest.raises(UserError, match="`Net` is called `query`; it has up, down, head"):
        adapted("r=4,targets=up/query")
    with pytest.raises(UserError, match="`llama-tiny` is called `c_attn`; it has q_proj, k_proj, .*, lm_head"):
        open_source("hf:llama-tiny", train=True, lora="r=4,targets=c_attn")
    with pytest.raises(UserError, match="`Dropout` has no linear layers"):
        from_torch(torch.nn.Dropout(), (X,), train=True, lora="4")
    with pytest.raises(UserError, match="--lora is for training steps; add --train"):
        open_source("hf:llama-tiny", lora="4")
    with pytest.raises(UserError, match="--lora is for training steps; add --train"):
        from_torch(Net(), (X,), lora="4")
    with pytest.raises(UserError, match="`Net` has adapters already, which are planned as they are"):
        from_torch(with_peft(Net(), ["up"]), (X,), train=True, lora="4")
