"""Bills price a step as its plan does, for any calibration."""

import dataclasses
import json

import pytest

from autoshard.cost import Bill, Topology, load_calibration, make_mesh
from tests.cost.observed import bill


def test_equal_charges_are_one_and_order_does_not_matter():
    one = bill(matmul=3, traffic=1e6, reduced=1e5, launches=2)
    mesh = make_mesh(Topology.parse("cpu:8"), {"data": 8})
    halves = [dataclasses.replace(charge, count=charge.count / 2) for charge in one.charges]
    assert Bill.of(mesh, [*reversed(halves), *halves]) == one


def test_a_bill_survives_json():
    one = bill(matmul=3, traffic=1e6, reduced=1e5, launches=2)
    assert Bill.from_json(json.loads(json.dumps(one.to_json()))) == one


@pytest.mark.parametrize("value", [{}, {"topology": "cpu:8", "mesh": {}, "charges": [["magic", {}, [], -1, 1, []]]}])
def test_what_is_no_bill_is_refused(value: dict):
    with pytest.raises((KeyError, ValueError)):
        Bill.from_json(value)


def test_parts_of_a_step_add_up():
    one = bill(matmul=10, traffic=3e7, reduced=1e6, launches=4)
    shipped = load_calibration("cpu")
    parts = one.parts(shipped)
    assert parts.step_s == pytest.approx(sum(parts.spent.values()))
    assert parts.sent_s == pytest.approx(parts.spent["all-reduce"]) == pytest.approx(sum(parts.waits.values()))
    slower = one.parts(dataclasses.replace(shipped, memory_efficiency=shipped.memory_efficiency / 2))
    assert slower.spent["stream"] == pytest.approx(2 * parts.spent["stream"])


def test_what_is_hidden_runs_during_compute():
    one = bill(matmul=1e4, reduced=1e6, launches=4, topology="v5e:2x4")
    shipped = load_calibration("v5e")
    hidden, waited = (one.parts(dataclasses.replace(shipped, reduction_overlap=share)) for share in (1.0, 0.0))
    assert hidden.waits == {"all-reduce": 0.0} and hidden.spent == waited.spent
    assert hidden.step_s == pytest.approx(max(hidden.spent.values()))
    assert waited.step_s == pytest.approx(sum(waited.spent.values()))
