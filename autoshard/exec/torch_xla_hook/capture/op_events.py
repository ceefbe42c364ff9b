"""Being told of the ops that a call of a module, or a node of autograd, runs on the XLA device.

A dispatch mode stands before every op that runs while it is there, and makes each of them several times slower. So
PyTorch/XLA's kernels of the ops that plans pin most are stood in for: these cost something where they run alone. A mode
is there for those calls and nodes only in which other ops are to be told of.
"""

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode

from autoshard.exec.torch_xla_hook.values.device_kernels import replace_kernels, restore_kernels
from autoshard.exec.torch_xla_hook.values.lazy_tensors import is_traced, on_xla, traced


WITH_BIAS = " with bias"
"""Ends the kind of what an op makes in the end that is a product and adds a bias to it."""

OF_WEIGHT = " of weight"
"""Ends the kind of the part of a convolution's backward pass that makes the gradients of its weight and bias."""


LOOP = "xla.scan"
"""The kind of a loop of PyTorch/XLA's `scan`: the layers of a model, or the steps of a recurrent one."""


def whole_kind(kind: str) -> str:
    """The kind of the op that this is a part of, or is."""
    return kind.removesuffix(WITH_BIAS).removesuffix(OF_WEIGHT)


_KERNELS = (
    "_log_softmax",
    "_log_softmax_backward_data",
    "_softmax",
    "_softmax_backward_data",
    "addmm",
    "baddbmm",
    "bmm",
    "cat",
    "clone",
    "convolution",
    "convolution_backward",
    "embedding",
    "embedding_dense_backward",
    "gather",
    "gelu",
    "gelu_backward",
    "index.Tensor",
    "index_put",
    "index_select",
    "mm",
    "mul.Scalar",
    "relu",
    "scatter.src",
    "scatter_add",
    "silu",
    "silu_backward",
    "threshold_backward",
)
"""Ops whose kernels can be stood in for. None takes a number for a tensor: a kernel in Python could not hand it on."""


class Ops:
    """Told of the ops of some kinds (of all, if None) that run on this thread while it is entered.

    Copies of views are not counted, nor told: whether a view is made anew depends on what earlier steps did to its
    base.
    """

    def __init__(self, kinds: Collection[str] | None = None) -> None:
        self._kinds = kinds
        self._turns: dict[str, int] = collections.defaultdict(int)
        by_kernels = kinds is not None and _BY_KERNEL.issuperset(kinds)
        self._mode = None if by_kernels else _Mode(self)

    def __enter__(self) -> None:
        self._turns.clear()
        _thread.told.append(self)
        if self._mode is not None:
            self._mode.__enter__()

    def __exit__(self, *_: object) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
        _thread.told.remove(self)

    def around(self, node: Any) -> None:
        """Be entered whenever this node of autograd runs."""
        node.register_prehook(lambda gradients: self.__enter__())
        node.register_hook(lambda given, taken: self.__exit__())

    def tells(self, kind: str) -> bool:
        """Whether to be told of ops of this kind; the others run by themselves."""
        return self._kinds is None or kind in self._kinds

    def turn(self, kind: str) -> int:
        """How many ops of this kind came before this one."""
        turn = self._turns[kind]
        self._turns[kind] += 1
        return turn

    def before(self, kind: str, turn: int, operands: Sequence[Any]) -> Sequence[Any]:
        """What the op is given instead of these positional arguments. What is done here is told to no one."""
        return operands

    def after(self, kind: str, turn: int, results: Sequence[Any]) -> None:
        """Be told what the op has made. What is done here is told to no one."""


class _Mode(TorchDispatchMode):
    """Tells of ops whose kernels are not stood in for."""

    def __init__(self, ops: Ops) -> None:
        super().__init__()
        self._ops = ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _kind(func)
        if is_traced():
            return func(*args, **(kwargs or {}))
        if kind is None or kind in _BY_KERNEL or not self._ops.tells(kind):
            return _run(func, args, kwargs or {})
        turn = self._ops.turn(kind)
        with unseen():
            args = self._ops.before(kind, turn, args)
        made = _run(func, args, kwargs or {})
        with unseen():
            self._ops.after(kind, turn, _results(made))
        return made


_include: Any = vars(torch._C)["_dispatch_tls_local_include_set"]
_exclude: Any = vars(torch._C)["_dispatch_tls_local_exclude_set"]
_forced: Any = vars(torch._C)["_ForceDispatchKeyGuard"]


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op under a mode as it runs without one.

    PyTorch/XLA wraps what it makes out of nothing for functionalisation, but not below it, where a mode is. Without
    that, a view of it is a copy: what is written to the view is lost, and what is read of it is gathered.
    """
    if any(map(_has_xla, args)) or any(map(_has_xla, kwargs.values())):
        return func(*args, **kwargs)
    with _forced(_include(), _exclude().remove(torch._C.DispatchKey.Functionalize)):
        return func(*args, **kwargs)


def _has_xla(given: Any) -> bool:
    """Whether this is a tensor on the XLA device, or a list with one."""
    if isinstance(given, torch.Tensor):
        return on_xla(given)
    return isinstance(given, (list, tuple)) and any(map(_has_xla, given))


class _Thread(threading.local):
    def __init__(self) -> None:
        self.told: list[Ops] = []
        """Who is entered, the innermost last."""


_thread = _Thread()


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """A context whose ops no one is told of."""
    told, _thread.told = _thread.told, []
    try:
        with contextlib.nullcontext() if _get_current_dispatch_mode() is None else _disable_current_modes():
            yield
    finally:
        _thread.told = told


def untold(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that traces another program, of whose modules and ops no one is told."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with traced(), unseen() if _thread.told else contextlib.nullcontext():
            return function(*args, **kwargs)

    return run


_standing: set[str] = set()
"""Ops whose kernels are stood in for now."""


def stand_in(kinds: Collection[str] | None = None) -> None:
    """Stand in for PyTorch/XLA's kernels of these kinds of ops (of all that can be, if None), and of no others.

    No one is told of ops whose kernels can be stood in for and are not. Those that are cost some microseconds each,
    also where no one is entered.
    """
    apart = None if kinds is None else set(map(whole_kind, kinds))
    wanted = {name for name in _KERNELS if apart is None or _kind_of(name) in apart}
    restore_kernels(_standing - wanted)
    replace_kernels({name: _telling(name) for name in wanted - _standing})
    _standing.clear()
    _standing.update(wanted)


@functools.cache
def _telling(name: str) -> Callable[..., Any]:
    """PyTorch/XLA's kernel of an op, which tells all who are entered."""
    kind = _kind_of(name)
    kernel = torch.library.get_kernel(f"aten::{name}", "XLA").call_boxed
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.XLA)

    def run(*args: Any, **kwargs: Any) -> Any:
        told = _thread.told
        asking = [each for each in told if each.tells(kind)] if told else ()
        if not asking:
            return kernel(keys, *args, **kwargs)
        with _telling_no_one():
            by_kernel = functools.partial(kernel, keys)
            parts = None if kwargs else _bias_apart(kind, args)
            if parts is not None:
                product, factors, bias = parts
                made = _tell(asking, kind, product, factors, {})
                return _tell(asking, kind + WITH_BIAS, torch.ops.aten.add.Tensor, (made, bias), {})
            if not kwargs and _makes_two(kind, args):
                *taken, (_, weight, bias) = args
                given, _, _ = _tell(asking, kind, by_kernel, (*taken, [True, False, False]), {})
                _, *rest = _tell(asking, kind + OF_WEIGHT, by_kernel, (*taken, [False, weight, bias]), {})
                return given, *rest
            return _tell(asking, kind, by_kernel, args, kwargs)

    return run


@contextlib.contextmanager
def _telling_no_one() -> Iterator[None]:
    """Around an op that is told of already: of what it does in turn no one is."""
    told, _thread.told = _thread.told, []
    try:
        yield
    finally:
        _thread.told = told


def tell_of_loop(loop: Callable[..., Sequence[Any]], args: Sequence[Any]) -> Sequence[Any]:
    """Run a loop of PyTorch/XLA's, which is an op of its own, and tell all who are entered."""
    asking = [each for each in _thread.told if each.tells(LOOP)]
    if not asking:
        return loop(*args)
    with _telling_no_one():
        return _tell(asking, LOOP, loop, args, {})


def _tell(asking: Sequence[Ops], kind: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run an op. What it takes is told to the innermost first, what it makes to the outermost."""
    turns = [each.turn(kind) for each in asking]
    for each, turn in zip(reversed(asking), reversed(turns), strict=True):
        args = each.before(kind, turn, args)
    made = run(*args, **kwargs)
    for each, turn in zip(asking, turns, strict=True):
        each.after(kind, turn, _results(made))
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


def _makes_two(kind: str, args: Sequence[Any]) -> bool:
    """Whether this op convolves twice: a plan may want each with other operands. What no one takes XLA drops."""
    return kind == "aten.convolution_backward.default" and args[-1][0] and any(args[-1][1:])


def _results(made: Any) -> Sequence[Any]:
    return made if isinstance(made, (tuple, list)) else (made,)


_KNOWN_AS = {"aten._native_batch_norm_legit.no_stats": "aten.native_batch_norm.default"}
"""Ops of compiled regions -> those that a script runs in their place; what is pinned has the same numbers in both."""


@functools.cache
def _kind(func: Any) -> str | None:
    """The name of an op's overload; None for copies of views."""
    kind = str(func)
    return None if kind.split(".")[1].endswith("_copy") else _KNOWN_AS.get(kind, kind)


def _kind_of(name: str) -> str:
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


_BY_KERNEL = frozenset({*map(_kind_of, _KERNELS), LOOP})
