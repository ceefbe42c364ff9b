"""Published runs, rebuilt and priced."""

import functools
import json
import pathlib

import pytest

from autoshard.cost import load_calibration
from autoshard.plan import PublishedRow, validate_published
from autoshard.plan._predict import evaluate
from autoshard.plan._published import Run, parse_run, read_rows
from autoshard.plan._rebuild import as_run, rebuild, stated_plan
from tests.plan.test_published import SMALL


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


def test_published_runs_gather_beside_compute_on_every_tpu() -> None:
    figures = {chip: as_run(load_calibration(chip)) for chip in ("v5e", "v6e", "tpu7x", "h100")}
    assert figures["v6e"].gather_overlap == figures["v5e"].gather_overlap == load_calibration("v5e").gather_overlap
    assert load_calibration("v6e").gather_overlap < figures["v6e"].gather_overlap
    assert figures["tpu7x"] == load_calibration("tpu7x") and figures["h100"] == load_calibration("h100")


def test_more_slices_and_slower_links_take_longer(tmp_path: pathlib.Path) -> None:
    variants = [SMALL | {"id": str(n), "slices": n} for n in (1, 2, 8)]
    times = [row.ours for row in rows_of(tmp_path, variants) if row.ours is not None]
    assert len(times) == 3 and times == sorted(times) and times[0] < times[-1]


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
