"""Observation of the ops that a call of a module, or an autograd node, runs on the XLA device.

A dispatch mode intercepts every op while it is active, and makes each of them several times slower. So the PyTorch/XLA
kernels of the ops that plans pin most are replaced: these cost time only where they run. A mode is active only in those
calls and nodes in which other ops are observed.
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
"""Suffix of the kind of the addition by which an op adds a bias to a product."""

OF_WEIGHT = " of weight"
"""Suffix of the kind of the part of a convolution's backward pass that computes gradients of weight and bias."""


LOOP = "xla.scan"
"""The kind of a loop of PyTorch/XLA's `scan`: the layers of a model, or the steps of a recurrent one."""


def whole_kind(kind: str) -> str:
    """Return the kind of the whole op that a part of this kind belongs to."""
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
"""Ops whose kernels can be replaced. None accepts a number as a tensor, which a kernel in Python could not pass on."""


class OpObserver:
    """Observer of ops of some kinds (all kinds, if None) that run on this thread while it is entered.

    Subclasses override `before` and `after`. If all kinds have replaced kernels, no dispatch mode is needed. Copies of
    views are neither counted nor observed: earlier steps' changes of a base decide if its view is computed again.
    """

    def __init__(self, kinds: Collection[str] | None = None) -> None:
        self._kinds = kinds
        self._turns: dict[str, int] = collections.defaultdict(int)
        by_kernels = kinds is not None and _BY_KERNEL.issuperset(kinds)
        self._mode = None if by_kernels else _Mode(self)

    def __enter__(self) -> None:
        """Start observing as the innermost observer, with all counts at 0."""
        self._turns.clear()
        _thread.observers.append(self)
        if self._mode is not None:
            self._mode.__enter__()

    def __exit__(self, *_: object) -> None:
        """Stop observing, also after an error, which passes through."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
        _thread.observers.remove(self)

    def around(self, node: Any) -> None:
        """Enter this observer whenever an autograd node runs, and leave it after the node."""
        node.register_prehook(lambda gradients: self.__enter__())
        node.register_hook(lambda given, taken: self.__exit__())

    def tells(self, kind: str) -> bool:
        """Return True if ops of this kind are observed; the others run unchanged."""
        return self._kinds is None or kind in self._kinds

    def turn(self, kind: str) -> int:
        """Return the number of earlier ops of this kind since the observer was entered, and count one more."""
        turn = self._turns[kind]
        self._turns[kind] += 1
        return turn

    def before(self, kind: str, turn: int, operands: Sequence[Any]) -> Sequence[Any]:
        """Return the positional arguments that the op receives instead of these; by default the same.

        - `kind`: name of the op's overload, such as `aten.mm.default`.
        - `turn`: number of earlier ops of this kind.

        Ops in this method are not observed.
        """
        return operands

    def after(self, kind: str, turn: int, results: Sequence[Any]) -> None:
        """Use the results of the op; by default do nothing. Ops in this method are not observed."""


class _Mode(TorchDispatchMode):
    """Dispatch mode that reports ops whose kernels are not replaced."""

    def __init__(self, ops: OpObserver) -> None:
        super().__init__()
        self._ops = ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op, and report it to the observer if its kind is observed and its kernel is not replaced."""
        kind = _kind(func)
        if is_traced():
            return func(*args, **(kwargs or {}))
        if kind is None or kind in _BY_KERNEL or not self._ops.tells(kind):
            return _run(func, args, kwargs or {})
        turn = self._ops.turn(kind)
        with without_observers():
            args = self._ops.before(kind, turn, args)
        made = _run(func, args, kwargs or {})
        with without_observers():
            self._ops.after(kind, turn, _results(made))
        return made


_include: Any = vars(torch._C)["_dispatch_tls_local_include_set"]
_exclude: Any = vars(torch._C)["_dispatch_tls_local_exclude_set"]
_forced: Any = vars(torch._C)["_ForceDispatchKeyGuard"]


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an op under a mode exactly as it runs without one, and return its result.

    PyTorch/XLA wraps tensors that it creates for functionalisation, but not below it, where a mode is. Without the
    wrapper a view of the tensor is a copy. Writes to the view are then lost, and reads of it are gathered.
    """
    if any(map(_has_xla, args)) or any(map(_has_xla, kwargs.values())):
        return func(*args, **kwargs)
    with _forced(_include(), _exclude().remove(torch._C.DispatchKey.Functionalize)):
        return func(*args, **kwargs)


def _has_xla(given: Any) -> bool:
    """Return True for a tensor on the XLA device, or a (nested) list with one."""
    if isinstance(given, torch.Tensor):
        return on_xla(given)
    return isinstance(given, (list, tuple)) and any(map(_has_xla, given))


class _Thread(threading.local):
    """The observers of one thread."""

    def __init__(self) -> None:
        self.observers: list[OpObserver] = []
        """The observers that are entered, the innermost last."""


_thread = _Thread()


@contextlib.contextmanager
def without_observers() -> Iterator[None]:
    """Hide the ops in the context from all observers and dispatch modes of this thread."""
    observers, _thread.observers = _thread.observers, []
    try:
        with contextlib.nullcontext() if _get_current_dispatch_mode() is None else _disable_current_modes():
            yield
    finally:
        _thread.observers = observers


def hidden_from_observers(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which traces another program, in a form whose modules and ops are not observed."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with traced(), without_observers() if _thread.observers else contextlib.nullcontext():
            return function(*args, **kwargs)

    return run


_standing: set[str] = set()
"""Ops whose kernels are replaced now."""


def stand_in(kinds: Collection[str] | None = None) -> None:
    """Replace PyTorch/XLA's kernels of exactly these kinds of ops (of all in `_KERNELS`, if None), and restore all
    others.

    Ops in `_KERNELS` that are not replaced are not observed. A replaced kernel costs some microseconds per op, even
    without an observer.
    """
    apart = None if kinds is None else set(map(whole_kind, kinds))
    wanted = {name for name in _KERNELS if apart is None or _kind_of(name) in apart}
    restore_kernels(_standing - wanted)
    replace_kernels({name: _telling(name) for name in wanted - _standing})
    _standing.clear()
    _standing.update(wanted)


@functools.cache
def _telling(name: str) -> Callable[..., Any]:
    """Wrap PyTorch/XLA's kernel of an op so that it notifies all entered observers of its kind; cached by name.

    An op that adds a bias, and a convolution's backward pass, then run as two ops with kinds of their own.
    """
    kind = _kind_of(name)
    kernel = torch.library.get_kernel(f"aten::{name}", "XLA").call_boxed
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.XLA)

    def run(*args: Any, **kwargs: Any) -> Any:
        """Run the op, reported to the observers of its kind."""
        observers = _thread.observers
        asking = [each for each in observers if each.tells(kind)] if observers else ()
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
                *operands, (_, weight, bias) = args
                given, _, _ = _tell(asking, kind, by_kernel, (*operands, [True, False, False]), {})
                _, *rest = _tell(asking, kind + OF_WEIGHT, by_kernel, (*operands, [False, weight, bias]), {})
                return given, *rest
            return _tell(asking, kind, by_kernel, args, kwargs)

    return run


@contextlib.contextmanager
def _telling_no_one() -> Iterator[None]:
    """Hide the ops that an observed op runs inside from all observers; modes stay active."""
    observers, _thread.observers = _thread.observers, []
    try:
        yield
    finally:
        _thread.observers = observers


def tell_of_loop(loop: Callable[..., Sequence[Any]], args: Sequence[Any]) -> Sequence[Any]:
    """Run a loop of PyTorch/XLA's as one op of kind `LOOP`, and notify all entered observers; return its results.

    `args` are its flat operands, which observers may replace.
    """
    asking = [each for each in _thread.observers if each.tells(LOOP)]
    if not asking:
        return loop(*args)
    with _telling_no_one():
        return _tell(asking, LOOP, loop, args, {})


def _tell(asking: Sequence[OpObserver], kind: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run an op and return its result. The innermost observer sees the operands first; the outermost sees the results
    first.

    - `asking`: the observers of this kind of op, the innermost last.
    - `kind`: kind that the observers see.
    - `run`: function that runs the op on `args` and `kwargs`.
    """
    turns = [each.turn(kind) for each in asking]
    for each, turn in zip(reversed(asking), reversed(turns), strict=True):
        args = each.before(kind, turn, args)
    made = run(*args, **kwargs)
    for each, turn in zip(asking, turns, strict=True):
        each.after(kind, turn, _results(made))
    return made


def _bias_apart(kind: str, args: Sequence[Any]) -> tuple[Any, tuple[Any, ...], Any] | None:
    """Split an op into a product, its operands, and the bias that is added, ready to broadcast; None if the op is not
    both.

    The product's result is pinned between the two: XLA would otherwise gather the bias broadcast over the whole result.
    """
    if kind == "aten.addmm.default":
        bias, *factors = args
        return torch.ops.aten.mm.default, tuple(factors), bias
    if kind == "aten.convolution.default" and args[2] is not None:
        data, weight, bias, *how = args
        spread = bias.reshape(-1, *[1] * (data.dim() - 2))
        return torch.ops.aten.convolution.default, (data, weight, None, *how), spread
    return None


def _makes_two(kind: str, args: Sequence[Any]) -> bool:
    """Return True for a convolution's backward pass that computes gradients of its input and of weight or bias.

    It runs two convolutions, and a plan may want other operands for each. XLA removes unused results.
    """
    return kind == "aten.convolution_backward.default" and args[-1][0] and any(args[-1][1:])


def _results(made: Any) -> Sequence[Any]:
    """Return an op's results as a sequence."""
    return made if isinstance(made, (tuple, list)) else (made,)


_KNOWN_AS = {"aten._native_batch_norm_legit.no_stats": "aten.native_batch_norm.default"}
"""Ops of compiled regions -> the ops that a script runs for them; pins have the same numbers in both."""


@functools.cache
def _kind(func: Any) -> str | None:
    """Return the name of an op's overload, or of the op that scripts run for it; None for copies of views."""
    kind = str(func)
    return None if kind.split(".")[1].endswith("_copy") else _KNOWN_AS.get(kind, kind)


def _kind_of(name: str) -> str:
    """Return the kind of an op in `_KERNELS`, with the overload `default` if it names none."""
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


_BY_KERNEL = frozenset({*map(_kind_of, _KERNELS), LOOP})
"""Kinds that replaced kernels report, so that no mode is needed."""
