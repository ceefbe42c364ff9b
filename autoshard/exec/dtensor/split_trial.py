"""Trial of a torch function on DTensors: its values and gradients are compared with those on one device."""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree


MOST_BYTES = 1 << 28
"""Most bytes of arguments and results of a function whose values are compared. Larger functions are only tried."""


def settle(value: Any) -> Any:
    """Complete the open sums of a DTensor; return any other value unchanged."""
    if not isinstance(value, DTensor):
        return value
    return moved(value, [Replicate() if place.is_partial() else place for place in value.placements])


def map_outputs(function: Callable[[Any], Any], outputs: Any) -> Any:
    """Return a module's outputs with a function applied to each DTensor, also within dataclasses."""

    def mapped(leaf: Any) -> Any:
        """Apply the function to a DTensor, and to those in a dataclass, of which a copy is returned."""
        if isinstance(leaf, DTensor):
            return function(leaf)
        if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
            return leaf
        copied = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            if hasattr(leaf, field.name):  # frozen dataclasses refuse a plain assignment
                object.__setattr__(copied, field.name, map_outputs(function, getattr(leaf, field.name)))
        return copied

    return _pytree.tree_map(mapped, outputs)


def moved(tensor: Any, places: Sequence[Any]) -> Any:
    """Return a DTensor in other placements, itself if it has them already."""
    if list(tensor.placements) == list(places):
        return tensor
    result = tensor.redistribute(placements=list(places))
    if result.requires_grad and any(place.is_partial() for place in tensor.placements):
        # DTensor takes a gradient that is a partial sum there for the whole sum.
        result.register_hook(PlacedGradient(places))
    return result


class PlacedGradient:
    """Hook of a tensor that places its gradient; the hook is not serialised with the tensor."""

    __torch_unserializable__ = True

    def __init__(self, places: Sequence[Any]) -> None:
        self._places = list(places)

    def __call__(self, gradient: Any) -> Any:
        """Return the gradient in the hook's placements; a plain tensor is returned unchanged."""
        if not isinstance(gradient, DTensor):
            return gradient
        known, shard, stride = gradient._spec.tensor_meta, gradient._local_tensor, gradient.stride()
        # Under autocast, DTensor gives gradients of norms the dtype of the results, of which optimizers fail. After an
        # all-gather it states the strides of before, of which views fail.
        dims = [dim for dim, size in enumerate(shard.shape) if size > 1]
        gathered = sorted(dims, key=shard.stride) != sorted(dims, key=gradient.stride)
        if gathered:
            shard, stride = shard.contiguous(), torch.empty(gradient.shape, device="meta").stride()
        if gathered or known is not None and known.dtype != gradient.dtype:
            sizes = {"shape": gradient.shape, "stride": stride}
            gradient = DTensor.from_local(shard, gradient.device_mesh, gradient.placements, run_check=False, **sizes)
        return gradient if list(gradient.placements) == self._places else gradient.redistribute(placements=self._places)


def trial(func: Callable[..., Any], run: Callable[..., Any], args: Any, kwargs: Any, changes: bool) -> str:
    """Try a function on DTensors and return the failure as text; "" if it succeeds.

    No argument is changed, and no random numbers are consumed. All processes of the mesh must call it, since it
    gathers.

    - `run`: `run(func, args, kwargs)` runs the function on DTensors.
    - `args`, `kwargs`: arguments, none of them a partial sum, at least one of them a DTensor.
    - `changes`: True if the function writes to its first argument.

    Results and gradients must equal those on whole tensors but for rounding. They are not compared for functions that
    draw random numbers, that return uninitialised tensors, or whose tensors exceed `MOST_BYTES`.
    """
    tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, DTensor)]
    mesh = tensors[0].device_mesh
    device = torch.get_device_module(mesh.device_type)
    own = [] if mesh.device_type == "cpu" else [device.current_device()]
    # A checkpoint around the trial must not count the tensors that the trial saves for its gradients.
    keep = torch.autograd.graph.saved_tensors_hooks(_itself, _itself)
    with keep, torch.random.fork_rng(own, device_type="cuda" if mesh.device_type == "cpu" else mesh.device_type):
        before = _random_state(mesh)
        try:
            results = [settle(each) for each in _values(func, lambda a, k: run(func, a, k), args, kwargs, changes)]
        except Exception as error:  # DTensor raises many kinds; the script's own error recurs on whole tensors
            return _said(error)
        if getattr(func, "__name__", "").startswith(("empty", "new_empty")):
            return ""
        if before != _random_state(mesh):
            return ""  # two random draws always differ
        if (
            sum(each.numel() * each.element_size() for each in (*tensors, *results) if isinstance(each, DTensor))
            > MOST_BYTES
        ):
            return ""
        whole, keywords = _pytree.tree_map_only(DTensor, _whole_copy, (args, kwargs))
        try:
            expected = list(_values(func, lambda a, k: func(*a, **k), whole, keywords, changes))
        except Exception:
            return "it fails on whole tensors"
    allowed = _rounding([*tensors, *expected], mesh.device_type)
    # Every value is compared: gathering needs all processes, and they may see different results.
    matches = [len(results) == len(expected)] + [_alike(a, b, allowed) for a, b in zip(results, expected, strict=False)]
    return "" if all(matches) else "it gives other values than on one device"


def _rounding(values: Sequence[Any], device_type: str) -> float:
    """Return the largest accepted difference of values, relative to the largest value of their tensor.

    It is the square root of the coarsest epsilon of the floating dtypes involved; 0 without any. The autocast dtype is
    involved if autocast is on.
    """
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()}
    if torch.is_autocast_enabled(device_type):
        dtypes.add(torch.get_autocast_dtype(device_type))
    return math.sqrt(max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0))


def _itself(value: Any) -> Any:
    """Return the value itself, as a hook that saves tensors unchanged."""
    return value


def _said(error: Exception) -> str:
    """Return the first 160 characters of an error's text, without the arguments that it lists; its type's name if that
    is empty.
    """
    text = " ".join(str(error).partition(", args_schema")[0].partition("DTensor(local")[0].split())
    return text[:160].rstrip(" .,[(") or type(error).__name__


def _random_state(mesh: Any) -> tuple[bytes, ...]:
    """Return the states of the random generators of the host and, unless that is a CPU, of the mesh's device."""
    states = [torch.get_rng_state()]
    if mesh.device_type != "cpu":
        states.append(torch.get_device_module(mesh.device_type).get_rng_state())
    return tuple(bytes(state.tolist()) for state in states)


def _whole_copy(tensor: Any) -> Any:
    """Return a DTensor gathered as a plain, detached tensor that requires a gradient if the original does."""
    return tensor.detach().full_tensor().requires_grad_(tensor.requires_grad)


def running_statistics(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the tensors that a batch norm updates; torch does not count these writes."""
    if getattr(func, "__name__", "") != "batch_norm":
        return []
    first = 3 if func is torch.batch_norm else 1
    given = [*args[first : first + 2], kwargs.get("running_mean"), kwargs.get("running_var")]
    return [each for each in given if isinstance(each, torch.Tensor)]


def _values(
    func: Callable[..., Any], run: Callable[[Any, Any], Any], args: Any, kwargs: Any, changes: bool
) -> Iterator[Any]:
    """Yield results of a function for copies of its arguments, then arguments that it wrote to, then gradients.

    - `run`: `run(args, kwargs)` runs `func`.
    - `changes`: True if the function writes to its first argument, which then stands for the results.

    The gradients are those of the copies, for made-up gradients of the results; None for a copy that the results do not
    use.
    """
    taken: list[Any] = []
    writable: list[tuple[Any, list[int]]] = []

    def copied(tensor: Any) -> Any:
        """Return a detached copy of a tensor, and record it among those with gradients or those that may be written."""
        copy = tensor.detach()
        if tensor.requires_grad and torch.is_grad_enabled():
            taken.append(copy.requires_grad_())
            return copy.clone() if changes else copy
        # A function may write to any tensor without a gradient: running statistics, or what `out` names.
        copy = copy.clone()
        writable.append((copy, _writes_to(copy)))
        return copy

    given, keywords = _pytree.tree_map_only(torch.Tensor, copied, (args, kwargs))
    returned = run(given, keywords)
    results = _pytree.tree_leaves(given[:1] if changes else returned)
    yield from results
    yield from running_statistics(func, given, keywords)
    yield from (copy for copy, before in writable if _writes_to(copy) != before)
    differ = [each for each in results if isinstance(each, torch.Tensor) and each.requires_grad]
    if differ and taken:
        seeds = [_ramp(each) for each in differ]
        yield from torch.autograd.grad(differ, taken, seeds, allow_unused=True)


def _writes_to(tensor: Any) -> list[int]:
    """Return torch's counts of the writes to a tensor and, for a DTensor, to its shard."""
    return [each._version for each in (tensor, getattr(tensor, "_local_tensor", tensor))]


def _ramp(like: Any) -> Any:
    """Return varied values (cosines), in the shape, dtype and placements of a tensor, with partial sums replicated."""
    size = math.prod(like.shape)
    values = (
        # Equal values would hide an exchange of elements. Cosines at steps of 0.7 do not repeat.
        torch.arange(size, device=like.device, dtype=torch.float32).mul_(0.7).cos_().to(like.dtype).reshape(like.shape)
    )
    if not isinstance(like, DTensor):
        return values
    places = [Replicate() if place.is_partial() else place for place in like.placements]
    whole = DTensor.from_local(values, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return whole.redistribute(placements=places)


def _alike(found: Any, wanted: Any, allowed: float) -> bool:
    """Return True if a DTensor equals the expected tensor in shape, dtype and, but for rounding, in values.

    The largest difference is `allowed` times the largest usual value. Infinities, NaNs and values from 1e30 on must
    stand at the same places. Integers and values that are no tensors must be equal.
    """
    if not isinstance(wanted, torch.Tensor):
        return type(found) is type(wanted) and (not isinstance(wanted, (int, float, bool, str)) or found == wanted)
    if not isinstance(found, DTensor) or found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    found, wanted = cast(DTensor, found.detach()).full_tensor(), wanted.detach()
    if found.shape != wanted.shape:  # the shards are not what the DTensor says that they are
        return False
    if not wanted.is_floating_point():
        return bool(torch.equal(found, wanted))
    # Masks use the least finite number of a dtype: it would hide all other differences by its scale.
    usual = wanted.isfinite() & (wanted.abs() < 1e30)
    if not torch.equal(torch.where(usual, 0, wanted).nan_to_num(1.0), torch.where(usual, 0, found).nan_to_num(1.0)):
        return False
    scale = torch.where(usual, wanted, 0).abs().max() if wanted.numel() else 0.0
    error = torch.where(usual, found - wanted, 0).abs()
    return bool((error <= allowed * scale).all())


def is_sound(tensor: Any, divides: Callable[[Any, Any], bool]) -> bool:
    """Return True if this device's shard has the shape that a DTensor's shape and placements imply.

    True too for other values, and for a DTensor that is split unevenly. `divides` is a test of a DTensor and a
    placement.
    """
    if not isinstance(tensor, DTensor):
        return True
    shape = list(tensor.shape)
    for axis, place in enumerate(tensor.placements):
        if isinstance(place, Shard):
            if not divides(tensor, place):
                return True
            shape[place.dim] //= tensor.device_mesh.size(axis)
    return list(tensor.to_local().shape) == shape
