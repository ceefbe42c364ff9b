"""Pins in the regions that `torch.compile(backend="openxla")` compiles for inference.

Hooks of modules do not run in such a region: PyTorch/XLA runs the ops that dynamo recorded once, and compiles the
pending graph. Each op records the module calls that it belongs to. The pins of a module are entered and left where its
call begins and ends.
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
"""Key in an op's metadata: the number of ops before it in the script. Regions store their ops in another order."""


def pin_regions(pins: Callable[[], Mapping[int, ModulePins]], guard: Guard) -> None:
    """Replace PyTorch/XLA's compilation of regions so that every region that is compiled from here on is pinned.

    `pins` returns the pins of modules, by the module's `id`. After a failure of `guard`, regions stay unpinned.
    """
    bridge: Any = importlib.import_module("torch_xla._dynamo.dynamo_bridge")
    extract_graph, extract_region = bridge.extract_compiled_graph, bridge.extract_graph_helper

    @functools.wraps(extract_graph)
    def numbered(graph: Any, args: Any) -> Any:
        """Assign each op of a graph its number in the order of the script, before the graph is cut into regions."""
        for number, node in enumerate(graph.graph.nodes):
            node.meta[_ORDER] = number
        return extract_graph(graph, args)

    @functools.wraps(extract_region)
    def pinned(region: Any, known: Any) -> Any:
        """Make a region run with its pins, then compile it."""
        with guard:
            if not guard.failed:
                _in_order(region.graph)
                region.forward = functools.partial(_run, region, pins(), guard)
        return extract_region(region, known)

    bridge.extract_compiled_graph = numbered
    bridge.extract_graph_helper = pinned


def _run(region: Any, pins: Mapping[int, ModulePins], guard: Guard, *args: Any) -> Any:
    """Run a region on `args` with its pins and return its outputs; calls end also after an error."""
    running = _PinnedRun(region, pins, guard)  # its references to the batch end with it
    try:
        return running.run(*args)
    finally:
        running.end()


def _in_order(graph: Any) -> None:
    """Sort a region's ops, in place, into the order of the script: pins count the ops of a kind in that order."""
    *nodes, output = graph.nodes
    order: dict[Any, int] = {}
    for node in nodes:  # never before its operands: added ops have no number
        order[node] = max([node.meta.get(_ORDER, -1), *(order[operand] for operand in node.all_input_nodes)])
    for node in sorted((node for node in nodes if node.op != "placeholder"), key=order.__getitem__):
        output.prepend(node)


class _PinnedRun(torch.fx.Interpreter):
    """Interpreter of a region's ops that enters and leaves the pins of the modules that the ops belong to."""

    def __init__(self, region: Any, pins: Mapping[int, ModulePins], guard: Guard) -> None:
        super().__init__(region, garbage_collect_values=False)
        self._pins = pins
        self._guard = guard
        self._calls: list[str] = []
        """The calls that run now, the outermost first, by dynamo's names."""
        self._ended: set[str] = set()
        self._given = _given(region.graph)

    def run_node(self, node: Any) -> Any:
        """Run an op after entering and leaving calls as its metadata says; without metadata the running calls stay."""
        calls = [] if node.op == "output" else _calls_of(node)
        if calls is not None:
            with self._guard:
                self._move(calls)
        return super().run_node(node)

    def _move(self, calls: list[str]) -> None:
        """End the calls that the next op does not belong to, pin their outputs, and begin the calls whose first op it
        is.
        """
        common = len(os.path.commonprefix([self._calls, calls]))
        while len(self._calls) > common:
            call = self._calls[-1]
            self._leave()
            # A call can continue later, between ops of other calls: its outputs are pinned only once.
            if (pins := self._of(call)) is not None and call not in self._ended:
                self._ended.add(call)
                pins.give((), tuple(self.env[node] for node in self._given.get(call, ()) if node in self.env))
        for call in calls[common:]:
            self._calls.append(call)
            if (pins := self._of(call)) is not None:
                pins.enter()

    def end(self) -> None:
        """End all calls that still run, as after an op that failed."""
        with self._guard:
            while self._calls:
                self._leave()

    def _leave(self) -> None:
        """End the innermost call and the pins of its module, if it has any."""
        if (pins := self._of(self._calls.pop())) is not None:
            pins.leave()

    def _of(self, call: str) -> ModulePins | None:
        """Return the pins of a call's module, whose `id` dynamo puts into the call's name; None if it has none.

        In some settings dynamo writes another name; then the call has no pins.
        """
        name = call.partition("@")[0]
        return self._pins.get(int(name)) if name.isdigit() else None


def _calls_of(node: Any) -> list[str] | None:
    """Return the names of the module calls that an op belongs to, the outermost first; None for a placeholder or
    without metadata.
    """
    stack = node.meta.get("nn_module_stack")
    return None if stack is None or node.op == "placeholder" else list(stack)


def _given(graph: Any) -> dict[str, Sequence[Any]]:
    """Return the output node of each call: the node that other calls read.

    A call with several outputs is omitted, since the graph does not say which output is which.
    """
    outputs: dict[str, list[Any]] = {}
    for node in graph.nodes:
        for call in _calls_of(node) or ():
            if any(call not in (_calls_of(user) or ()) for user in node.users):
                outputs.setdefault(call, []).append(node)
    return {call: nodes for call, nodes in outputs.items() if len(nodes) == 1}
