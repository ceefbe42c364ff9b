"""The loss of a head by chunks of tokens and classes, against the loss of all logits at once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.errors import UserError
from autoshard.exec import measure
from autoshard.program import chunked_cross_entropy, parse_loss_chunks
from autoshard.program.hf.hf_program import from_config
from autoshard.program.jax.chunked_loss import LossChunks


def case(dtype: str = "float32") -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (2, 12, 8), dtype)
    head, bias = jax.random.normal(keys[1], (24, 8)), jax.random.normal(keys[2], (24,))
    return hidden, head, bias, jax.random.randint(keys[3], (2, 12), 0, 24)


def of_all_logits(hidden: Any, head: Any, bias: Any, labels: Any) -> Any:
    logits = jnp.einsum("bsd,vd->bsv", hidden, head.astype(hidden.dtype)).astype(jnp.float32) + bias
    return 3 * -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


@pytest.mark.few(2)
@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 1), (4, 1), (1, 6), (3, 8)])
@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 1e-6), ("bfloat16", 1e-2)])
def test_loss_and_gradients_are_those_of_all_logits(tokens: int, vocabulary: int, dtype: str, allowed: float) -> None:
    *given, labels = case(dtype)

    def by_chunks(hidden: Any, head: Any, bias: Any) -> Any:
        return 3 * chunked_cross_entropy(hidden, head, labels, tokens=tokens, vocabulary=vocabulary, bias=bias)

    value, gradients = jax.value_and_grad(by_chunks, (0, 1, 2))(*given)
    wanted, others = jax.value_and_grad(of_all_logits, (0, 1, 2))(*given, labels)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for mine, other in zip(gradients, others, strict=True):
        assert mine.dtype == other.dtype
        scale = float(abs(other).max())
        np.testing.assert_allclose(mine.astype("float32"), other.astype("float32"), atol=allowed * scale)


def test_no_value_of_all_logits_is_left() -> None:
    *given, labels = case()
    step = jax.grad(lambda *given: chunked_cross_entropy(*given[:2], labels, vocabulary=6, bias=given[2]), (0, 1, 2))
    text = jax.jit(step).lower(*given).as_text()
    assert "2x12x4xf32" in text and "2x12x24x" not in text


def test_chunks_that_do_not_divide_are_refused() -> None:
    hidden, head, bias, labels = case()
    with pytest.raises(UserError, match="24 classes do not divide into 5 chunks"):
        chunked_cross_entropy(hidden, head, labels, vocabulary=5, bias=bias)
    with pytest.raises(UserError, match="12 tokens do not divide into 7 chunks"):
        chunked_cross_entropy(hidden, head, labels, tokens=7)


def test_chunks_are_read_from_text() -> None:
    assert parse_loss_chunks("8") == LossChunks(vocabulary=8)
    assert parse_loss_chunks("tokens=4,vocabulary=2") == LossChunks(4, 2)
    assert parse_loss_chunks(None) is parse_loss_chunks("1") is None
    for wrong in ("0", "rows=2", "tokens=2,tokens=4", "vocabulary=-1", ""):
        with pytest.raises(UserError, match="--loss-chunks"):
            parse_loss_chunks(wrong)


def test_a_step_with_chunks_equals_the_unplanned_one_and_its_model_flops_stay() -> None:
    options = {"train": True, "batch": 8, "seq": 32, "dtype": "float32"}
    program = from_config("llama-tiny", loss_chunks="tokens=2,vocabulary=4", **options)
    whole = from_config("llama-tiny", **options)
    assert program.model_flops == pytest.approx(whole.model_flops)
    values = program.make_args(0)
    loss, other = (float(jax.jit(each.fn)(*values)[-1]) for each in (program, whole))
    assert loss == pytest.approx(other, rel=1e-6)
    plan = autoshard.plan(program, topology="cpu:8", mesh="data=4,model=2")
    check = measure(program, plan, steps=1, warmup=0, check=True).check
    assert check is not None and check.passed, check


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        ("gemma2-tiny", {"seq": 32}, "are not those of its head alone"),  # its logits are capped by tanh
        ("vit-tiny", {}, "has no linear output head of tokens"),
        ("llama-tiny", {"seq": 30, "loss_chunks": "tokens=4"}, "30 tokens do not divide into 4 chunks"),
    ],
)
def test_a_model_whose_loss_has_no_chunks_is_refused(model: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        from_config(model, train=True, batch=8, **({"loss_chunks": "4"} | options))


def test_chunks_are_for_training() -> None:
    with pytest.raises(UserError, match="--loss-chunks is for training steps"):
        from_config("llama-tiny", batch=8, seq=32, loss_chunks="4")
