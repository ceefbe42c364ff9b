"""Measured plans of one model: priced and ordered."""

import math
import pathlib

import pytest

from autoshard.planning.space.named_layouts import groups_of_op
from autoshard.validation import PairGroup, PairRow, summarise_pairs, validate_pairs
from autoshard.validation.pair_rows import PAIRS, read_groups
from autoshard.validation.rebuilt_runs import _stated, stated_plan
from tests.validation.measured import MODEL, group, write


def row(
    measured: float | None, predicted: float | None, fits: bool = True, ran: bool | None = True, choice: str = ""
) -> PairRow:
    return PairRow(
        "p", choice or f"{measured}", measured, predicted, predicted, tokens=1, measured_bytes=100,
        predicted_bytes=110, fits=fits, measured_fits=ran,
    )  # fmt: skip


def plans(*rows: PairRow) -> PairGroup:
    return PairGroup("g", "s", "TPU v5p", True, True, rows)


def test_order_regret_and_ratios_are_those_of_hand():
    found = plans(row(1.0, 2.0), row(2.0, 1.0), row(4.0, 4.0), row(1.01, 9.0))
    # Decided: all pairs but the first and the last, which differ by 1 %. Agreeing: 0-2, 1-2; not: 0-1, 1-3, 2-3.
    assert found.tau == pytest.approx((2 - 3) / 5)
    assert found.regret == pytest.approx(2.0)  # row 1 is chosen, row 0 is the best
    assert sorted(found.ratio_errors())[-1] == pytest.approx((2 / 1) / (1 / 2) - 1)
    assert plans(row(1.0, 1.0), row(1.01, 9.0)).tau is None
    assert plans(row(1.0, 1.0, choice="a"), row(2.0, 1.0, choice="a")).tau is None  # one plan, measured twice


def test_a_chosen_plan_that_ran_out_of_memory_is_infinitely_bad():
    assert plans(row(1.0, 2.0), row(2.0, 3.0), row(None, 1.0, ran=False)).regret == math.inf
    kept = plans(row(1.0, 2.0), row(2.0, 3.0), row(None, 1.0, fits=False, ran=False))
    assert kept.regret == 1.0
    assert summarise_pairs([kept]).verdicts_right == 3
    assert PairGroup("g", "s", "TPU", False, True, kept.rows).regret is None  # different workloads are no choice


def test_all_groups_together():
    summary = summarise_pairs([plans(row(1.0, 1.1), row(2.0, 2.2)), plans(row(1.0, 2.0), row(2.0, 1.0))])
    assert (summary.groups, summary.rows, summary.rebuilt, summary.decided) == (2, 4, 4, 2)
    assert summary.tau == 0.0
    assert summary.regret_mean == pytest.approx(math.sqrt(2.0))
    assert summary.regret_worst == pytest.approx(2.0)
    assert summary.memory_median == pytest.approx(0.1)
    assert summarise_pairs([]).tau is None


def test_a_small_group_is_rebuilt_and_priced(tmp_path: pathlib.Path):
    rows = [{"plan": {"fsdp": 4}, "step_time_s": 0.002}, {"plan": {"tp": 2, "fsdp": 2}, "step_time_s": 0.003}]
    (pair_group,) = validate_pairs(write(tmp_path, group(*rows)))
    for each in pair_group.rows:
        assert each.predicted_s is not None and 1e-5 < each.predicted_s < 0.1
        assert each.predicted_bytes is not None and each.fits is True
    assert pair_group.rows[0].predicted_s != pair_group.rows[1].predicted_s


def test_fsdp_of_few_tokens_gathers_weights(tmp_path: pathlib.Path):
    """Gather the weights as the measured run did, although gathering activations would be cheaper."""
    wide = MODEL | {"emb": 1024, "mlp": 8192}
    (pair_group,) = read_groups(write(tmp_path, group({"plan": {"fsdp": 4}, "step_time_s": 1.0}, model=wide)))
    assert pair_group.rows[0].run is not None
    _, model, groups, solved = _stated(pair_group.rows[0].run, "flash")
    checked = 0
    for op_id, node in model.op_node.items():
        of = groups_of_op(model, groups, op_id)
        if groups.batch in of:
            assert model.nodes[node].states[solved.choices[node]][0] == of[groups.batch]
            checked += 1
    assert checked >= 15


@pytest.mark.full
def test_a_stated_plan_is_compiled_with_the_flags_that_its_row_states(tmp_path: pathlib.Path):
    flag = "--xla_tpu_enable_async_collective_fusion=true"
    rows = [{"plan": {"fsdp": 4, "xla_flags": [flag]}, "step_time_s": 1.0}, {"plan": {"fsdp": 4}, "step_time_s": 1.0}]
    (pair_group,) = read_groups(write(tmp_path, group(*rows)))
    plans = [stated_plan(row.run)[1] for row in pair_group.rows if row.run is not None]
    assert [plan.provenance.get("xla_flags", {}).get("flags") for plan in plans] == [[flag], None]


def test_shipped_groups_are_read():
    pair_groups = read_groups(PAIRS)
    assert len(pair_groups) == 40 and sum(len(each.rows) for each in pair_groups) == 195
    assert all(row.run or row.serving or row.gpu or row.skipped for each in pair_groups for row in each.rows)
    assert sum(each.on_tpu for each in pair_groups) == 29
