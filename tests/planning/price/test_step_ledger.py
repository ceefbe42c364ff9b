"""Ledger of a step: its rows add up to the evaluated step, and its charges to the seconds of the rows."""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from autoshard.cost import HOST, WORK, Charge
from autoshard.planning.price.analysed_program import analyse_program, reprice
from autoshard.planning.price.evaluate import evaluate
from autoshard.planning.price.step_ledger import itemise
from autoshard.planning.space.decision_model import Model
from tests.planning import programs
from tests.planning.space import test_exchange as exchanges


CASES = [*(case[0] for case in programs.CASES), "attention", "ring"]


def steps(name: str, count: int) -> Iterator[tuple[Model, NDArray[np.int64]]]:
    """Yield a model with random choices, or with those of a plan whose attention sends keys around a ring."""
    if name == "ring":
        program = exchanges.program("ring")
        yield reprice(exchanges.planned("ring", "sequence"), program, analyse_program(program, "tpu"))
        return
    case = next((case for case in programs.CASES if case[0] == name), None)
    model = programs.model(*case) if case else programs.model_of(programs.grouped_query(), "v5e:2x4", "data=4,model=2")
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield model, programs.random_choices(model, rng)


@pytest.mark.parametrize("name", CASES)
def test_the_rows_add_up_to_the_evaluated_channels_and_collectives(name: str):
    for model, choices in steps(name, 5):
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
        assert {channel: s for channel, s in channels.items() if s} == pytest.approx(expected, rel=1e-9)
        theirs: dict[tuple[str, tuple[str, ...], str], np.ndarray] = defaultdict(lambda: np.zeros(3))
        for each in outcome.collectives:
            theirs[each.kind, each.axes, each.cause] += (each.seconds, each.waited_s, each.wire_bytes)
        assert sums.keys() == theirs.keys()
        for key, (seconds, waited, wire) in theirs.items():
            assert sums[key][:2] == pytest.approx([seconds, waited], rel=1e-9, abs=1e-18)
            assert sums[key][2] == pytest.approx(wire, abs=2.0), "whole bytes, for hidden and exposed ones"


@pytest.mark.parametrize("name", CASES)
def test_the_charges_of_a_row_have_its_price(name: str):
    ((model, choices),) = steps(name, 1)

    def seconds(charge: Charge) -> float:
        if charge.op in WORK:
            return charge.seconds(model.compute) * charge.count
        ((_, axes),) = charge.properties
        return float(model.collectives.time(charge.op, axes, charge.amounts[0])) * charge.count  # type: ignore[arg-type]

    for row in itemise(model, choices).rows:
        # The hidden part of a collective inside an op is no charge, since it occupies no channel.
        inside = row.axes and not any(charge.hides for charge in row.charges)
        expected = row.exposed_s if inside else row.step_s
        assert sum(map(seconds, row.charges)) == pytest.approx(expected, rel=1e-9, abs=1e-15)
        assert {charge.block for charge in row.charges} <= {row.block}
        assert row.cause


def test_passes_divide_the_traffic_of_the_clusters():
    ((model, choices),) = steps("wide mlp", 1)
    ledger = itemise(model, choices)
    assert not any(row.kind == HOST for row in ledger.rows) and not any(each.on_host for each in ledger.passes)
    moved: dict[tuple[int, int], float] = defaultdict(float)
    for each in ledger.passes:
        moved[model.structure.cluster_of[each.tensor], each.block] += each.size * each.times
    streamed: dict[tuple[int, int], float] = defaultdict(float)
    for row in ledger.rows:
        if row.kind == "compute" and row.op < 0:
            streamed[row.where.ref, row.block] += sum(c.amounts[0] for c in row.charges if c.op == "stream")  # type: ignore[union-attr]
    assert streamed and moved == pytest.approx(streamed, rel=1e-9)
