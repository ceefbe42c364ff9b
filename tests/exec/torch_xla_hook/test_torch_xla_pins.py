"""Places of a script that a plan's pins apply to."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from autoshard.mlir import Flow
from autoshard.planning import Pin, Spec


pytest.importorskip("torch")
from autoshard.exec.torch_xla_hook.pins.pinned_values import Pins  # noqa: E402
from autoshard.exec.torch_xla_hook.values.call_sites import LazyOp, Place  # noqa: E402


SPLIT, OTHER, WHOLE = Spec((("data",), ())), Spec(((), ("data",))), Spec(((), ()))
SHAPE = (8, 8)
OUTPUT = Place("block", 0, "output", 0)
DOT = LazyOp("block", 0, 3, "aten.mm.default", 0)
FIRST, TAKEN = Place("block", 0, "operand", 0, DOT), Place("block", 0, "operand", 1, DOT)
MADE = Place("block", 0, "result", 0, DOT)


def pinned(
    *pins: Pin,
    places: dict[Place, Any],
    graph: dict[int, Any] | None = None,
    arguments: dict[str, Spec] | None = None,
) -> dict[Place, tuple[Spec, ...]]:
    """Return the specs of each pinned place. `graph` maps an op's number to its kind and operands.

    An "add" has operands of its own shape, a "dot" does not. A "sum" reduces all dims but the first. A "spread" is a
    broadcast whose operand is its last dim. A "turn" swaps two dims.
    """
    plan: Any = SimpleNamespace(pins=pins, arguments=arguments or {"weight": WHOLE, "bias": Spec((("data",),))})
    graph = graph or {7: ("dot", (4, 0), (5, 0))}
    operands = [graph.get(number, ("dot",))[1:] for number in range(10)]
    alike = [taken if graph.get(number, ("dot",))[0] == "add" else () for number, taken in enumerate(operands)]
    products, lookups = (frozenset(n for n, op in graph.items() if op[0] == kind) for kind in ("dot", "gather"))
    views = {n: (0, 1) if op[0] == "reshape" else (1, 0) for n, op in graph.items() if op[0] in ("reshape", "turn")}
    kept = {number: (0,) for number, op in graph.items() if op[0] == "sum"}
    spread = {number: (1,) for number, op in graph.items() if op[0] == "spread"}
    flow = Flow(operands, alike, products, lookups, views, kept, spread)
    found = Pins([(place, SHAPE, value) for place, value in places.items()], flow).of(plan)
    return {place: specs for (place, _), specs in found.items()}


def test_what_a_module_gives_is_pinned_in_turn():
    made = Pin(op=4, index=0, spec=SPLIT)
    assert pinned(made, dataclasses.replace(made, spec=WHOLE), places={OUTPUT: (4, 0)}) == {OUTPUT: (SPLIT, WHOLE)}


def test_an_op_whose_operands_stay_is_left_to_propagation():
    pins = Pin(op=4, index=0, spec=SPLIT), Pin(op=7, index=0, spec=OTHER)
    assert pinned(*pins, places={TAKEN: (4, 0), MADE: (7, 0)}) == {}


def test_a_product_that_does_without_an_axis_of_its_operands_has_these_pinned():
    """Pin the operands if the product has fewer or more axes than they have. Pin a lookup whole.

    A lookup's result does not follow from its operands.
    """
    first = TAKEN._replace(number=0)
    pins = Pin(op=4, index=0, spec=SPLIT), Pin(op=7, index=0, spec=WHOLE)
    places = {first: (-1, 0), TAKEN: (4, 0), MADE: (7, 0)}
    assert pinned(*pins, places=places) == {TAKEN: (SPLIT,)}
    more = dataclasses.replace(pins[0], spec=WHOLE), dataclasses.replace(pins[1], spec=SPLIT)
    assert pinned(*more, places=places) == {TAKEN: (WHOLE,)}
    looks = {7: ("gather", (-1, 0), (4, 0))}
    assert pinned(*pins, places=places, graph=looks) == {TAKEN: (SPLIT,), MADE: (WHOLE,)}
    adds = {7: ("add", (-1, 0), (4, 0))}
    assert pinned(*pins, places=places, graph=adds) == {}


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


def test_a_value_that_is_read_in_fewer_axes_keeps_its_own_before():
    """State both specs at the read. With the last alone the op that makes the value would give up the axes too."""
    graph = {7: ("gather", (4, 0), (5, 0))}
    pins = (
        Pin(op=4, index=0, spec=SPLIT),
        Pin(op=4, index=0, spec=WHOLE, operand=(7, 0)),
        Pin(op=7, index=0, spec=WHOLE),
    )
    places = {FIRST: (4, 0), MADE: (7, 0)}
    assert pinned(*pins, places=places, graph=graph) == {FIRST: (SPLIT, WHOLE), MADE: (WHOLE,)}
    given = pinned(*pins, places=places | {OUTPUT: (4, 0)}, graph=graph)
    assert given == {OUTPUT: (SPLIT,), FIRST: (WHOLE,), MADE: (WHOLE,)}


def test_an_argument_that_is_read_in_another_spec_is_pinned_there():
    """Reshard an argument before its op, like a split table that is gathered before a lookup."""
    graph = {7: ("gather", (-1, 0), (4, 0))}
    pin = Pin(op=-1, index=0, spec=OTHER, operand=(7, 0))
    places = {FIRST: (-1, 0), MADE: (7, 0)}
    assert pinned(pin, places=places, graph=graph) == {FIRST: (OTHER,)}
    assert pinned(dataclasses.replace(pin, operand=(8, 0)), places=places, graph=graph) == {}
    adds = {7: ("add", (-1, 0), (4, 0))}
    assert pinned(pin, places=places, graph=adds) == {}


def test_a_product_that_takes_what_another_is_handed_in_more_axes_has_its_operands_pinned():
    """Pin the operands that two products share: else propagation reshards them to the axes of the other product."""
    graph = {7: ("dot", (4, 0), (5, 0)), 8: ("dot", (4, 0), (5, 0))}
    pins = [Pin(op=number, index=0, spec=WHOLE) for number in (4, 5, 7)]
    handed = Pin(op=4, index=0, spec=SPLIT, operand=(8, 0))
    places = {FIRST: (4, 0), TAKEN: (5, 0), MADE: (7, 0)}
    assert pinned(*pins, places=places, graph=graph) == {}
    assert pinned(*pins, handed, places=places, graph=graph) == {FIRST: (WHOLE,), TAKEN: (WHOLE,)}
    less = dataclasses.replace(handed, spec=WHOLE)
    assert pinned(*pins, less, places=places, graph=graph) == {}


def test_values_that_no_result_needs_have_no_pins():
    assert pinned(Pin(op=4, index=0, spec=SPLIT), places={OUTPUT: None, TAKEN: None, MADE: (4, 0)}) == {}


def test_a_spec_that_changes_inside_of_an_op_is_pinned_before_the_last():
    """Change the spec within an op, as between a convolution and its bias. The module's result has the last spec."""
    graph = {6: ("dot", (4, 0), (5, 0)), 7: ("add", (6, 0), (3, 0))}
    pins = (
        Pin(op=4, index=0, spec=SPLIT),
        Pin(op=4, index=0, spec=OTHER, operand=(6, 0)),
        Pin(op=6, index=0, spec=OTHER),
        Pin(op=6, index=0, spec=WHOLE),
        Pin(op=7, index=0, spec=WHOLE),
    )
    operand = TAKEN._replace(number=0)
    places = {operand: (4, 0), MADE: (7, 0), OUTPUT: (7, 0)}
    assert pinned(*pins, places=places, graph=graph) == {operand: (OTHER,), MADE: (OTHER, WHOLE), OUTPUT: (WHOLE,)}


def test_what_a_view_splits_again_is_pinned_where_it_is_made():
    graph = {7: ("dot", (4, 0), (5, 0)), 8: ("reshape", (7, 0))}
    taken, made = Pin(op=4, index=0, spec=SPLIT), Pin(op=7, index=0, spec=SPLIT)
    pins = (taken, made, Pin(op=8, index=0, spec=Spec((("data", "model"), ()))))
    copied = LazyOp("block", 0, -1, "aten.clone.default", 0)
    copies = {Place("block", 0, what, 0, copied): (8, 0) for what in ("operand", "result")}
    places = {TAKEN: (4, 0), MADE: (7, 0), **copies, OUTPUT: (8, 0)}
    assert pinned(*pins, places=places, graph=graph) == {
        TAKEN: (SPLIT,),
        MADE: (SPLIT,),
        OUTPUT: (pins[2].spec,),
    }
    same = dataclasses.replace(pins[2], spec=SPLIT)
    assert pinned(taken, made, same, places=places, graph=graph) == {OUTPUT: (SPLIT,)}


def test_a_product_that_takes_what_a_view_splits_again_has_it_pinned():
    """Split a view differently, like tokens that a router needs whole and that the op before it returns split."""
    graph = {5: ("reshape", (4, 0)), 7: ("dot", (5, 0), (-1, 0))}
    pins = [Pin(op=4, index=0, spec=SPLIT), Pin(op=5, index=0, spec=WHOLE), Pin(op=7, index=0, spec=WHOLE)]
    places = {OUTPUT: (4, 0), FIRST: (5, 0), TAKEN: (-1, 0), MADE: (7, 0)}
    assert pinned(*pins, places=places, graph=graph) == {OUTPUT: (SPLIT,), FIRST: (WHOLE,)}
    pins[0] = dataclasses.replace(pins[0], spec=WHOLE)
    assert pinned(*pins, places=places, graph=graph) == {OUTPUT: (WHOLE,)}


@pytest.mark.parametrize(
    ("handed", "through", "specs"),
    [
        (Spec((("data", "model"), ())), "reshape", (SPLIT, Spec((("data", "model"), ())))),
        (OTHER, "reshape", (OTHER,)),
        (Spec((("data", "model"), ())), "sum", (Spec((("data", "model"), ())),)),
    ],
    ids=["in more axes", "in others", "not of a view"],
)
def test_a_view_that_is_passed_on_with_more_axes_keeps_its_own(handed: Spec, through: str, specs: tuple[Spec, ...]):
    """Pin the view's own spec first: otherwise the backward pass would receive it in the further axes too."""
    graph = {5: (through, (4, 0)), 7: ("dot", (5, 0), (-1, 0))}
    pins = (
        Pin(op=4, index=0, spec=SPLIT),
        Pin(op=5, index=0, spec=SPLIT),
        Pin(op=5, index=0, spec=handed, operand=(7, 0)),
        Pin(op=7, index=0, spec=handed),
    )
    assert pinned(*pins, places={OUTPUT: (4, 0), FIRST: (5, 0), MADE: (7, 0)}, graph=graph)[FIRST] == specs


@pytest.mark.parametrize("turned", [SPLIT, OTHER], ids=["in other axes", "in the same"])
def test_a_view_that_turns_dims_splits_again_what_stays_where_it_was(turned: Spec):
    graph = {5: ("turn", (4, 0)), 7: ("dot", (5, 0), (-1, 0))}
    pins = [Pin(op=4, index=0, spec=SPLIT), Pin(op=5, index=0, spec=turned), Pin(op=7, index=0, spec=turned)]
    pinned_specs = pinned(*pins, places={OUTPUT: (4, 0), FIRST: (5, 0), MADE: (7, 0)}, graph=graph)
    assert pinned_specs == {OUTPUT: (SPLIT,)} | ({FIRST: (SPLIT,)} if turned == SPLIT else {})


def test_what_is_cut_out_of_a_view_that_splits_again_is_pinned_where_it_is_chosen():
    """Slice a view that is split differently, like queries, keys and values of one product."""
    graph = {5: ("turn", (4, 0)), 6: ("slice", (5, 0)), 7: ("dot", (6, 0), (-1, 0))}
    pins = [Pin(op=op, index=0, spec=SPLIT) for op in (4, 5, 6, 7)]
    pinned_specs = pinned(*pins, places={OUTPUT: (4, 0), FIRST: (6, 0), MADE: (7, 0)}, graph=graph)
    assert pinned_specs == {OUTPUT: (SPLIT,), FIRST: (SPLIT,)}


def test_what_a_view_splits_again_and_an_op_takes_in_further_specs_has_all_of_them():
    graph = {5: ("turn", (4, 0)), 7: ("dot", (5, 0), (-1, 0))}
    made, anew = Pin(op=4, index=0, spec=SPLIT), Pin(op=5, index=0, spec=SPLIT)
    steps = [dataclasses.replace(anew, spec=spec, operand=(7, 0)) for spec in (WHOLE, OTHER)]
    pinned_specs = pinned(
        made, anew, *steps, Pin(op=7, index=0, spec=OTHER), places={FIRST: (5, 0), MADE: (7, 0)}, graph=graph
    )
    assert pinned_specs[FIRST] == (SPLIT, WHOLE, OTHER)


def test_what_any_op_makes_in_one_spec_after_the_other_is_pinned():
    """Change the spec after an op, like a pooling whose channels are split before it and its examples after it."""
    pools = {7: ("pool", (4, 0))}
    pins = Pin(op=4, index=0, spec=OTHER), Pin(op=7, index=0, spec=OTHER), Pin(op=7, index=0, spec=SPLIT)
    assert pinned(*pins, places={FIRST: (4, 0), MADE: (7, 0)}, graph=pools) == {MADE: (OTHER, SPLIT)}


@pytest.mark.parametrize("number", [0, 1], ids=["whole", "split"])
def test_a_bias_that_is_gathered_to_be_spread_is_pinned_before(number: int):
    """Pin a bias before its broadcast: XLA would gather the broadcast. A bias that is only sliced follows its op."""
    graph = {6: ("spread", (-1, number)), 7: ("add", (4, 0), (6, 0))}
    split = Spec(((), ("model",)))
    pins = [Pin(op=op, index=0, spec=split) for op in (4, 6, 7)]
    pinned_specs = pinned(*pins, places={FIRST: (4, 0), TAKEN: (-1, number), MADE: (7, 0)}, graph=graph)
    assert (pinned_specs.get(TAKEN) == (Spec((("model",),)),)) == bool(number)


def test_what_a_module_gives_and_the_plan_leaves_to_propagation_is_pinned_as_what_it_is_made_from():
    """Pin a module's result by its operands: a product, which a view has split differently, and its bias."""
    graph = {5: ("turn", (4, 0)), 7: ("add", (5, 0), (6, 0))}
    pins = Pin(op=4, index=0, spec=SPLIT), Pin(op=5, index=0, spec=SPLIT), Pin(op=6, index=0, spec=SPLIT)
    assert pinned(*pins, places={OUTPUT: (7, 0)}, graph=graph) == {OUTPUT: (SPLIT,)}
    assert pinned(pins[0], places={OUTPUT: (7, 0)}, graph=graph) == {}


@pytest.mark.parametrize(
    ("made", "summed", "is_pinned"), [(OTHER, (), False), (SPLIT, ("data",), False), (SPLIT, (), True)]
)
def test_a_sum_splits_again_only_dims_that_it_keeps(made: Spec, summed: tuple[str, ...], is_pinned: bool):
    graph = {7: ("dot", (4, 0), (5, 0)), 8: ("sum", (7, 0))}
    pins = Pin(op=7, index=0, spec=made), Pin(op=8, index=0, spec=Spec((summed,)))
    assert pinned(*pins, places={MADE: (7, 0), OUTPUT: (8, 0)}, graph=graph) == {
        **({MADE: (made,)} if is_pinned else {}),
        OUTPUT: (pins[1].spec,),
    }


@pytest.mark.parametrize(
    ("after", "handed", "is_pinned"),
    [
        (SPLIT, None, False),
        (Spec(((), ("model",))), None, True),
        (SPLIT, Spec((("data", "model"), ())), True),
        (SPLIT, Spec((("data",), ())), False),
    ],
    ids=["follows", "an axis comes in from what is made", "an axis comes back from another op", "handed on as it is"],
)
def test_what_a_product_takes_is_not_pinned_where_it_follows(after: Spec, handed: Spec | None, is_pinned: bool):
    """Use a view of a module's result, which the ops around it would not split in another way."""
    graph = {5: ("reshape", (4, 0)), 7: ("dot", (-1, 0), (5, 0)), 8: ("add", (7, 0), (6, 0)), 9: ("dot", (5, 0))}
    pins = [
        Pin(op=4, index=0, spec=SPLIT),
        Pin(op=5, index=0, spec=SPLIT),
        Pin(op=6, index=0, spec=after),
        Pin(op=7, index=0, spec=WHOLE),
    ]
    if handed is not None:
        pins.append(Pin(op=5, index=0, spec=handed, operand=(9, 0)))
    places = {OUTPUT: (4, 0), FIRST: (-1, 0), TAKEN: (5, 0), MADE: (7, 0)}
    pinned_specs = pinned(*pins, places=places, graph=graph)
    assert pinned_specs.pop(OUTPUT) == (SPLIT,)
    assert (pinned_specs.get(TAKEN) == (SPLIT,)) == is_pinned
    assert not pinned_specs or is_pinned


def test_what_a_module_gives_is_not_pinned_at_the_op_that_makes_it_too():
    looks = {7: ("gather", (4, 0), (5, 0))}
    pins = Pin(op=4, index=0, spec=SPLIT), Pin(op=7, index=0, spec=WHOLE)
    places = {TAKEN: (4, 0), MADE: (7, 0), OUTPUT: (7, 0)}
    assert pinned(*pins, places=places, graph=looks) == {TAKEN: (SPLIT,), OUTPUT: (WHOLE,)}
    elsewhere = {TAKEN: (4, 0), MADE: (7, 0), OUTPUT._replace(module="model"): (7, 0)}
    assert MADE in pinned(*pins, places=elsewhere, graph=looks)


def test_data_that_becomes_a_view_split_otherwise_is_read_so():
    """Pin the indices of a lookup, which flattens them first: otherwise the op would follow their stored spec."""
    views = {5: ("turn", (-1, 1)), 6: ("reshape", (-1, 0))}
    looks = views | {7: ("gather", (4, 0), (5, 0)), 8: ("gather", (4, 0), (6, 0))}
    pins = [Pin(op=4, index=0, spec=WHOLE), Pin(op=5, index=0, spec=SPLIT), Pin(op=6, index=0, spec=WHOLE)]
    pins += [Pin(op=number, index=0, spec=SPLIT) for number in (7, 8)]
    later = DOT._replace(turn=1)
    places = {
        TAKEN: (-1, 1),
        MADE: (7, 0),
        Place("block", 0, "operand", 1, later): (-1, 0),
        Place("block", 0, "result", 0, later): (8, 0),
    }
    pinned_specs = pinned(*pins, places=places, graph=looks, arguments={"ids": WHOLE, "turned": WHOLE})
    assert pinned_specs[TAKEN] == (OTHER,)
    assert Place("block", 0, "operand", 1, later) not in pinned_specs  # whole, as it is stored
