"""Places in a script where a value is computed or read: a module's output, or an op inside of a module's call or
backward pass.

Ops have no names in a script. An op is identified by the module call that runs it, or by the autograd node that runs
it. A walk from the module's outputs back to its inputs numbers these nodes alike in every step.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

from autoshard.exec.torch_xla_hook.values.lazy_tensors import leaves, on_xla


class LazyOp(NamedTuple):
    """An op that one call of a module runs, including its children's ops, or that its backward pass runs."""

    module: str
    """Dotted name of the module."""
    call: int
    """Number of the module's call within the step, from 0."""
    node: int
    """Number of the autograd node that runs the op, as `nodes_between` counts; -1 in the forward pass."""
    kind: str
    """Name of the op in the lazy graph, such as `aten.bmm.default`."""
    turn: int
    """Number of earlier ops of this kind in the same call (`node` -1) or autograd node."""


class Place(NamedTuple):
    """A value of one call of a module."""

    module: str
    """Dotted name of the module."""
    call: int
    """Number of the module's call within the step, from 0."""
    what: str
    """Part of the call: `output` of the module or its `gradient`; `operand` or `result` of an op."""
    number: int
    """Index among the module's output tensors, the op's positional arguments, or the op's results."""
    op: LazyOp | None = None
    """Op whose operand or result the value is; None for an output or its gradient."""


def nodes_between(inputs: Any, output: Any) -> Iterator[Any]:
    """Yield the autograd nodes that lead from a module's output back to its inputs, breadth first from the outputs.

    `inputs` and `output` are nested tuples, lists and dicts of tensors. The walk stops at the inputs' own nodes. It
    passes through two kinds of nodes that it does not yield: accumulators of gradients, and functions written in
    Python. The backward pass of such a function can be any code; PyTorch/XLA's loops are the exception and are yielded.
    """
    ends = {tensor.grad_fn for _, tensor in leaves(inputs, "")}
    queue = [tensor.grad_fn for _, tensor in leaves(output, "")]
    seen: set[Any] = {None, *ends}
    for node in queue:  # grows as it is walked
        if node in seen:
            continue
        seen.add(node)
        queue.extend(before for before, _ in node.next_functions)
        if node.next_functions and (not isinstance(node, BackwardCFunction) or _is_loop(node)):
            yield node


def _is_loop(node: Any) -> bool:
    """Return True if a node of a Python function is PyTorch/XLA's `scan`."""
    return node._forward_cls.__module__ == "torch_xla.experimental.scan"


def is_value(thing: Any) -> bool:
    """Return True for a tensor on the XLA device whose spec matters: neither a scalar (no dims) nor a mask (bool).
    Return False for any other object.
    """
    return isinstance(thing, torch.Tensor) and on_xla(thing) and thing.dim() > 0 and thing.dtype is not torch.bool
