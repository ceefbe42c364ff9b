"""Where in a script a value is made or taken: what a module gives, or an op inside of a module and its backward pass.

Ops have no names in a script. They are found by the call of the module that runs them, or by the node of autograd that
does, which the walk from the module's outputs back to its inputs numbers alike in every step.
"""

import collections
import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode

from autoshard.exec.torch_xla_hook._tensors import leaves, on_xla


WITH_BIAS = " with bias"
"""Ends the kind of what an op makes in the end that is a product and adds a bias to it."""


class Op(NamedTuple):
    """An op that one call of a module runs, its children's ops among them, or its backward pass."""

    module: str
    call: int
    node: int
    """Of autograd, as `nodes_between` numbers them; -1 in the forward pass."""
    kind: str
    """Such as `aten.bmm.default`."""
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
    op: Op | None = None


def unseen() -> contextlib.AbstractContextManager[Any]:
    """A context whose ops no mode is told of. For what a mode itself does: it is not told then, but those around it."""
    return contextlib.nullcontext() if _get_current_dispatch_mode() is None else _disable_current_modes()


def nodes_between(inputs: Any, output: Any) -> Iterator[Any]:
    """Nodes of autograd that lead from a module's output back to its inputs, nearest first.

    Left out are functions written in Python, whose backward pass is anybody's, and what accumulates gradients.
    """
    ends = {tensor.grad_fn for _, tensor in leaves(inputs, "")}
    queue = [tensor.grad_fn for _, tensor in leaves(output, "")]
    seen: set[Any] = {None, *ends}
    for node in queue:  # grows as it is walked
        if node in seen:
            continue
        seen.add(node)
        queue.extend(before for before, _ in node.next_functions)
        if node.next_functions and not isinstance(node, BackwardCFunction):
            yield node


class Ops(TorchDispatchMode):
    """Stands between a call of a module, or a node of autograd, and the ops that it runs.

    Copies of views are not counted, nor told: whether a view is made anew depends on what earlier steps did to its
    base.
    """

    def __init__(self) -> None:
        super().__init__()
        self._turns: dict[str, int] = collections.defaultdict(int)

    def around(self, node: Any) -> None:
        """Be there whenever this node of autograd runs."""
        node.register_prehook(self._begin)
        node.register_hook(self._end)

    def tells(self, kind: str) -> bool:
        """Whether to be told of ops of this kind; the others run by themselves."""
        return True

    def before(self, kind: str, turn: int, operands: Sequence[Any]) -> Sequence[Any]:
        """What the op is given instead of these positional arguments. What is done about an op is to be `unseen`."""
        return operands

    def after(self, kind: str, turn: int, results: Sequence[Any]) -> None:
        """Be told what the op has made."""

    def _begin(self, gradients: Any) -> None:
        self._turns.clear()
        self.__enter__()

    def _end(self, given: Any, taken: Any) -> None:
        self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _kind(func)
        if kind is None or not self.tells(kind):
            return func(*args, **(kwargs or {}))
        parts = None if kwargs else _bias_apart(kind, args)
        if parts is None:
            return self._run(kind, func, args, kwargs or {})
        product, factors, bias = parts
        made = self._run(kind, product, factors, {})
        return self._run(kind + WITH_BIAS, torch.ops.aten.add.Tensor, (made, bias), {})

    def _run(self, kind: str, func: Any, args: Any, kwargs: Any) -> Any:
        turn = self._turns[kind]
        self._turns[kind] += 1
        made = func(*self.before(kind, turn, args), **kwargs)
        self.after(kind, turn, made if isinstance(made, (tuple, list)) else (made,))
        return made


def _bias_apart(kind: str, args: Sequence[Any]) -> tuple[Any, tuple[Any, ...], Any] | None:
    """A product, what it takes, and the bias that is added to it, if this op is both.

    What the product makes is to be held between the two: XLA would gather the bias spread over all of the result.
    """
    if kind == "aten.addmm.default":
        bias, *factors = args
        return torch.ops.aten.mm.default, tuple(factors), bias
    if kind == "aten.convolution.default" and args[2] is not None:
        taken, weight, bias, *how = args
        spread = bias.reshape(-1, *[1] * (taken.dim() - 2))
        return torch.ops.aten.convolution.default, (taken, weight, None, *how), spread
    return None


@functools.cache
def _kind(func: Any) -> str | None:
    """The name of an op's overload; None for copies of views."""
    kind = str(func)
    return None if kind.split(".")[1].endswith("_copy") else kind


def is_value(thing: Any) -> bool:
    """Whether this is a tensor on the XLA device whose spec matters: no scalar, no index."""
    return isinstance(thing, torch.Tensor) and on_xla(thing) and thing.dim() > 0 and thing.is_floating_point()
