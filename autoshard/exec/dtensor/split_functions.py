"""Functions and mixtures of experts that run on the shards of each device."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from autoshard.exec.dtensor.split_trial import settle


def attend(func: Callable[..., Any], given: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """Run attention on each device's shard of batches and heads; return None if the arguments do not allow it.

    Query, key and value must be the only positional arguments, DTensors of (batch, heads, sequence, features). The
    query's splits of batch and heads stay, if they fit all three; all other splits are gathered. The mask, if any, is
    split alike. The result is a DTensor. DTensor supports the kernels of some backends only, and no split mask.
    """
    if len(given) > 3 or not all(isinstance(each, DTensor) and each.ndim == 4 for each in given[:3]):
        return None
    query, mask = given[0], keywords.get("attn_mask")
    masks = [] if mask is None else [mask]
    places: list[Any] = []
    for place in query.placements:
        dim = place.dim if isinstance(place, Shard) else 3
        fits = dim == 1 or (dim == 0 and all(each.shape[0] == query.shape[0] for each in given[:3]))
        places.append(Shard(dim) if fits else Replicate())
    shared = [axis for axis, place in enumerate(places) if place == Shard(1)]
    if any(each.shape[1] % math.prod(query.device_mesh.size(axis) for axis in shared) for each in given[:3]):
        places = [Replicate() if axis in shared else place for axis, place in enumerate(places)]

    def local(tensor: Any) -> Any:
        """Return this device's part of a tensor whose leading dims may be missing, as those of a mask.

        Dims of size 1 stay whole, and their gradients are partial sums.
        """
        missing = 4 - tensor.ndim
        own, grads = [], []
        for place in places:
            dim = place.dim - missing if isinstance(place, Shard) else -1
            whole = dim < 0 or tensor.shape[dim] == 1
            own.append(Replicate() if whole else Shard(dim))
            grads.append(Partial() if whole and isinstance(place, Shard) else own[-1])
        return tensor.redistribute(placements=own).to_local(grad_placements=grads)

    if masks:
        keywords = keywords | {"attn_mask": local(mask)}
    result = func(*map(local, given), **keywords)
    return DTensor.from_local(result, query.device_mesh, places, run_check=False)


def embed(func: Callable[..., Any], given: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """Look up each device's ids in its part of the table; return None if the arguments do not allow it.

    Ids and table must be DTensors, the rows split evenly, without `max_norm`, `scale_grad_by_freq` and `sparse`. Over
    an axis that splits the ids the table is gathered; over one that splits rows the result is a partial sum. Splits of
    columns stay.

    DTensor's own lookup needs all ids where rows of the table are split, and gathers the gradients of all ids.
    """
    named = dict(zip(_EMBEDDING, given, strict=False)) | keywords
    ids, table = named.pop("input", None), named.pop("weight", None)
    changes = named.get("max_norm") is not None or named.get("scale_grad_by_freq") or named.get("sparse")
    if changes or not isinstance(ids, DTensor) or not isinstance(table, DTensor):
        return None
    own_ids: list[Any] = []
    own_table, grads, out = [], [], []
    for id_place, place in zip(ids.placements, table.placements, strict=True):
        by_id = isinstance(id_place, Shard)
        own_ids.append(id_place if by_id else Replicate())
        own_table.append(Replicate() if by_id else place)
        grads.append(Partial() if by_id else place)
        out.append(id_place if by_id else Partial() if place == Shard(0) else
                   Shard(ids.ndim) if place == Shard(1) else Replicate())  # fmt: skip
    local_ids, part = local_part(ids, own_ids), local_part(table, own_table, grads)
    mesh, first = ids.device_mesh, 0
    # This device's number among the parts of the rows, with earlier mesh axes major, as DTensor splits a dim.
    for axis in [axis for axis, place in enumerate(own_table) if place == Shard(0)]:
        first = first * mesh.size(axis) + mesh.get_local_rank(axis)
    if Shard(0) not in own_table:
        result = func(local_ids, part, **named)
    else:
        if len(part) * math.prod(mesh.size(axis) for axis, place in enumerate(own_table) if place == Shard(0)) != len(
            table
        ):
            return None
        padding = named.pop("padding_idx", None)
        # The padding row counts from the start of this part; in other parts it has no number.
        if padding is not None and 0 <= (padding := padding % len(table) - first * len(part)) < len(part):
            named["padding_idx"] = padding
        row = local_ids - first * len(part)
        elsewhere = (row < 0) | (row >= len(part))
        result = func(row.masked_fill(elsewhere, 0), part, **named).masked_fill(elsewhere.unsqueeze(-1), 0)
    return DTensor.from_local(result, mesh, out, run_check=False)


def convolve(func: Callable[..., Any], given: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """Run a convolution on some images or to some features; return None if the arguments do not allow it.

    Images, kernel and bias must be DTensors, and the images have a batch dim. Over each mesh axis a split of the batch
    stays, else a split of the kernel's output features without groups; all else is gathered. DTensor's own convolution
    splits space.
    """
    named = dict(zip(_CONVOLUTION, given, strict=False)) | keywords
    images, kernel, bias = (named.pop(name, None) for name in ("input", "weight", "bias"))
    if not isinstance(images, DTensor) or not isinstance(kernel, DTensor) or images.ndim != kernel.ndim:
        return None
    if bias is not None and not isinstance(bias, DTensor):
        return None
    places: dict[str, list[Any]] = {name: [] for name in ("images", "kernel", "bias", "images'", "kernel'", "out")}
    for image_place, place in zip(images.placements, kernel.placements, strict=True):
        batch = image_place == Shard(0)
        features = not batch and place == Shard(0) and named.get("groups", 1) == 1
        split = (Shard(0), Replicate(), Replicate(), Shard(0), Partial(), Shard(0)) if batch else (
            (Replicate(), Shard(0), Shard(0), Partial(), Shard(0), Shard(1)) if features else (Replicate(),) * 6
        )  # fmt: skip
        for name, each in zip(places, split, strict=True):
            places[name].append(each)
    own_bias = None if bias is None else local_part(bias, places["bias"], places["kernel'"])
    own_images = local_part(images, places["images"], places["images'"])
    result = func(own_images, local_part(kernel, places["kernel"], places["kernel'"]), own_bias, **named)
    return DTensor.from_local(result, images.device_mesh, places["out"], run_check=False)


def multiply(func: Callable[..., Any], given: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """Run a linear layer on values split in a dim between the first and the last; return None for other values.

    Splits of all dims but the last stay; over other axes a split of the weight's rows splits the result's last dim. All
    else is gathered. Value, weight and bias must be DTensors. DTensor's own function would merge the leading dims.
    """
    named = dict(zip(("input", "weight", "bias"), given, strict=False)) | keywords
    value, weight, bias = (named.get(name) for name in ("input", "weight", "bias"))
    if not isinstance(value, DTensor) or not isinstance(weight, DTensor) or not isinstance(bias, (DTensor, type(None))):
        return None
    last = value.ndim - 1
    if weight.ndim != 2 or not any(isinstance(place, Shard) and 0 < place.dim < last for place in value.placements):
        return None
    places: dict[str, list[Any]] = {name: [] for name in ("taken", "weight", "taken'", "weight'", "out")}
    for value_place, place in zip(value.placements, weight.placements, strict=True):
        rows = isinstance(value_place, Shard) and value_place.dim < last
        columns = not rows and place == Shard(0)
        split = (value_place, Replicate(), value_place, Partial(), value_place) if rows else (
            (Replicate(), Shard(0), Partial(), Shard(0), Shard(last)) if columns else (Replicate(),) * 5
        )  # fmt: skip
        for name, each in zip(places, split, strict=True):
            places[name].append(each)
    own_bias = None if bias is None else local_part(bias, places["weight"], places["weight'"])
    own_values = local_part(value, places["taken"], places["taken'"])
    result = func(own_values, local_part(weight, places["weight"], places["weight'"]), own_bias)
    return DTensor.from_local(result, value.device_mesh, places["out"], run_check=False)


def choose(func: Callable[..., Any], given: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """Run top-k with whole rows and return values and indices, split as the other dims are; DTensor has no gradient of
    top-k.

    Returns None if the input is no DTensor, or if there is `out`.
    """
    named = dict(zip(("input", "k", "dim", "largest", "sorted"), given, strict=False)) | keywords
    rows = named.pop("input", None)
    if not isinstance(rows, DTensor) or "out" in named:
        return None
    places = _whole_in(rows, {named.get("dim", -1) % max(rows.ndim, 1)})
    values, indices = func(local_part(rows, places), **named)
    results = (DTensor.from_local(each, rows.device_mesh, places, run_check=False) for each in (values, indices))
    return torch.return_types.topk(tuple(results))  # pyrefly: ignore[bad-argument-type]


def pad(func: Callable[..., Any], given: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """Pad values, after gathering the dims that are padded; return None if the input is no DTensor or widths are no
    integers.

    Splits of other dims stay.
    """
    named = dict(zip(("input", "pad", "mode", "value"), given, strict=False)) | keywords
    values, widths = named.pop("input", None), named.get("pad", ())
    if not isinstance(values, DTensor) or not all(isinstance(width, int) for width in widths):
        return None
    places = _whole_in(values, {values.ndim - 1 - k // 2 for k, width in enumerate(widths) if width})
    return DTensor.from_local(func(local_part(values, places), **named), values.device_mesh, places, run_check=False)


def _whole_in(tensor: Any, dims: set[int]) -> list[Any]:
    """Return a tensor's placements, with `Replicate` instead of partial sums and of splits of `dims`."""
    return [p if isinstance(p, Shard) and p.dim not in dims else Replicate() for p in tensor.placements]


def local_part(tensor: Any, places: Sequence[Any], grads: Sequence[Any] | None = None) -> Any:
    """Return this device's part of a DTensor in some placements; `grads` are the placements of its gradient, by default
    the same.
    """
    return tensor.redistribute(placements=list(places)).to_local(grad_placements=list(grads or places))


_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
"""Positional parameters of `torch.nn.functional.embedding`."""
_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
"""Positional parameters of torch's convolutions."""
# Torch function -> its implementation on shards, which returns None if the arguments do not allow it.
ON_SHARDS: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.scaled_dot_product_attention: attend,
    torch.nn.functional.embedding: embed,
    torch.nn.functional.linear: multiply,
    torch.topk: choose,
    torch.Tensor.topk: choose,
    torch.nn.functional.pad: pad,
    torch.nn.functional.conv1d: convolve,
    torch.nn.functional.conv2d: convolve,
    torch.nn.functional.conv3d: convolve,
}


def is_experts(module: Any) -> bool:
    """Return True if a module is a block of experts of transformers, whose parameters all have experts as first dim.

    It has an integer `num_experts`, `_is_expert_parallel`, parameters of its own, and at most one child.
    """
    count = getattr(module, "num_experts", None)
    if not isinstance(count, int) or not hasattr(module, "_is_expert_parallel"):
        return False
    own = list(module.parameters(recurse=False))
    return bool(own) and not list(module.children())[1:] and all(p.ndim > 1 and len(p) == count for p in own)


class ExpertHooks:
    """Hooks of a block of experts: during a call the block has this device's tokens and this device's experts.

    A token counts nothing here if its expert is on another device. The results of all devices are summed.

    - `mesh`: `DeviceMesh`.
    - `taken`: planned placements of parameters by name; empty if the plan has none.
    """

    def __init__(self, mesh: Any, taken: Mapping[str, Sequence[Any]]) -> None:
        self._mesh = mesh
        self._taken = dict(taken)
        """Parameter -> its placements in the plan's ops, where the plan has them."""
        self._calls: list[tuple[Any, ...] | None] = []

    @torch.compiler.disable
    def before(self, module: Any, args: tuple[Any, ...]) -> Any:
        """Replace inputs and parameters by this device's parts, and send tokens of other devices' experts nowhere.

        The three inputs are hidden values, indices of experts and their weights, with tokens as first dim. Returns the
        local ones. Other inputs, or plain tensors among them, leave the call alone (None).
        """
        parameters = dict(module.named_parameters(recurse=False))
        fits = len(args) == 3 and all(isinstance(each, DTensor) for each in (*args, *parameters.values()))
        if not fits or len({len(each) for each in args}) != 1:
            self._calls.append(None)
            return None
        hidden, index, weights = (settle(each) for each in args)
        by_expert = self._axes_of_experts(parameters)
        rows: list[Any] = []
        for axis, place in enumerate(hidden.placements):
            rows.append(Shard(0) if place == Shard(0) and axis not in by_expert else Replicate())
        summed = [Partial() if axis in by_expert else place for axis, place in enumerate(rows)]
        own_hidden, own_weights = (local_part(each, rows, summed) for each in (hidden, weights))
        own_index = local_part(index, rows, rows)
        for name, parameter in parameters.items():
            places = [Shard(0) if axis in by_expert else Replicate() for axis in range(self._mesh.ndim)]
            grads = [Partial() if row.is_shard() else place for row, place in zip(rows, places, strict=True)]
            module.__dict__[name] = local_part(parameter, places, grads)
        if by_expert:
            count = len(module.__dict__[next(iter(parameters))])
            number = 0
            for axis in by_expert:
                number = number * self._mesh.size(axis) + self._mesh.get_local_rank(axis)
            # Each device has `count` experts in a row; `count` itself is the index of no expert.
            elsewhere = own_index // count != number
            own_index = torch.where(elsewhere, count, own_index % count)
            own_weights = own_weights.masked_fill(elsewhere, 0)
            module.num_experts, module._is_expert_parallel = count, True
        self._calls.append((list(parameters), len(next(iter(parameters.values()))), summed, hidden.placements))
        return own_hidden, own_index, own_weights

    @torch.compiler.disable
    def after(self, module: Any, args: Any, output: Any) -> Any:
        """Restore the parameters, and return the output as a DTensor that is a partial sum over axes of experts.

        If tokens were split over such an axis before, the sum is scattered to them. Returns None for a call that
        `before` left alone or that failed.
        """
        called = self._calls.pop() if self._calls else None
        if called is None:
            return None
        names, count, places, before = called
        for name in names:
            module.__dict__.pop(name, None)
        module.num_experts, module._is_expert_parallel = count, False
        if not isinstance(output, torch.Tensor) or isinstance(output, DTensor):
            return None  # the call failed
        result = DTensor.from_local(output, self._mesh, places, run_check=False)
        if any(place.is_partial() and own == Shard(0) for place, own in zip(places, before, strict=True)):
            return result.redistribute(placements=[own if own == Shard(0) else place
                                                 for place, own in zip(places, before, strict=True)])  # fmt: skip
        return result

    def _axes_of_experts(self, held: Mapping[str, Any]) -> list[int]:
        """Return the numbers of the mesh axes that split the first dim of all parameters, in the plan's uses or else
        where they are.
        """
        places = [list(each) for each in self._taken.values()] or [list(each.placements) for each in held.values()]
        return [axis for axis in range(self._mesh.ndim) if all(each[axis] == Shard(0) for each in places)]
