"""A trial of tensor-parallel styles: the module runs on tensors without values, whole and with split layers."""

import contextlib
import dataclasses
import logging
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from autoshard.planning import Plan, module_pattern
from autoshard.program import Program, Role


_log = logging.getLogger("autoshard")

_VIEWS = {"view", "reshape", "flatten", "unflatten", "_unsafe_view"}
"""Functions that regroup dims."""
_PARTS = {"chunk", "split", "tensor_split", "narrow", "glu", "__getitem__", "unbind", "select"}
"""Functions that take parts of a dim."""
_ALONG = {"softmax", "log_softmax", "cumsum", "cumprod", "logsumexp", "sort", "topk", "argmax", "flip", "roll"}
"""Functions whose results along their dim depend on the whole of it."""

_KERNELS = ("_attn_implementation_internal", "_experts_implementation_internal")
"""Attributes of a transformers configuration that name the code of attention and experts."""

_Shapes = list[tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class _TrialCall:
    """One call of a torch function."""

    path: str
    """Name of the innermost module that was running."""
    name: str
    inputs: _Shapes
    """Shapes of all tensors among the arguments."""
    outputs: _Shapes
    dim: int | None
    """The argument `dim`; None without one."""


def unproven_parents(plan: Plan, program: Program | None, styles: Mapping[str, str], tensor: int) -> set[str] | None:
    """Return the parents of split layers whose code would compute something else on a part of the columns.

    A parent counts if a function in it raises on parts, or returns no part of the whole result. Examples are a view
    that takes columns for rows, and a sum over split columns. None if the module cannot run.

    - `styles`: fitted style by name of a layer; only `colwise` and `rowwise` leave values split.
    - `tensor`: number of devices that share each layer.
    """
    if program is None or program.eager is None:
        return None
    twin = program.eager
    module = twin.function.module
    names = {name: child for name, child in module.named_modules() if name}
    kinds: dict[str, tuple[str, str]] = {}
    for name, style in styles.items():
        # A layer of transformers' Conv1D has the same values around it.
        kind = style.removeprefix("conv1d_")
        if kind in ("colwise", "rowwise"):
            pattern = module_pattern(plan, f"{name}.weight")
            matching = (each for each in names if re.match(pattern, f"{each}.weight"))
            kinds |= {each: (kind, name.rpartition(".")[0]) for each in matching}
    if not kinds:
        return set()
    batch = {
        each.name.removeprefix("batch."): np.zeros(each.shape, each.dtype)
        for each in program.arguments
        if each.role is Role.BATCH
    }
    with _fake_tensors(module):
        whole, error = _run(twin, module, batch, dict.fromkeys(kinds, ""), tensor)
        if error is not None:
            return None
        failed: set[str] = set()
        while True:
            split = {name: "" if parent in failed else kind for name, (kind, parent) in kinds.items()}
            calls, error = _run(twin, module, batch, split, tensor)
            wrong = [path for path, call in _pairs(whole, calls) if not _is_part(call[0], call[1], tensor)]
            found = {_parent(path, kinds) for path in (*wrong, *([] if error is None else [error]))}
            if not found:
                return failed
            if found <= failed or None in found:
                return {parent for _, parent in kinds.values()}
            failed |= {parent for parent in found if parent is not None}


def _parent(path: str, kinds: Mapping[str, tuple[str, str]]) -> str | None:
    """Return the parent, by its name in a plan, of the split layers nearest to the module `path`; None without one."""
    while True:
        for name, (_, parent) in kinds.items():
            if name.rpartition(".")[0] == path or name == path:
                return parent
        if not path:
            return None
        path = path.rpartition(".")[0]


def _pairs(whole: list[_TrialCall], split: list[_TrialCall]) -> Iterator[tuple[str, tuple[_TrialCall, _TrialCall]]]:
    """Yield the module and both calls for each call of two runs, up to the first call of another function."""
    for a, b in zip(whole, split, strict=False):
        yield b.path, (a, b)
        if (a.name, a.path) != (b.name, b.path):
            return


def _split_dim(whole: tuple[int, ...], part: tuple[int, ...], tensor: int) -> int | None:
    """Return the only dim by which a shape is a part of another; None for equal shapes. Raise ValueError otherwise."""
    differing = [dim for dim, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
    if not differing:
        return None
    (dim,) = differing
    if whole[dim] != tensor * part[dim]:
        raise ValueError(dim)
    return dim


def _is_part(whole: _TrialCall, part: _TrialCall, tensor: int) -> bool:
    """Return True if a call on parts returns the part of the whole results that its inputs imply."""
    if whole.name != part.name or len(whole.outputs) != len(part.outputs) or len(whole.inputs) != len(part.inputs):
        return False
    try:
        inputs = [_split_dim(a, b, tensor) for a, b in zip(whole.inputs, part.inputs, strict=True)]
        outputs = [_split_dim(a, b, tensor) for a, b in zip(whole.outputs, part.outputs, strict=True)]
    except ValueError:
        return False
    if all(dim is None for dim in inputs):
        return all(dim is None for dim in outputs)
    if None in outputs:
        return False
    first, result = inputs[0], outputs[0]
    if first is None or result is None:
        return True
    shape, made = whole.inputs[0], whole.outputs[0]
    if whole.name in _VIEWS:
        # The rows before the split dim must stay before it: half of the heads is no half of the sequence.
        return math.prod(shape[:first]) == math.prod(made[:result])
    if whole.name in _PARTS and len(shape) == len(made):
        return shape[first] == made[first]
    if whole.name in _ALONG:
        return whole.dim is None or whole.dim % len(shape) != first
    return True


def _run(
    twin: Any, module: Any, batch: Mapping[str, Any], split: Mapping[str, str], tensor: int
) -> tuple[list[_TrialCall], str | None]:
    """Return the calls of the module's run, and the name of the module that failed, or None.

    `split` has `colwise`, `rowwise` or, for a whole layer, an empty text; calls within these layers are left out.
    """
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils import _pytree

    running = [""]
    calls: list[_TrialCall] = []

    def shapes(tree: Any) -> _Shapes:
        """Return the shapes of all tensors in a tree."""
        return [tuple(leaf.shape) for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]

    class Record(TorchFunctionMode):
        """Record of every call with a tensor as result."""

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            """Run the function, and record its shapes."""
            kwargs, taken = kwargs or {}, shapes((args, kwargs))
            result = function(*args, **kwargs)
            given = shapes(result)
            if given and running[-1] not in split:
                dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
                own = dim if isinstance(dim, int) and not isinstance(dim, bool) else None
                calls.append(_TrialCall(running[-1], getattr(function, "__name__", ""), taken, given, own))
            return result

    def enter(name: str) -> Any:
        """Return a hook that records the start of a module, and gives a layer split by rows whole inputs."""

        def hook(child: Any, args: Any) -> Any:
            """Record the start; a part of the columns becomes all columns."""
            running.append(name)
            if split.get(name) == "rowwise":
                with torch._C.DisableTorchFunction():
                    return (args[0].repeat_interleave(tensor, dim=-1), *args[1:])
            return None

        return hook

    def leave(name: str) -> Any:
        """Return a hook that records the end of a module, and takes a part of the columns of a layer that is split."""

        def hook(child: Any, args: Any, output: Any) -> Any:
            """Record the end; all columns become a part of them."""
            running.pop()
            if split.get(name) == "colwise":
                with torch._C.DisableTorchFunction():
                    return output.narrow(-1, 0, output.shape[-1] // tensor)
            return None

        return hook

    hooks = []
    for name, child in module.named_modules():
        hooks += [child.register_forward_pre_hook(enter(name)), child.register_forward_hook(leave(name))]
    try:
        with Record(), torch.no_grad():
            twin.eager.call(module, batch)
    except Exception as error:  # a module's own code and torch's raise any kind
        _log.info("the trial of tensor parallelism ended in %s: %s: %s", running[-1], type(error).__name__, error)
        return calls, running[-1]
    finally:
        for hook in hooks:
            hook.remove()
    return calls, None


@contextlib.contextmanager
def _fake_tensors(module: Any) -> Iterator[None]:
    """Give a module tensors without values on the host while inside, and run torch without values.

    Models of transformers compute attention and experts by their own eager code there.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    before: list[tuple[dict[str, Any], dict[str, Any]]] = []
    made: dict[int, Any] = {}
    with mode:
        for child in set(module.modules()):
            config: Any = getattr(child, "config", None)
            if hasattr(config, "_attn_implementation"):
                before.append((vars(config), {key: vars(config)[key] for key in _KERNELS if key in vars(config)}))
                config._attn_implementation = config._experts_implementation = "eager"
            for tensors in (child._parameters, child._buffers):
                before.append((tensors, dict(tensors)))
                for key, value in tensors.items():
                    if value is not None:
                        empty = torch.empty(value.shape, dtype=value.dtype, device="cpu")
                        tensors[key] = made.setdefault(id(value), empty)
    try:
        with mode:
            yield
    finally:
        for tensors, values in reversed(before):
            tensors.update(values)
