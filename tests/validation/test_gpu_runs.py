"""Runs on GPUs with stated degrees: general properties, and cases by hand."""

import dataclasses
import json
import math
import pathlib

import pytest

from autoshard.cost import Topology
from autoshard.degrees.gpu_run import GpuRun, eager_framework, gpu_stages, gpu_topology, waiting
from autoshard.degrees.gpu_stage import GpuPrices
from autoshard.degrees.gpu_step import GpuStep, price_step
from autoshard.degrees.node_waits import waits
from autoshard.errors import UserError
from autoshard.serving import Decoder
from autoshard.validation import validate_gpu_pairs
from autoshard.validation.gpu_pairs import SHIPPED, GpuPairs, GpuProblem, PricedGpuRow
from autoshard.validation.gpu_rows import GpuRow, names_gpu_rows, read_gpu_rows
from autoshard.validation.pair_gpu_runs import gpu_place


SMALL = Decoder(16, 2048, 8192, 32, 32, 64, 131072, tied=True)
LARGE = Decoder(32, 4096, 14336, 32, 32, 128, 131072)


def run(dp: int = 8, tp: int = 1, pp: int = 1, decoder: Decoder = SMALL, **other) -> GpuRun:
    values = {"framework": "nanotron", "seq": 4096, "micro_batch": 1, "accumulation": 8, "zero": 0, "recompute": "none"}
    return GpuRun(decoder, gpu_topology("h100", dp * tp * pp), dp=dp, tp=tp, pp=pp, **values | other)


def test_a_step_has_its_parts_and_they_add_up():
    step = price_step(run(2, 2, 2))
    assert step.runs and step.seconds == pytest.approx(sum(step.parts.values()))
    assert set(step.parts) == {"microbatches", "bubble", "gradients", "optimizer"}
    assert price_step(run(8)).parts["bubble"] == 0.0


def test_matmuls_bind_a_step_from_below():
    """Bound a step from below by 6 FLOPs a parameter and token, at the best measured rate."""
    for decoder, dp, tp in ((SMALL, 8, 1), (LARGE, 1, 8)):
        each = run(dp, tp, decoder=decoder)
        parameters = decoder.layers * decoder.dense_layer_params + decoder.table_params
        least = 6.0 * parameters * each.tokens / (each.topology.num_devices * 789e12)
        assert least < price_step(each).seconds < 4.0 * least


def test_more_microbatches_hide_the_bubble():
    few, many = (price_step(run(2, 1, 4, accumulation=count)) for count in (4, 64))
    assert few.parts["bubble"] == pytest.approx(many.parts["bubble"])
    assert many.parts["bubble"] / many.seconds < 0.1 < few.parts["bubble"] / few.seconds


def test_hosts_bind_small_microbatches_under_tensor_parallelism():
    prices = GpuPrices(run(1, 8))
    layer = prices.layer_forward()
    assert layer.seconds == layer.host > layer.device
    large = GpuPrices(run(1, 8, micro_batch=16)).layer_forward()
    assert large.seconds == large.device > large.host


def test_zero_splits_what_it_says():
    peaks = [price_step(run(8, framework="fsdp", zero=zero)).peak_bytes for zero in range(4)]
    assert peaks == sorted(peaks, reverse=True)
    parameters = SMALL.layers * SMALL.dense_layer_params + SMALL.table_params
    assert peaks[0] - peaks[1] == pytest.approx(12 * parameters * 7 / 8)
    assert peaks[1] - peaks[2] == pytest.approx(4 * parameters * 7 / 8)
    assert peaks[2] - peaks[3] == pytest.approx(2 * parameters * 7 / 8)


def test_copies_of_the_state_gather_within_and_sum_between():
    """Divide the state over the GPUs of a node, or over the nodes: each pass sends other bytes over other links."""
    whole, nodes, within = (
        run(64, decoder=LARGE, framework="torchtitan", zero=3, copies=copies, inner_copies=inner)
        for copies, inner in ((1, False), (8, False), (8, True))
    )
    assert price_step(nodes).peak_bytes == price_step(within).peak_bytes > price_step(whole).peak_bytes
    # Copies between nodes leave the gathers, which are most of the bytes, within them.
    assert price_step(nodes).seconds < price_step(within).seconds
    copied = run(8, decoder=LARGE, framework="torchtitan", zero=3, copies=8)
    plain = run(8, decoder=LARGE, framework="torchtitan", zero=0)
    # FSDP sums gradients of whole parameters while the backward pass runs.
    assert price_step(copied).parts["gradients"] == 0 < price_step(plain).parts["gradients"]
    with pytest.raises(UserError, match="3 copies of the state do not divide 8 replicas of ZeRO stage 3"):
        run(8, zero=3, copies=3)


def test_recomputation_takes_time_and_saves_memory():
    plain, again = (price_step(run(micro_batch=4, recompute=how)) for how in ("none", "full"))
    assert 1.1 * plain.seconds < again.seconds < 1.34 * plain.seconds
    assert again.peak_bytes < 0.75 * plain.peak_bytes


def test_layers_that_save_matmuls_compute_all_other_ops_again():
    steps = [price_step(run(micro_batch=4, recompute=how)) for how in ("none", "matmuls", "full")]
    assert sorted(steps, key=lambda step: step.seconds) == sorted(steps, key=lambda step: -step.peak_bytes) == steps
    prices = GpuPrices(run(8))
    saved = prices.layer_forward().device - prices.layer_matmuls_saved().device
    assert saved == pytest.approx(sum(prices.matmul(m.rows, m.columns, m.contracted) for m in prices._matmuls()))


def test_tensor_parallelism_takes_as_much_longer_than_fsdp_as_measured():
    """Compare torchtitan's steps by FSDP on 8 GPUs and with 8-way tensor parallelism on 64, both compiled.

    The rows are of 500 W H100s: 2.4575 s for two sequences of a GPU, and 2.8068 s for one and a half. DTensor hides no
    collective over `tp`, so the errors differ by 5 % if the scatters of gradients are hidden.
    """
    measured = {(8, 1, 2): 2.4575, (8, 8, 12): 2.8068}
    errors = []
    for (dp, tp, micro_batch), seconds in measured.items():
        place = gpu_place(gpu_topology("h100", dp * tp), "H100 96GB HBM2e 2.4TB/s, 500 W power limit")
        decoder = Decoder(32, 4096, 14336, 32, 8, 128, 128256)
        stated = GpuRun(decoder, place, "torchtitan compiled", 8192, dp, tp, 1, micro_batch, 1, 3, "selective")
        errors.append(price_step(stated).seconds / seconds)
    assert errors[1] == pytest.approx(errors[0], rel=0.02)


def test_code_of_forms_keeps_values_whole_between_split_matmuls():
    own, styles, dtensor = (
        GpuPrices(run(4, 2, framework=name, zero=3)) for name in ("torchtitan", "styles", "dtensor")
    )
    assert styles.layer_forward().device == dtensor.layer_forward().device > own.layer_forward().device
    # Both GPUs move the 32 bytes of each element of the residual stream.
    size = 32 * 4096 * 2048 / 2 * own.figures.eager_traffic
    more = float(own.compute.memory_seconds(size)) - float(own.compute.memory_seconds(0))
    assert styles._elementwise(False) - own._elementwise(False) == pytest.approx(more)
    assert dtensor.layer_forward().host - styles.layer_forward().host == pytest.approx(46 * 7e-5)
    # Logits are gathered for the loss, in float32 or in 16 bits, and its kernels take all of them on both GPUs.
    gathered = [4096 * SMALL.vocabulary * size for size in (4, 2)]
    sent = [float(own.wires.time("all-gather", ("tp",), size)) for size in gathered]
    heads = [prices.head(False).device for prices in (dtensor, styles, own)]
    assert heads[0] - heads[1] == pytest.approx(sent[0] - sent[1]) and heads[1] > heads[2] + sent[1]
    assert GpuPrices(run(8, framework="dtensor")).head(False) == GpuPrices(run(8)).head(False)
    assert GpuPrices(run(8, framework="dtensor")).layer_forward() == GpuPrices(run(8)).layer_forward()


def test_first_stages_hold_more_microbatches():
    each = run(1, 1, 8, decoder=LARGE)
    assert [waiting(each, place) for place in range(8)] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert waiting(run(1, 1, 8, accumulation=2), 0) == 2


def test_stages_by_parameters():
    """Balance stages by parameters: a head of 131072 x 2048 counts as four layers of 67M, so there are 11 and 5."""
    two = gpu_stages(run(4, 1, 2))
    assert two is not None
    first, last = two
    assert (first.layers, first.embedding, first.head) == (11, True, False)
    assert (last.layers, last.embedding, last.head) == (5, False, True)
    assert sum(stage.layers for stage in gpu_stages(run(1, 1, 8)) or ()) == 16
    assert gpu_stages(run(1, 1, 16)) is None and gpu_stages(run(1, 1, 32)) is None
    assert not price_step(run(1, 1, 16)).runs
    equal = gpu_stages(run(1, 1, 8, framework="megatron"))
    assert equal is not None and {stage.layers for stage in equal} == {2}


def test_sums_in_buckets_wait_for_every_ring():
    """Sum as many gradients over more islands: rings have more steps and need longer, although cards send less."""
    two, sixteen = (price_step(run(8 * nodes, zero=1, accumulation=1)).parts["gradients"] for nodes in (2, 16))
    assert 2.0 * two < sixteen < 8.0 * two
    # Replicas that store all state overlap their sums with the last backward pass.
    assert price_step(run(128, zero=0, accumulation=1)).parts["gradients"] < 0.6 * sixteen


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dp": 3}, "dp 3 x tp 1 x pp 1 = 3, but h100:8 has 8 GPUs"),
        ({"zero": 4}, "ZeRO stage 4 does not exist; stages are 0, 1, 2 and 3"),
        ({"recompute": "some"}, "recomputation 'some' is not priced; known are none, selective, matmuls, full"),
        ({"stated_batch": 256}, "dp 8 x microbatch 1 x accumulation 8 = 64 sequences, but a step has 256"),
    ],
)
def test_what_does_not_multiply_is_refused(change: dict, message: str):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(run(8), **change)


def test_unknown_framework():
    with pytest.raises(UserError, match="unknown framework 'jax'; known are nanotron, megatron-deepspeed"):
        eager_framework("jax")


def test_islands_of_a_count():
    assert [gpu_topology("h100", n).name for n in (4, 8, 64, 12)] == ["h100:4", "h100:8", "h100:8*8", "h100:4*3"]
    assert gpu_topology("gb200", 288) == Topology.parse("gb200:72*4")
    assert gpu_topology("gb200", 512).name == "gb200:64*8"


def test_every_figure_has_its_source():
    path = pathlib.Path(price_step.__code__.co_filename).with_name("gpu_figures.json")
    assert all(entry["source"] for entry in json.loads(path.read_text()).values())


def test_shipped_tables_are_read_whole():
    rows = read_gpu_rows(SHIPPED["ultrascale"])
    assert len(rows) == 2180 and sum(row.run is None for row in rows) == 20
    assert sum(row.fits is True for row in rows) == 1110
    rows = read_gpu_rows(SHIPPED["vtrain"])
    assert len(rows) == 734 and all(row.run is not None for row in rows)


def test_columns_and_dicts_are_one(tmp_path: pathlib.Path):
    document = json.loads(SHIPPED["ultrascale"].read_text())
    document["rows"] = document["rows"][:40]
    (tmp_path / "columns.json").write_text(json.dumps(document))
    columns = document.pop("columns")
    document["rows"] = [dict(zip(columns, row, strict=True)) for row in document["rows"]]
    (tmp_path / "dicts.json").write_text(json.dumps(document))
    assert read_gpu_rows(tmp_path / "columns.json") == read_gpu_rows(tmp_path / "dicts.json")
    assert names_gpu_rows(str(tmp_path / "dicts.json")) and not names_gpu_rows(str(tmp_path / "none.json"))


def test_runs_on_one_node_are_priced_as_measured():
    """Compare H100 steps on one node, without fitting: 1B and 8B within 20 %, except for two whose steps thrash."""
    pairs = validate_gpu_pairs("ultrascale", only=["on 1 x 8 H100"])
    errors = sorted(abs(each.error) for each in pairs.rows if each.ran)
    assert len(errors) == 43 and errors[-3] < 0.35 and errors[len(errors) // 2] < 0.12
    (one,) = (problem for problem in pairs.problems if problem.name == "8B on 1 x 8 H100")
    assert one.regret(one.chosen) == pytest.approx(1.0)


def priced(seconds: float, measured: float | None, tp: int = 1, fits: bool = True) -> PricedGpuRow:
    row = GpuRow("t", "p", "s", f"{seconds}", run(8 // tp, tp), measured, None, measured is not None)
    return PricedGpuRow(row, GpuStep(seconds, 1e9 if fits else 1e12, True, {}))


def test_choices_and_regrets_by_hand():
    problem = GpuProblem(
        "p", (priced(1.0, 3.0, tp=8), priced(1.05, 2.0, tp=2), priced(2.0, 1.0), priced(0.5, None, 1, False))
    )
    assert problem.chosen is problem.rows[0] is problem.fastest and problem.regret(problem.chosen) == 3.0
    assert problem.least_parallel() is problem.rows[2]
    crashed = GpuProblem("p", (*problem.rows, priced(0.4, None)))
    assert crashed.regret(crashed.chosen) == math.inf
    assert GpuProblem("p", problem.rows[:1]).regret(problem.rows[0]) is None


def test_among_indistinguishable_plans_the_one_that_waits_least_is_chosen():
    def one(seconds: float, dp: int, tp: int, pp: int, **other) -> PricedGpuRow:
        row = GpuRow("t", "p", "s", f"{seconds}", run(dp, tp, pp, **other), seconds, None, True)
        return PricedGpuRow(row, GpuStep(seconds, 1e9, True, {}))

    pipeline, wide, slow = one(1.0, 4, 1, 4, accumulation=8), one(1.2, 4, 4, 1), one(1.22, 16, 1, 1)
    # 8 microbatches through 4 stages pass 11 activations in each direction. Replicas on other nodes sum and share once.
    assert [waits(each.row.run) for each in (pipeline, wide)] == [22, 2]
    assert waits(run(2, 1, 4, accumulation=8)) == 0, "one node"
    assert waits(run(1, 16, 1)) > 100, "tensor parallelism between nodes waits in every layer"
    problem = GpuProblem("p", (pipeline, wide, slow))
    assert problem.fastest is pipeline and problem.chosen is wide
    assert GpuProblem("p", (pipeline, slow)).chosen is pipeline, "22 % slower is told apart"


def test_what_failed_with_a_run_that_holds_as_much_did_not_fail_for_memory():
    def row(fits: bool, *degrees: int, **other) -> PricedGpuRow:
        stated = run(*degrees, **other)
        taken = GpuRow("t", "p", "s", "l", stated, 1.0 if fits else None, None, fits)
        return PricedGpuRow(taken, price_step(stated))

    failed = row(False, 4, 1, 2, micro_batch=1, zero=1)
    assert GpuPairs((GpuProblem("p", (failed,)),)).not_for_memory() == 0
    more = {"micro_batch": 2}, {"zero": 0}, {"accumulation": 64}
    for change in more:
        other = row(True, 2, 1, 2, **{"zero": 1} | change)
        assert GpuPairs((GpuProblem("p", (failed, other)),)).not_for_memory() == 1
        assert other.step is not None and failed.step is not None and other.step.peak_bytes >= failed.step.peak_bytes
    for less in (row(True, 8, 1, 2, zero=1), row(True, 4, 2, 2, zero=1), row(True, 4, 1, 2, zero=1, accumulation=1)):
        assert GpuPairs((GpuProblem("p", (failed, less)),)).not_for_memory() == 0


NEMO = {"framework": "nemo", "zero": 1, "accumulation": 16, "recompute": "none"}


def test_a_sequence_over_several_gpus_has_its_share_of_scores_and_sends_keys_and_values():
    whole = price_step(run(dp=1, tp=1, pp=1, seq=32768, **NEMO))
    parts = price_step(dataclasses.replace(run(dp=4, tp=1, pp=1, seq=32768, **NEMO), dp=1, cp=4))
    assert 0.25 < parts.parts["microbatches"] / whole.parts["microbatches"] < 0.35
    assert parts.peak_bytes < 0.6 * whole.peak_bytes


def test_matmuls_of_8_bits_are_faster_and_save_less():
    wide = run(dp=1, tp=1, pp=1, seq=4096, **NEMO)
    narrow = dataclasses.replace(wide, dtype="fp8")
    assert 0.5 < price_step(narrow).seconds / price_step(wide).seconds < 0.95
    assert price_step(narrow).peak_bytes < price_step(wide).peak_bytes
    titan = dataclasses.replace(wide, framework="torchtitan")
    assert price_step(dataclasses.replace(titan, dtype="fp8")).peak_bytes == price_step(titan).peak_bytes


def test_adapters_have_no_gradients_of_frozen_weights():
    full = run(dp=1, tp=1, pp=1, seq=4096, **NEMO)
    adapters = dataclasses.replace(full, adapter_rank=16)
    assert 0.6 < price_step(adapters).seconds / price_step(full).seconds < 0.9
    assert price_step(adapters).parts["optimizer"] < 0.1 * price_step(full).parts["optimizer"]


def test_sums_of_chunks_overlap_with_the_microbatches_of_other_chunks():
    chunked = run(dp=16, tp=1, pp=2, seq=4096, **NEMO, chunks=4)
    alone = dataclasses.replace(chunked, framework="megatron-core")
    gradients = [price_step(each).parts["gradients"] for each in (chunked, alone)]
    assert gradients[0] < 0.7 * gradients[1]


def test_rounds_of_mlperf_are_read(tmp_path: pathlib.Path):
    row = {
        "round": "v5.0", "system": "a", "benchmark": "gpt3", "chip": "h100", "nodes": 1, "gpus_a_node": 8, "tp": 4,
        "pp": 2, "cp": 1, "dp": 1, "virtual_stages": 2, "micro_batch": 1, "microbatches": 8, "global_batch": 8,
        "sequence": 2048, "precision": "fp8 in linear layers", "step_s_median": 1.0,
    }  # fmt: skip
    models = {
        "gpt3": "4 layers, width 1024, 8 heads of 128, MLP 4096 ungated, vocabulary 51200 padded",
        "lora": "Llama 2 70B, LoRA rank 16 on attention",
    }
    rows = [
        row,
        row | {"benchmark": "lora", "pp": 1, "dp": 2, "microbatches": 4, "virtual_stages": None},
        row | {"chip": "gb300"},
        row | {"precision": "fp8 and 4-bit"},
        row | {"dp": 2},
    ]
    file = tmp_path / "rounds.json"
    file.write_text(json.dumps({"models": models, "rows": rows}))
    first, second, *skipped = read_gpu_rows(file)
    assert first.run is not None and (first.run.decoder.mlp_width, first.run.decoder.gated) == (4096, False)
    assert (first.run.chunks, first.run.zero, first.run.dtype, first.run.framework) == (2, 1, "fp8", "nemo")
    assert second.run is not None and (second.run.adapter_rank, second.run.decoder.vocabulary) == (16, 32000)
    assert [each.skipped for each in skipped][:2] == ["no chip file for gb300", "4-bit matmuls"]
    assert "but h100:8 has 8 GPUs" in skipped[2].skipped


def test_asynchronous_tensor_parallelism_hides_a_part_of_its_collectives():
    plain = run(dp=1, tp=8, pp=1, framework="torchtitan compiled", decoder=LARGE)
    hidden = dataclasses.replace(plain, async_tp=True)
    assert 0.7 < price_step(hidden).seconds / price_step(plain).seconds < 0.99
