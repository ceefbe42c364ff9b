"""Which places of a script a plan's pins fall on."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from autoshard.plan import Pin, Spec


pytest.importorskip("torch")
from autoshard.exec.torch_xla_hook._pins import Pins  # noqa: E402
from autoshard.exec.torch_xla_hook._places import Op, Place  # noqa: E402


SPLIT, OTHER, WHOLE = Spec((("data",), ())), Spec(((), ("data",))), Spec(((), ()))
SHAPE = (8, 8)
OUTPUT = Place("block", 0, "output", 0)
DOT = Op("block", 0, 3, "aten.mm.default", 0)
TAKEN, MADE = Place("block", 0, "operand", 1, DOT), Place("block", 0, "result", 0, DOT)


def pinned(*pins: Pin, places: dict[Place, Any]) -> dict[Place, tuple[Spec, ...]]:
    plan: Any = SimpleNamespace(pins=pins)
    found = Pins(list(places), [SHAPE] * len(places), list(places.values())).of(plan)
    return {place: specs for (place, _), specs in found.items()}


def test_what_a_module_gives_is_pinned_in_turn():
    made = Pin(op=4, index=0, spec=SPLIT)
    assert pinned(made, dataclasses.replace(made, spec=WHOLE), places={OUTPUT: (4, 0)}) == {OUTPUT: (SPLIT, WHOLE)}


def test_an_op_whose_operands_stay_is_left_to_propagation():
    assert pinned(Pin(op=7, index=0, spec=SPLIT), places={TAKEN: (4, 0), MADE: (7, 0)}) == {}


def test_an_op_that_takes_an_operand_in_another_spec_is_pinned_whole():
    first = Place("block", 0, "operand", 0, DOT)
    pins = (
        Pin(op=4, index=0, spec=SPLIT),
        Pin(op=4, index=0, spec=OTHER, operand=(7, 1)),
        Pin(op=5, index=0, spec=WHOLE),
        Pin(op=7, index=0, spec=OTHER),
    )
    places = {OUTPUT: (4, 0), first: (5, 0), TAKEN: (4, 0), MADE: (7, 0)}
    assert pinned(*pins, places=places) == {OUTPUT: (SPLIT,), first: (WHOLE,), TAKEN: (OTHER,), MADE: (OTHER,)}


def test_values_that_no_result_needs_have_no_pins():
    assert pinned(Pin(op=4, index=0, spec=SPLIT), places={OUTPUT: None, TAKEN: None, MADE: (4, 0)}) == {}
