"""Degrees for a decoder under a GPU framework: their product is the devices, and of the fastest, the one that waits
least is first.
"""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from autoshard.cost import Topology
from autoshard.degrees import DegreeChoice, choose_degrees, degree_report, format_degrees, gpu_decoder
from autoshard.degrees.gpu_run import GpuRun
from autoshard.degrees.gpu_stage import GpuPrices
from autoshard.degrees.gpu_step import price_step
from autoshard.errors import UserError


@pytest.fixture(scope="module")
def choices() -> tuple[DegreeChoice, ...]:
    return choose_degrees(gpu_decoder("hf:llama3-8b"), "h100:8*2", "megatron-core", batch=64, seq=8192)


def test_every_plan_multiplies(choices: tuple[DegreeChoice, ...]) -> None:
    assert len({each.run for each in choices}) == len(choices) > 50
    for each in choices:
        run = each.run
        assert run.dp * run.tp * run.pp == 16 and run.batch == 64 and run.tp <= 8
        assert run.decoder.kv_heads % run.tp == 0 and run.zero in (0, 1)


def test_the_first_waits_least_of_the_fastest_that_fit(choices: tuple[DegreeChoice, ...]) -> None:
    fitting = [each for each in choices if each.fits]
    assert choices[: len(fitting)] == tuple(fitting) and len(fitting) < len(choices)
    near = [each for each in fitting if each.step.seconds <= 1.21 * min(each.step.seconds for each in fitting)]
    assert choices[0].waits == min(each.waits for each in near) < max(each.waits for each in near)
    assert list(choices[1 : len(fitting)]) == sorted(fitting[1:], key=lambda each: each.step.seconds)
    assert 0.2 < choices[0].mfu < 0.6


def test_less_memory_means_more_parallelism_or_recomputation() -> None:
    large = choose_degrees(gpu_decoder("hf:llama3-70b"), "h100:8*8", "torchtitan", batch=128, seq=8192)
    assert large[0].run.recompute == "full" or large[0].run.tp * large[0].run.pp > 1
    assert not any(each.run.zero == 3 and each.run.pp > 1 for each in large)


def test_dims_of_a_configuration() -> None:
    decoder = gpu_decoder("hf:llama3-8b")
    parameters = decoder.layers * decoder.dense_layer_params + 2 * decoder.table_params
    assert parameters == pytest.approx(8.03e9, rel=1e-3)
    assert (decoder.kv_heads, decoder.tied) == (8, False)


@pytest.mark.parametrize(
    ("program", "topology", "framework", "batch", "message"),
    [
        (
            "hf:gemma2-tiny",
            "h100:8",
            "torchtitan",
            8,
            "gemma2-tiny is of the type gemma2; degrees are chosen",
        ),
        ("hf:llama3-8b", "h100:8", "jax", 8, "degrees are chosen for torchtitan and megatron-core; found 'jax'"),
        ("hf:llama3-8b", "cpu:8", "torchtitan", 8, "cpu:8 has no GPUs"),
        (
            "hf:llama3-70b",
            "h100:2",
            "torchtitan",
            8,
            "nothing fits h100:2: the least that a plan needs is .* GiB",
        ),
        ("hf:llama3-8b", "h100:8*97", "torchtitan", 7, "no degrees multiply to the 776 GPUs of h100:8\\*97"),
    ],
)
def test_bad_input(program: str, topology: str, framework: str, batch: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose_degrees(gpu_decoder(program), topology, framework, batch, 8192)


def _config(path: Path, **fields: object) -> str:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    stated = {"model_type": "llama", **sizes, "vocab_size": 256} | fields
    path.write_text(json.dumps({key: value for key, value in stated.items() if value is not None}))
    return f"hf:{path}"


QWEN3_30B = {
    **{"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768},
    **{"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
    **{"num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936},
}


def test_experts_are_read_by_either_name(tmp_path: Path) -> None:
    saved = {"num_local_experts" if key == "num_experts" else key: value for key, value in QWEN3_30B.items()}
    (tmp_path / "saved.json").write_text(json.dumps(saved))
    assert gpu_decoder(f"hf:{tmp_path / 'saved.json'}").experts == 128


def test_dims_that_are_not_priced(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="open does not state all sizes of a llama; add those"):
        gpu_decoder(_config(tmp_path / "open.json", vocab_size=None))


def test_heads_wider_than_the_residual_stream_cost_more(tmp_path: Path) -> None:
    narrow, wide = (gpu_decoder(_config(tmp_path / f"{size}.json", head_dim=size)) for size in (16, 32))
    assert wide.attention_params == 2 * narrow.attention_params
    steps = [choose_degrees(each, "h100:2", "torchtitan", batch=4, seq=4096)[0].step for each in (narrow, wide)]
    assert steps[0].seconds < steps[1].seconds


def test_plain_fsdp_fits_with_checkpointing_by_op() -> None:
    choices = choose_degrees(gpu_decoder("hf:llama3-8b"), "h100:8", "torchtitan", batch=16, seq=8192)
    fsdp = [each for each in choices if each.run.tp * each.run.pp == 1 and each.run.zero == 3 and each.fits]
    assert [each.run.recompute for each in fsdp] == ["selective", "full", "full"]
    micro_two = {each.run.recompute: each.step for each in choices if each.run.dp == 8 and each.run.micro_batch == 2}
    none, selective, full = (micro_two[mode] for mode in ("none", "selective", "full"))
    assert none.seconds < selective.seconds < full.seconds
    assert none.peak_bytes > selective.peak_bytes > full.peak_bytes


@pytest.mark.parametrize(("devices", "measured_gib"), [(8, 82.4), (128, 67.0)])
def test_memory_of_measured_runs_with_checkpointing_by_op(devices: int, measured_gib: float) -> None:
    topology = Topology.parse("h100:8" if devices == 8 else f"h100:8*{devices // 8}")
    decoder = gpu_decoder("hf:llama3.1-8b")
    run = GpuRun(decoder, topology, "torchtitan", 8192, devices, 1, 1, 2, 1, 3, "selective")
    assert price_step(run).peak_bytes / 2**30 == pytest.approx(measured_gib, rel=0.02)


def test_experts_are_divided_over_the_gpus_of_a_stage(tmp_path: Path) -> None:
    decoder = gpu_decoder(_config(tmp_path / "qwen3.json", **QWEN3_30B))
    choices = choose_degrees(decoder, "h100:8*2", "torchtitan", batch=128, seq=4096)
    assert {each.run.ep for each in choices} == {1, 2, 4, 8, 16}
    run = next(each.run for each in choices if each.run.ep == 8 and each.run.tp == 2 and each.run.pp == 1)
    (dense, replicas), (experts, copies) = run.split_parameters(decoder.layers, 2)
    assert (replicas, copies) == (8, 2)
    router = decoder.layers * 2048 * 128
    whole = 2 * (dense - router) + router + 8 * experts
    assert whole == pytest.approx(decoder.params, rel=1e-3)
    assert format_degrees(run).startswith("dp8 tp2 pp1 ep8 ZeRO-")


def test_experts_of_one_gpu_take_the_time_of_their_matmuls(tmp_path: Path) -> None:
    """Compare a mixture whose experts are all active with a dense MLP of all their widths."""
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 2, "vocab_size": 512}
    dense = gpu_decoder(_config(tmp_path / "dense.json", **sizes, intermediate_size=4 * 8192))
    mixed = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 4, "intermediate_size": 8192}
    mixture = gpu_decoder(_config(tmp_path / "mixed.json", **sizes, **mixed))
    assert mixture.params == pytest.approx(dense.params, rel=1e-3)
    seconds = []
    for decoder in (dense, mixture):
        run = GpuRun(decoder, Topology.parse("h100:1"), "torchtitan", 8192, 1, 1, 1, 1, 1, 3, "none")
        prices = GpuPrices(run)
        seconds.append(prices.layer_forward().device - prices.elementwise_seconds(False))
    assert seconds[1] == pytest.approx(seconds[0], rel=0.1)


@pytest.mark.parametrize(("kv_heads", "most"), [(4, 4), (1, 1)])
def test_tensor_degrees_split_whole_heads_of_keys(tmp_path: Path, kv_heads: int, most: int) -> None:
    fields = {"num_attention_heads": 8, "num_key_value_heads": kv_heads, "hidden_size": 512}
    choices = choose_degrees(gpu_decoder(_config(tmp_path / "few.json", **fields)), "h100:8", "torchtitan", 8, 128)
    assert max(each.run.tp for each in choices) == most
    text = io.StringIO()
    Console(file=text, width=300).print(degree_report(choices))
    assert (
        f"tp is {most} at most: torchtitan splits whole heads of keys, of which there are {kv_heads}" in text.getvalue()
    )


def test_words(choices: tuple[DegreeChoice, ...]) -> None:
    run = choices[0].run
    assert format_degrees(run).startswith(f"dp{run.dp} tp{run.tp} pp{run.pp} ZeRO-{run.zero} micro {run.micro_batch}")
