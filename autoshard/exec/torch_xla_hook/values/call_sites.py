"""Where in a script a value is made or taken: what a module gives, or an op inside of a module and its backward pass.

Ops have no names in a script. They are found by the call of the module that runs them, or by the node of autograd that
does, which the walk from the module's outputs back to its inputs numbers alike in every step.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction

from autoshard.exec.torch_xla_hook.values.lazy_tensors import leaves, on_xla


class LazyOp(NamedTuple):
    """An op that one call of a module runs, its children's ops among them, or its backward pass."""

    module: str
    call: int
    node: int
    """The node of autograd that made it, as `nodes_between` numbers them; -1 in the forward pass."""
    kind: str
    """The name that the lazy graph has for the op, such as `aten.bmm.default`."""
    turn: int
    """How many of this kind came before."""


class Place(NamedTuple):
    """A value of one call of a module."""

    module: str
    call: int
    what: str
    """`output` of the module or its `gradient`; `operand` or `result` of an op."""
    number: int
    """Which of the module's output tensors, of the op's positional arguments, or of its results."""
    op: LazyOp | None = None


def nodes_between(inputs: Any, output: Any) -> Iterator[Any]:
    """Nodes of autograd that lead from a module's output back to its inputs, nearest first.

    Left out are functions written in Python, whose backward pass is anybody's (but for PyTorch/XLA's loops), and what
    accumulates gradients.
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
    return node._forward_cls.__module__ == "torch_xla.experimental.scan"


def is_value(thing: Any) -> bool:
    """Whether this is a tensor on the XLA device whose spec matters: no scalar, no mask."""
    return isinstance(thing, torch.Tensor) and on_xla(thing) and thing.dim() > 0 and thing.dtype is not torch.bool
