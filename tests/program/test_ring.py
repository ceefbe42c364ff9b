"""Attention around a ring: parts of the sequence on several devices add up to the whole attention, gradients too."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.exec import ensure_devices
from autoshard.program import ring_attention
from autoshard.program.kernels.ring_attention import RingCall, _Settings, ring_refusal
from autoshard.program.kernels.ring_pieces import How, ring_side


FULL = pytest.mark.full


def plain(query: Any, key: Any, value: Any, causal: bool) -> Any:
    scores = jnp.einsum("bkgsd,bktd->bkgst", query, key) * query.shape[-1] ** -0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
    return jnp.einsum("bkgst,bkte->bkgse", jax.nn.softmax(scores, -1), value)


def given(length: int, batch: int = 2, heads: int = 2, size: int = 16) -> list[jax.Array]:
    """Draw queries, keys, values and weights of the result."""
    rng = np.random.default_rng(0)
    shapes = ((batch, heads, 2, length, size), (batch, heads, length, size), (batch, heads, length, 8))
    return [jnp.array(rng.normal(size=each), jnp.float32) for each in (*shapes, (*shapes[0][:4], 8))]


def with_gradients(attend: Any, values: list[jax.Array]) -> list[np.ndarray]:
    def loss(query: Any, key: Any, value: Any) -> tuple[Any, Any]:
        out = attend(query, key, value)
        return (out * values[3]).sum(), out

    (_, out), found = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*values[:3])
    return [np.asarray(each) for each in (out, *found)]


def on_devices(settings: _Settings, values: list[jax.Array], mesh: Mesh, axes: tuple[str, ...]) -> list[np.ndarray]:
    """Return results and gradients of the calls on shards, with the sequence split over `axes`."""
    query, key, value, weights = values
    queries, keys = PartitionSpec(None, None, None, axes, None), PartitionSpec(None, None, axes, None)
    rows = PartitionSpec(None, None, None, axes)
    shapes = tuple(each.shape for each in values[:3])

    def run(back: bool, into: tuple[Any, ...], out: tuple[Any, ...], *args: Any) -> Any:
        call = RingCall(settings, back, shapes, "float32")
        fn, into, out = call.on_shards(mesh, into, out)  # type: ignore[assignment]
        return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=into, out_specs=out, check_vma=False))(*args)

    scale = query.shape[-1] ** -0.5
    sides = (queries, keys, keys)
    out, total = run(False, sides, (queries, rows), query * scale, key, value)
    found = run(True, (*sides, queries, rows, queries), sides, query * scale, key, value, out, total, weights)
    return [np.asarray(each) for each in (out, found[0] * scale, *found[1:])]


def close(found: list[np.ndarray], wanted: list[np.ndarray], tolerance: float = 1e-5) -> None:
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * float(np.abs(want).max()))


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    ensure_devices(8)
    return Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("a", "b"))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("axes", "causal"),
    [
        ((), True),
        (("a", "b"), True),
        (("b",), False),
        *(
            pytest.param(*case, marks=FULL)
            for case in [((), False), (("a",), True), (("a",), False), (("b",), True), (("a", "b"), False)]
        ),
    ],
)
def test_parts_of_the_sequence_add_up(mesh: Mesh, axes: tuple[str, ...], causal: bool) -> None:
    values = given(48)
    wanted = with_gradients(functools.partial(plain, causal=causal), values)
    close(on_devices(_Settings(causal, How(False)), values, mesh, axes), wanted)


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=FULL)])
def test_the_kernel_computes_the_pieces(mesh: Mesh, causal: bool) -> None:
    values = given(512, batch=1, heads=1, size=32)
    wanted = with_gradients(functools.partial(plain, causal=causal), values)
    close(on_devices(_Settings(causal, How(True)), values, mesh, ("a",)), wanted)


def test_without_devices_it_is_attention_by_blocks() -> None:
    values = given(24)
    wanted = with_gradients(functools.partial(plain, causal=True), values)
    close(with_gradients(functools.partial(ring_attention, causal=True), values), wanted)


def test_jax_itself_splits_the_call(mesh: Mesh) -> None:
    values = given(48)
    wanted = with_gradients(functools.partial(plain, causal=True), values)
    specs = [PartitionSpec("a", None, None, "b"), *[PartitionSpec("a", None, "b")] * 2]
    placed = [jax.device_put(v, NamedSharding(mesh, s)) for v, s in zip(values[:3], specs, strict=True)]
    run = jax.jit(functools.partial(ring_attention, causal=True))
    assert "collective-permute" in str(run.lower(*placed).compile().as_text())
    close([np.asarray(run(*placed))], wanted[:1])


def test_every_device_of_a_causal_ring_has_the_same_work(mesh: Mesh) -> None:
    """Assign the halves i and 2n - 1 - i of the sequence to device i."""
    settings = _Settings(True, How(False))
    call = RingCall(settings, False, tuple(each.shape for each in given(48)[:3]), "float32")
    spec = PartitionSpec(None, None, None, ("a", "b"), None)
    keys = PartitionSpec(None, None, ("a", "b"), None)
    fn, _, _ = call.on_shards(mesh, (spec, keys, keys), (spec, PartitionSpec(None, None, None, ("a", "b"))))
    moved = jax.shard_map(
        lambda x: fn.keywords["ring"].zigzag(x, 0), mesh=mesh, in_specs=PartitionSpec(("a", "b")),
        out_specs=PartitionSpec(("a", "b")), check_vma=False,
    )(jnp.arange(16))  # fmt: skip
    assert np.asarray(moved).tolist() == [part for i in range(8) for part in (i, 15 - i)]


def test_what_goes_around_no_ring() -> None:
    assert ring_refusal((1, 2, 8, 4), (1, 2, 8, 4), window=False, softcap=False) == ""
    assert "do not share one sequence" in ring_refusal((1, 2, 8, 4), (1, 2, 16, 4), window=False, softcap=False)
    assert "window" in ring_refusal((1, 2, 8, 4), (1, 2, 8, 4), window=True, softcap=False)
    assert "capped" in ring_refusal((1, 2, 8, 4), (1, 2, 8, 4), window=False, softcap=True)


def test_blocks_of_the_kernel_divide_both_sides() -> None:
    assert [ring_side(*lengths) for lengths in ((4096,), (1024, 512), (384, 256))] == [1024, 512, 128]


def test_the_rule_keeps_together_what_a_kernel_takes() -> None:
    shapes = ((1, 2, 4, 4096, 128), (1, 2, 4096, 128), (1, 2, 4096, 64))
    sizes, kinds, operands, _ = RingCall(_Settings(True, How(True)), True, shapes, "bfloat16").rule
    assert sizes == (1, 2, 4, 16, 128, 64, 256)
    assert kinds[2] == "need_replication", "gradients of keys are sums over the heads that share them"
    assert operands[0][3] == operands[1][2] == (3, 6)
