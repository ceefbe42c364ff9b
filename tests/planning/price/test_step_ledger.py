"""Ledger of a step: its rows add up to the evaluated step, and its charges to the seconds of the rows."""

from collections import defaultdict

import numpy as np
import pytest

from autoshard.cost import WORK, Charge
from autoshard.planning.price.evaluate import evaluate
from autoshard.planning.price.step_ledger import itemise
from autoshard.planning.space.decision_model import HOST, Model, Reshard
from tests.planning import programs


def models() -> list[Model]:
    attention = programs.model_of(programs.grouped_query(), "v5e:2x4", "data=4,model=2")
    return [*(programs.model(*case) for case in programs.CASES), attention]


@pytest.mark.parametrize("case", range(len(programs.CASES) + 1))
def test_the_rows_add_up_to_the_evaluated_channels_and_collectives(case: int):
    model, rng = models()[case], np.random.default_rng(0)
    for _ in range(5):
        choices = programs.random_choices(model, rng)
        outcome, ledger = evaluate(model, choices), itemise(model, choices)
        channels: dict[tuple[int, str], float] = defaultdict(float)
        sums: dict[tuple[str, tuple[str, ...], str], np.ndarray] = defaultdict(lambda: np.zeros(3))
        for row in ledger.rows:
            for channel, seconds in row.channels():
                channels[channel] += seconds
            if row.axes:
                wire = model.collectives.wire_bytes(row.kind, row.axes, row.bytes * row.times)  # type: ignore[arg-type]
                figures = row.step_s, row.exposed_s, sum(float(each) for each in wire.values())
                sums[row.kind, row.axes, row.cause] += figures
        expected = {channel: seconds for channel, seconds in outcome.channels.items() if seconds}
        assert {c: s for c, s in channels.items() if s} == pytest.approx(expected, rel=1e-9)
        theirs: dict[tuple[str, tuple[str, ...], str], np.ndarray] = defaultdict(lambda: np.zeros(3))
        for each in outcome.collectives:
            theirs[each.kind, each.axes, each.cause] += (each.seconds, each.waited_s, each.wire_bytes)
        assert sums.keys() == theirs.keys()
        for key, (seconds, waited, wire) in theirs.items():
            assert sums[key][:2] == pytest.approx([seconds, waited], rel=1e-9)
            assert sums[key][2] == pytest.approx(wire, abs=2.0), "whole bytes, for hidden and exposed ones"


@pytest.mark.parametrize("case", range(len(programs.CASES) + 1))
def test_the_charges_of_a_row_have_its_price(case: int):
    model, rng = models()[case], np.random.default_rng(1)
    ledger = itemise(model, programs.random_choices(model, rng))

    def seconds(charge: Charge) -> float:
        if charge.op in WORK:
            return charge.seconds(model.compute) * charge.count
        ((_, axes),) = charge.properties
        return float(model.collectives.time(charge.op, axes, charge.amounts[0])) * charge.count  # type: ignore[arg-type]

    assert {row.kind for row in ledger.rows} > {"compute"}
    for row in ledger.rows:
        # The hidden part of a collective inside an op is no charge, since it occupies no channel.
        expected = row.step_s if isinstance(row.where, Reshard) or not row.axes else row.exposed_s
        assert sum(map(seconds, row.charges)) == pytest.approx(expected, rel=1e-9, abs=1e-15)
        assert {charge.block for charge in row.charges} <= {row.block}


def test_passes_divide_the_traffic_of_the_clusters():
    model = programs.model("wide mlp", "v5e:4x4", "data=4,model=4")
    ledger = itemise(model, programs.random_choices(model, np.random.default_rng(0)))
    assert not any(row.kind == HOST for row in ledger.rows) and not any(each.on_host for each in ledger.passes)
    moved: dict[tuple[int, int], float] = defaultdict(float)
    for each in ledger.passes:
        moved[model.structure.cluster_of[each.tensor], each.block] += each.size * each.times
    for row in ledger.rows:
        if row.kind == "compute" and row.op < 0:
            streamed = sum(c.amounts[0] * c.count for c in row.charges if c.op == "stream")
            assert moved[row.where.ref, row.block] == pytest.approx(streamed, rel=1e-9)  # type: ignore[union-attr]
