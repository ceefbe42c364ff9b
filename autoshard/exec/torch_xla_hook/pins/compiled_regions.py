"""Pins in the regions that `torch.compile(backend="openxla")` compiles for inference.

Hooks of modules do not run there: PyTorch/XLA runs the ops that dynamo has recorded, once, and compiles what becomes
pending. Each of these ops knows which modules' calls it is from. Where these begin and end, the modules' pins are told.
"""

import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autoshard.exec.torch_xla_hook.pins.pin_hooks import ModulePins
from autoshard.exec.torch_xla_hook.values.module_hooks import Guard


_ORDER = "autoshard_order"
"""What an op's record is called that says how many came before it in the script: regions hold them in another order."""


def pin_regions(pins: Callable[[], Mapping[int, ModulePins]], guard: Guard) -> None:
    """Have every region that is compiled from here on pinned. `pins` are those of modules, by their `id`."""
    bridge: Any = importlib.import_module("torch_xla._dynamo.dynamo_bridge")
    extract_graph, extract_region = bridge.extract_compiled_graph, bridge.extract_graph_helper

    @functools.wraps(extract_graph)
    def numbered(graph: Any, args: Any) -> Any:
        for number, node in enumerate(graph.graph.nodes):
            node.meta[_ORDER] = number
        return extract_graph(graph, args)

    @functools.wraps(extract_region)
    def pinned(region: Any, known: Any) -> Any:
        with guard:
            if not guard.failed:
                _in_order(region.graph)
                region.forward = functools.partial(_run, region, pins(), guard)
        return extract_region(region, known)

    bridge.extract_compiled_graph = numbered
    bridge.extract_graph_helper = pinned


def _run(region: Any, pins: Mapping[int, ModulePins], guard: Guard, *args: Any) -> Any:
    running = _PinnedRun(region, pins, guard)  # what it holds of the batch goes with it
    try:
        return running.run(*args)
    finally:
        running.end()


def _in_order(graph: Any) -> None:
    """Put a region's ops in the order of the script: pins count ops of a kind in it."""
    *nodes, output = graph.nodes
    order: dict[Any, int] = {}
    for node in nodes:  # never before what it takes: some are added, and have no number
        order[node] = max([node.meta.get(_ORDER, -1), *(order[taken] for taken in node.all_input_nodes)])
    for node in sorted((node for node in nodes if node.op != "placeholder"), key=order.__getitem__):
        output.prepend(node)


class _PinnedRun(torch.fx.Interpreter):
    """Runs a region's ops, and tells the modules' pins of the calls that they are from."""

    def __init__(self, region: Any, pins: Mapping[int, ModulePins], guard: Guard) -> None:
        super().__init__(region, garbage_collect_values=False)
        self._pins = pins
        self._guard = guard
        self._calls: list[str] = []
        """The calls that run, the outermost first, as dynamo names them."""
        self._ended: set[str] = set()
        self._given = _given(region.graph)

    def run_node(self, node: Any) -> Any:
        calls = [] if node.op == "output" else _calls_of(node)
        if calls is not None:
            with self._guard:
                self._move(calls)
        return super().run_node(node)

    def _move(self, calls: list[str]) -> None:
        """End the calls that an op is not from, and begin those that it is the first of."""
        common = len(os.path.commonprefix([self._calls, calls]))
        while len(self._calls) > common:
            call = self._calls[-1]
            self._leave()
            # One that goes on later, between ops of others, is counted once.
            if (pins := self._of(call)) is not None and call not in self._ended:
                self._ended.add(call)
                pins.give((), tuple(self.env[node] for node in self._given.get(call, ()) if node in self.env))
        for call in calls[common:]:
            self._calls.append(call)
            if (pins := self._of(call)) is not None:
                pins.enter()

    def end(self) -> None:
        """End what runs still, where an op has failed."""
        with self._guard:
            while self._calls:
                self._leave()

    def _leave(self) -> None:
        if (pins := self._of(self._calls.pop())) is not None:
            pins.leave()

    def _of(self, call: str) -> ModulePins | None:
        """The pins of a call's module, which dynamo names by its `id` (in other settings in ways unknown here)."""
        name = call.partition("@")[0]
        return self._pins.get(int(name)) if name.isdigit() else None


def _calls_of(node: Any) -> list[str] | None:
    """The calls of modules that an op is from; None if it does not say."""
    stack = node.meta.get("nn_module_stack")
    return None if stack is None or node.op == "placeholder" else list(stack)


def _given(graph: Any) -> dict[str, Sequence[Any]]:
    """What each call gives to others: of several values it is not known which is which, so these are left out."""
    found: dict[str, list[Any]] = {}
    for node in graph.nodes:
        for call in _calls_of(node) or ():
            if any(call not in (_calls_of(user) or ()) for user in node.users):
                found.setdefault(call, []).append(node)
    return {call: nodes for call, nodes in found.items() if len(nodes) == 1}
