"""Published runs, rebuilt and priced."""

import functools
import json
import pathlib
import statistics

import pytest

from autoshard.cost import Calibration, load_calibration
from autoshard.planning import Options, make_plan
from autoshard.planning.price.evaluate import evaluate
from autoshard.validation import PublishedRow, validate_published
from autoshard.validation.published_runs import Run, parse_run, read_rows
from autoshard.validation.rebuilt_runs import (
    LEFT_OUT,
    _by_mfu,
    _reached,
    rebuild,
    source_group,
    stated_plan,
    without_source,
)
from tests.validation.test_published import SMALL


CHOSEN = (
    "maxtext-v5e-64b-1x",
    "maxtext-v5p-64b-64c-2x",
    "recipe-v6e-llama3.1-8b-v6e-8",
    "gemm-tpu7x-16384",
    "gemm-tpu7x-1024",
)


def rows_of(folder: pathlib.Path, rows: list[dict]) -> tuple[PublishedRow, ...]:
    file = folder / "rows.json"
    file.write_text(json.dumps(rows))
    return validate_published(file)


@functools.cache
def published() -> dict[str, dict]:
    return {row["id"]: row for row in read_rows()}


def test_one_run_of_every_generation_is_near(tmp_path: pathlib.Path) -> None:
    for row in rows_of(tmp_path, [published()[name] for name in CHOSEN]):
        assert row.delta_percent is not None and abs(row.delta_percent) < 22, row.id
        assert row.ours is not None and row.theirs is not None
        assert row.our_mfu is not None and row.their_mfu is not None
        assert row.our_mfu * row.ours == pytest.approx(row.their_mfu * row.theirs)
        assert row.compute_s + row.exposed_s == pytest.approx(row.ours)


FUSED = "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true"


def test_a_published_run_is_priced_as_a_plan_with_its_flags() -> None:
    hidden = {}
    for flags in (None, FUSED):
        run = parse_run(SMALL | {"tpu": "v6e", "slices": 1, "sharding": "FSDP=16", "xla_flags": flags})
        assert isinstance(run, Run)
        model, choices = rebuild(run)
        outcome = evaluate(model, choices)
        made = make_plan(
            model.program,
            Options(topology="v6e:4x4", mesh="fsdp=16", xla_flags=flags, calibration=False, refine_axes=False),
        ).plan
        assert made.provenance["calibration"] == model.compute.calibration.hash()
        assert (made.provenance["calibration"] == load_calibration("v6e").hash()) == (flags is None)
        assert made.prediction.step_time_s <= outcome.step_time_s * (1 + 1e-9)
        hidden[flags] = sum(c.seconds - c.waited_s for c in outcome.collectives if c.kind == "all-gather")
    assert hidden[FUSED] > hidden[None]


def test_figures_without_a_source_are_of_every_source_of_the_shipped_fit() -> None:
    sources = json.loads(LEFT_OUT.read_text())["sources"]
    rows = [row for row in published().values() if source_group(row["source"]) in sources]
    assert len(sources) >= 5 and len(rows) >= 36
    for source, chips in sources.items():
        for chip, figures in chips.items():
            found = without_source(chip, source)
            assert isinstance(found, Calibration) and found != load_calibration(chip)
            assert {name: getattr(found, name) for name in figures} == figures
    assert without_source("v5e", "somebody: else") == load_calibration("v5e")


def test_the_simplest_prediction_is_the_median_mfu_of_other_sources() -> None:
    mine = SMALL | {"id": "mine", "value": 50.0}
    other = {"source": "another/one@0:README.md"}
    stated = [mine, SMALL | {"id": "too", "value": 20.0}]
    stated += [SMALL | other | {"id": str(k), "value": value} for k, value in enumerate((30.0, 40.0, 90.0))]
    stated += [SMALL | other | {"id": "guessed", "value": 5.0, "assume": {"why": "a guess"}}]
    stated += [SMALL | other | {"id": "lacking", "seq": None}]
    run = parse_run(mine)
    assert isinstance(run, Run)
    reached = _reached([*stated, *published().values()])
    assert not {"guessed", "lacking", "gemm-tpu7x-1024"} & {each.id for each in reached}
    # Shipped runs on v5e are other sources too. A source's own rows count for the second prediction only.
    shares = {each.id: each.mfu for each in reached if each.chip == "v5e"}
    assert len(shares) == 5 + 14 and shares["mine"] == pytest.approx(run.peak_s / run.step_s)
    bare = PublishedRow("mine", "small", "v5e", mine["source"], theirs=run.step_s)
    row = _by_mfu(bare, run, reached)
    others = [mfu for name, mfu in shares.items() if name not in ("mine", "too")]
    assert row.by_mfu == pytest.approx(run.peak_s / statistics.median(others))
    assert row.by_other_rows == pytest.approx(run.peak_s / statistics.median([*others, shares["too"]]))
    # If no other source has run the chip, all chips count. If there are no rows, there is no prediction.
    far = [each for each in reached if each.chip == "v6e"]
    assert _by_mfu(bare, run, far).by_mfu == pytest.approx(run.peak_s / statistics.median(each.mfu for each in far))
    assert _by_mfu(bare, run, far).by_other_rows is None and _by_mfu(bare, run, []).by_mfu is None


def test_what_cannot_be_rebuilt_is_reported_and_the_rest_goes_on(tmp_path: pathlib.Path) -> None:
    heads = SMALL["dims"] | {"N": 6, "K": 4}
    first, flag, last = rows_of(tmp_path, [SMALL | {"dims": heads}, SMALL | {"xla_flags": f"{FUSED[:-4]}maybe"}, SMALL])
    assert "6 heads in groups of 4" in first.skipped and last.ours is not None
    assert "is 'maybe', expected true or false" in flag.skipped


@pytest.mark.full
def test_more_slices_and_slower_links_take_longer(tmp_path: pathlib.Path) -> None:
    variants = [SMALL | {"id": str(n), "slices": n} for n in (1, 2, 8)]
    times = [row.ours for row in rows_of(tmp_path, variants) if row.ours is not None]
    assert len(times) == 3 and times[0] < times[1]
    # Unspecified choices are completed within the solver's tolerance.
    assert times[1] <= times[2] * (1 + 1e-6)


@pytest.mark.full
def test_tensor_parallelism_is_computed_as_stated(tmp_path: pathlib.Path) -> None:
    few = {"sharding": "FSDP=32", "per_chip_batch": None, "global_batch_seqs": 8}
    both, impossible = rows_of(tmp_path, [SMALL, SMALL | few])
    run = parse_run(SMALL)
    assert isinstance(run, Run)
    moved = {(c.kind, c.axes) for c in evaluate(*rebuild(run)).collectives if c.cause.startswith("jit")}
    assert {("all-gather", ("model",)), ("reduce-scatter", ("model",))} <= moved
    assert both.exposed_s > 0
    assert impossible.skipped == "the model's sizes do not allow the stated sharding (fsdp=32)"


def test_progress_and_skipped_rows(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([SMALL | {"seq": None}, SMALL]))
    lines: list[str] = []
    skipped, done = validate_published(file, lines.append)
    assert skipped.skipped == "not stated: seq" and skipped.delta_percent is None
    assert done.delta_percent is not None and lines == ["2/2 small"]


def test_a_run_becomes_a_plan_that_compiles() -> None:
    machine = {"chips_per_slice": 32, "slices": 1, "topology": "2x4x4", "tpu": "v5p"}
    run = parse_run(SMALL | machine | {"sharding": "FSDP=16,TP=2"})
    assert isinstance(run, Run)
    program, plan = stated_plan(run)
    assert plan.mesh == {"fsdp": 16, "model": 2} and plan.topology == run.topology.name
    assert program.model_flops == pytest.approx(run.flops(causal=True))
    up = plan.arguments["layers.*.mlp.up_proj.weight"]
    assert set(up.axes) == {"fsdp", "model"}
    assert {call.name.partition("_no_")[0].partition("_res")[0] for call in plan.calls} == {
        "splash_mqa_fwd",
        "splash_mqa_dkv",
        "splash_mqa_dq",
    }
    for call in plan.calls:
        query = next(spec for spec in call.operands if len(spec.dims) == 5)
        assert query.dims[0] == ("fsdp",) and query.dims[1] == ("model",)
