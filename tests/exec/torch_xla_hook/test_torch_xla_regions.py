"""Attribution of a compiled region's ops to calls of modules."""

from typing import Any

import pytest


torch = pytest.importorskip("torch")
from autoshard.exec.torch_xla_hook.pins.compiled_regions import _ORDER, _in_order, _run  # noqa: E402
from autoshard.exec.torch_xla_hook.values.module_hooks import Guard  # noqa: E402


class Told:
    """Stand-in for the pins of a module."""

    def __init__(self, name: str, said: list[str]) -> None:
        self._name = name
        self._said = said

    def enter(self) -> None:
        self._said.append(f"enter {self._name}")

    def leave(self) -> None:
        self._said.append(f"leave {self._name}")

    def give(self, inputs: Any, output: tuple[Any, ...]) -> None:
        self._said.append(f"{self._name} gives {[each.tolist() for each in output]}")


def region(*ops: tuple[str, Any, list[str] | None]) -> Any:
    """Build a chain of ops, each from its name, its function, and the module calls that it belongs to."""
    graph = torch.fx.Graph()
    value = graph.placeholder("x")
    for number, (name, function, calls) in enumerate(ops):
        value = graph.call_function(function, (value,), name=name)
        value.meta[_ORDER] = number
        if calls is not None:
            value.meta["nn_module_stack"] = {call: ("", object) for call in calls}
    graph.output((value,))
    return torch.fx.GraphModule({}, graph)


def told(made: Any) -> list[str]:
    said: list[str] = []
    pins: Any = {1: Told("outer", said), 2: Told("inner", said)}
    guard = Guard(lambda: said.append("gave up"))
    assert _run(made, pins, guard, torch.ones(1))[0].tolist() == [-2.0]
    return said


def test_calls_begin_and_end_with_their_ops():
    made = region(
        ("first", torch.neg, ["1"]),
        ("second", torch.neg, ["1", "2"]),
        ("third", torch.neg, ["1", "2@1"]),
        ("fourth", lambda x: 2 * x, None),
        ("fifth", torch.clone, ["L__self___other"]),
    )
    assert told(made) == [
        "enter outer",
        "enter inner",
        "leave inner",
        "inner gives [[1.0]]",
        "enter inner",
        "leave inner",
        "inner gives [[-1.0]]",
        "leave outer",
        "outer gives [[-1.0]]",  # to an op without a module call
    ]


def test_a_call_that_goes_on_between_others_is_counted_once():
    made = region(
        ("first", torch.neg, ["2"]),
        ("second", lambda x: 2 * x, ["1"]),
        ("third", torch.clone, ["2"]),
    )
    said = told(made)
    assert sum("inner gives" in each for each in said) == 1
    assert said.count("enter inner") == said.count("leave inner") == 2


def test_what_fails_leaves_no_call_open():
    def fail(x: Any) -> Any:
        raise ValueError("no such op")

    said: list[str] = []
    pins: Any = {1: Told("outer", said), 2: Told("inner", said)}
    made = region(("first", torch.neg, ["1"]), ("second", fail, ["1", "2"]))
    with pytest.raises(ValueError, match="no such op"):
        _run(made, pins, Guard(lambda: said.append("gave up")), torch.ones(1))
    assert said == ["enter outer", "enter inner", "leave inner", "leave outer"]


def test_ops_are_put_in_the_order_of_the_script_and_never_before_what_they_take():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    late = graph.call_function(torch.neg, (x,), name="late")
    early = graph.call_function(torch.exp, (x,), name="early")
    added = graph.call_function(torch.clone, (late,), name="added")
    graph.output((early, graph.call_function(torch.abs, (added,), name="last")))
    for node in graph.nodes:
        if node.name in ("early", "late", "last"):
            node.meta[_ORDER] = ("early", "late", "last").index(node.name)
    _in_order(graph)
    graph.lint()
    assert [node.name for node in graph.nodes] == ["x", "early", "late", "added", "last", "output"]
