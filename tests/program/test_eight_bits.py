"""Matmuls of 8 bits in training: values, gradients, what a step saves, and planned steps."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import autoshard
from autoshard.errors import FormError, UserError
from autoshard.exec import measure
from autoshard.exports import export_plan
from autoshard.planning import settled_options, source_choices
from autoshard.program import open_source
from autoshard.program.hf.hf_program import from_config
from autoshard.program.kernels.eight_bits import EightBits, dot, in_eight_bits
from autoshard.program.moe.decoder_experts import product
from autoshard.report.figures import recipe_line


DTYPES = {"int8": (torch.int8, torch.int8, 127.5), "fp8": (torch.float8_e4m3fn, torch.float8_e5m2, 448.0)}
WIDEST = {"int8": 127.5, "fp8": 57344.0}


def operands() -> tuple[Any, Any, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    x, weight = jax.random.normal(keys[0], (4, 32, 64)), jax.random.normal(keys[1], (48, 64))
    return x.at[0, 0].set(0.0), weight, jax.random.normal(keys[2], (4, 32, 48))


def rounded(x: torch.Tensor, dim: int, dtype: torch.dtype, bound: float) -> torch.Tensor:
    """Return `x` rounded to 8 bits with a scale for each row along `dim`, as float32."""
    scale = x.abs().amax(dim, keepdim=True).clamp_min(1e-30) / bound
    share = x / scale
    narrow = share.round().clamp(-127, 127) if dtype == torch.int8 else share.clamp(-bound, bound)
    return narrow.to(dtype).float() * scale


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_values_and_gradients_are_those_of_rounded_operands_in_torch(form: str) -> None:
    x, weight, gradient = operands()

    def run(x: Any, weight: Any) -> Any:
        with in_eight_bits(EightBits(form)):
            return dot(x, weight, (1,))

    value, pull = jax.vjp(run, x, weight)
    found = [np.asarray(each) for each in (value, *pull(gradient))]
    a, b, g = (torch.tensor(np.array(each)).reshape(-1, each.shape[-1]) for each in (x, weight, gradient))
    narrow, coarse, bound = DTYPES[form]
    left, right = rounded(a, 1, narrow, bound), rounded(b, 1, narrow, bound)
    # The operands' scales belong to the gradient that is rounded.
    rows = b.abs().amax(1) / bound
    own = a.abs().amax(1, keepdim=True).where(a.abs().amax(1, keepdim=True) > 0, torch.ones(1)) / bound
    wanted = [
        left @ right.T,
        rounded(g * rows, 1, coarse, WIDEST[form]) @ (right / rows[:, None]),
        rounded(g * own, 0, coarse, WIDEST[form]).T @ (left / own),
    ]
    for mine, theirs in zip(found, wanted, strict=True):
        theirs = theirs.numpy().reshape(mine.shape)
        # A share at the middle of two codes may go to either.
        assert np.mean(np.abs(mine - theirs)) < 1e-4 * np.mean(np.abs(theirs))


def test_rounding_costs_as_many_digits_as_the_form_has() -> None:
    x, weight, gradient = operands()

    def run(form: str | None) -> list[Any]:
        def result(x: Any, weight: Any) -> Any:
            with in_eight_bits(EightBits(form) if form else None):
                return dot(x, weight, (1,))

        value, pull = jax.vjp(result, x, weight)
        return [value, *pull(gradient)]

    plain = run(None)
    for form, allowed in (("int8", (0.01, 0.01, 0.01)), ("fp8", (0.04, 0.06, 0.06))):
        for mine, wanted, most in zip(run(form), plain, allowed, strict=True):
            error = float(jnp.linalg.norm(mine - wanted) / jnp.linalg.norm(wanted))
            assert most / 5 < error < most


def test_scales_by_part_of_the_batch_and_other_orders_of_dims_give_the_same_product() -> None:
    x, weight, gradient = operands()

    def run(parts: int, equation: str, weight: Any) -> list[Any]:
        def result(x: Any, weight: Any) -> Any:
            with in_eight_bits(EightBits("int8", parts)):
                return product(equation, x, weight)

        value, pull = jax.vjp(result, x, weight)
        return [value, *pull(gradient)]

    whole = run(1, "bsd,fd->bsf", weight)
    for other in (run(1, "bsd,df->bsf", weight.T), run(2, "bsd,fd->bsf", weight)):
        for mine, wanted in zip(other, whole, strict=True):
            mine = mine if mine.shape == wanted.shape else mine.T
            assert float(jnp.linalg.norm(mine - wanted) / jnp.linalg.norm(wanted)) < 0.01


def test_layers_with_one_input_round_and_save_it_once() -> None:
    x, weight, _ = operands()

    def loss(weights: Any) -> Any:
        def layer(carried: Any, own: Any) -> tuple[Any, None]:
            with in_eight_bits(EightBits("int8")):
                both = dot(carried, own[0], (1,)) * dot(carried, own[1], (1,))
                return carried + dot(both, own[2], (0,)), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0])

    weights = tuple(jnp.stack([each * 0.01] * 3) for each in (weight, -weight, weight))
    text = str(jax.make_jaxpr(jax.grad(loss))(weights))
    stacks = text.partition("scan")[0].count("i8[3,4,32,64]")
    assert stacks == 1 and text.count("preferred_element_type=float32") == 9


def test_sums_that_float16_cannot_hold_are_wider() -> None:
    x, weight = jnp.ones((2, 64), "float16"), jnp.ones((48, 64), "float16")
    with in_eight_bits(EightBits("int8")):
        np.testing.assert_allclose(dot(x, weight, (1,)), np.full((2, 48), 64.0), rtol=0.01)


def scans(jaxpr: Any) -> Iterator[Any]:
    """Yield the loops over layers in a jaxpr."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            yield equation
        for inner in equation.params.values():
            if hasattr(inner, "jaxpr"):
                yield from scans(inner.jaxpr)


def test_linear_layers_of_a_module_with_one_input_save_it_once() -> None:
    options: dict[str, Any] = {"train": True, "batch": 8, "seq": 32, "attention": "plain", "quantize": "fp8"}
    program = from_config("llama-tiny", **options)
    forward = next(scans(jax.make_jaxpr(program.fn)(*program.args).jaxpr))
    kept = [each.aval for each in forward.outvars if each.aval.dtype == jnp.float8_e4m3fn]
    # The inputs of query, key and value, of the output, of gate and up, and of the last layer.
    assert sum(each.shape[1:3] == (8, 32) for each in kept) == 4


@pytest.mark.parametrize(
    ("model", "form"), [("gpt2-tiny", "int8"), pytest.param("llama-tiny", "fp8", marks=pytest.mark.full)]
)
def test_a_planned_step_equals_the_unplanned_one_and_its_model_flops_stay(model: str, form: str) -> None:
    options: dict[str, Any] = {"train": True, "batch": 8, "seq": 32, "dtype": "float32", "attention": "plain"}
    program, plain = from_config(model, quantize=form, **options), from_config(model, **options)
    assert program.model_flops == plain.model_flops
    values = program.make_args(0)
    loss, other = (float(jax.jit(each.fn)(*values)[-1]) for each in (program, plain))
    assert loss != other and loss == pytest.approx(other, rel=1e-3)
    plan = autoshard.plan(program, topology="cpu:8", mesh="data=4,model=2")
    check = measure(program, plan, steps=1, warmup=0, check=True).check
    assert check is not None and check.passed, check


def test_layers_alone_are_rounded_and_no_sum_is_wider_than_the_computation() -> None:
    options: dict[str, Any] = {"train": True, "batch": 8, "seq": 32, "attention": "plain", "remat": "dots"}
    program = from_config("llama-tiny", quantize="int8", **options)
    text = jax.jit(program.fn).lower(*program.args).as_text()
    types = re.findall(r"dot_general.*: \(tensor<(\S+)>, tensor<(\S+)>\) -> tensor<(\S+)>", text)
    narrow = [each for each in types if each[0].endswith("xi8")]
    # Seven layers are multiplied three times; `dots` saves the results of the forward pass.
    assert len(narrow) == 21 and all(y.endswith("xi8") and out.endswith("xbf16") for _, y, out in narrow)
    assert not any("256" in "".join(each) for each in narrow) and any("256" in "".join(each) for each in types)
    assert any("82% of the weights, are multiplied in int8" in note for note in program.notes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"quantize": "int4"}, "--quantize `int4` is not known; use int8, fp8 or none."),
        ({"quantize": "int8", "train": False}, "--quantize is for training steps"),
        ({"quantize": "int8", "lora": "8"}, "leave it or --lora out"),
    ],
)
def test_what_has_no_training_in_eight_bits_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        from_config("llama-tiny", **{"train": True, "batch": 8, "seq": 32, **options})


def test_a_model_without_linear_layers_in_its_layers_is_refused() -> None:
    with pytest.raises(UserError, match="has no repeated layers with linear layers"):
        from_config("resnet-tiny", train=True, batch=8, quantize="int8")


@pytest.mark.parametrize(
    ("form", "topology", "refused"),
    [
        ("int8", "v4:2x2x1", True),
        ("fp8", "v5e:2x2", True),
        ("int8", "h100:8", True),
        ("int8", "v5e:2x2", False),
        ("fp8", "h100:8", False),
        ("fp8", "cpu:8", False),
    ],
)
def test_a_chip_without_the_rate_is_refused(form: str, topology: str, refused: bool) -> None:
    if refused:
        with pytest.raises(UserError, match=f"multiply {form} no faster than bfloat16 on|has no such matmuls"):
            settled_options({"quantize": form}, topology)
    else:
        assert settled_options({"quantize": form}, topology)["quantize"] == form


@pytest.mark.parametrize(
    ("topology", "forms"),
    [("v5e:2x4", ["int8"]), ("v6e:2x4", ["int8"]), ("h100:8", ["fp8"]), ("v4:2x2x1", []), ("cpu:8", [])],
)
def test_the_forms_to_choose_from_are_those_that_the_chip_multiplies_faster(topology: str, forms: list[str]) -> None:
    assert list(source_choices({"quantize": "auto", "train": True}, topology)["quantize"]) == ["none", *forms]
    with pytest.raises(UserError, match="--quantize is for training steps"):
        source_choices({"quantize": "auto"}, topology)
    for form in ("int8", "fp8"):
        if form not in forms and topology != "cpu:8":
            with pytest.raises(UserError):
                settled_options({"quantize": form}, topology)


@pytest.mark.full
def test_the_form_is_chosen_together_with_what_memory_needs(tmp_path: Path) -> None:
    """Choose 8 bits and recomputation where no plan fits with all activations."""
    file = tmp_path / "wide.json"
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "num_hidden_layers": 8}
    file.write_text(json.dumps({"model_type": "llama", "vocab_size": 1024, "max_position_embeddings": 2048} | sizes))
    options = {"train": True, "batch": 64, "seq": 2048, "quantize": "auto", "attention": "splash"}

    def chosen(**more: Any) -> dict[str, Any]:
        plan = autoshard.plan(f"hf:{file}", topology="v5e:2x4", mesh="data=8", program_options=options, **more)
        assert plan.recipe is not None and plan.prediction.fits
        return dict(plan.recipe.chosen)

    assert chosen() == {"quantize": "int8"}
    narrow = chosen(memory_limit=5 * 2**30)
    assert narrow["quantize"] == "int8" and narrow["remat"] != "none"


def test_exports_with_the_models_own_matmuls_are_refused_and_the_recipe_says_the_form() -> None:
    program = open_source("hf:gpt2-tiny", quantize="int8", train=True, batch=8, seq=32)
    plan = autoshard.plan(program, topology="cpu:8", mesh="data=8")
    assert "matmuls in int8" in recipe_line(plan)
    with pytest.raises(FormError, match="cannot say --quantize int8"):
        export_plan(plan, "dtensor", program)
