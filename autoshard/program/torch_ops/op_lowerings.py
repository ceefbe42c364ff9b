"""JAX lowerings of torch operations, as replacements for torchax's own.

No operation merges dims that a plan may want to split apart (batch with sequence, batch with heads). Result dtypes
follow torch, so that a bf16 program stays bf16. Every function takes and returns JAX values.
"""

from collections.abc import Callable
from typing import Any

from autoshard.errors import UserError
from autoshard.program import model_flops
from autoshard.program.kernels.eight_bits import dot, rounds


def operation_table() -> dict[Any, Callable[..., Any]]:
    """Return lowerings of elementary operations by torch callable."""
    import torch

    aten = torch.ops.aten
    functional = torch.nn.functional
    tensor = torch.Tensor
    return {
        functional.linear: linear,
        aten.linear: linear,
        aten.addmm: addmm,
        aten.mm: matmul,
        aten.bmm: matmul,
        aten.matmul: matmul,
        torch.matmul: matmul,
        torch.bmm: matmul,
        tensor.matmul: matmul,
        tensor.__matmul__: matmul,
        tensor.bmm: matmul,
        torch.einsum: einsum,
        aten._grouped_mm: grouped_mm,
        functional.embedding: embedding,
        functional.embedding_bag: embedding_bag,
        aten.embedding: take_rows,
        tensor.repeat_interleave: repeat_interleave,
        torch.repeat_interleave: repeat_interleave,
        aten.add.Tensor: add,
        aten.add.Scalar: add,
        aten.sub.Tensor: sub,
        aten.sub.Scalar: sub,
        aten.rsub.Tensor: rsub,
        aten.rsub.Scalar: rsub,
        aten.mul.Tensor: mul,
        aten.mul.Scalar: mul,
        aten.div.Tensor: div,
        aten.div.Scalar: div,
        aten.div.Tensor_mode: div,
        aten.div.Scalar_mode: div,
        aten.pow.Tensor_Scalar: power,
        aten.pow.Tensor_Tensor: power,
        aten.pow.Scalar: power,
        torch.arange: arange,
        torch.full: full,
        torch.ones: filled(1),
        torch.zeros: filled(0),
        torch.empty: filled(0),
        torch.take_along_dim: take_along_dim,
        tensor.take_along_dim: take_along_dim,
        aten.unfold: unfold,
        aten.unfold.default: unfold,
        aten.ceil: ceil,
        aten.ceil.default: ceil,
    }


def linear(x: Any, weight: Any, bias: Any = None, inner: int = -1) -> Any:
    """Multiply `x` [..., in] by `weight` [out, in], or one row [in], without merging the leading dims; return [...,
    out].

    `inner` is the dim `in` of the weight, whose other dims are those of the result.
    """
    result = dot(x, weight, (inner % weight.ndim,))
    model_flops.record_matmul(result.shape, weight.shape[inner])
    return result if bias is None else result + bias


def take_along_dim(x: Any, indices: Any, dim: int | None = None) -> Any:
    """Lower `torch.take_along_dim`, whose own code requires 64-bit indices; without `dim`, `x` is flattened."""
    import jax.numpy as jnp

    return jnp.take_along_axis(x, indices, axis=dim)


def addmm(bias: Any, x: Any, weight: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """Return `beta * bias + alpha * (x @ weight)`; a `beta` of 0 leaves out the bias, even if it is NaN."""
    result = matmul(x, weight)
    if alpha != 1:
        result = result * alpha
    if beta == 0:
        return result
    return result + (bias if beta == 1 else bias * beta)


def matmul(x: Any, y: Any) -> Any:
    """Lower `torch.matmul`, and count its FLOPs.

    Leading dims of both operands are batch dims and are broadcast, not merged.
    """
    import jax.numpy as jnp

    result = dot(x, y, (0,)) if rounds() and y.ndim == 2 else jnp.matmul(x, y)
    model_flops.record_matmul(result.shape, x.shape[-1])
    return result


def grouped_mm(x: Any, weight: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Lower `torch._grouped_mm`: groups of rows of `x` [rows, in] times `weight` [groups, in, out].

    The groups end at `offs` [groups]. Without `offs`, `x` is [groups, rows, in]. Rows beyond the last group give zeros.
    The result has `out_dtype`, or that of the product without one.

    Raises `UserError` for a bias, and for groups of columns.
    """
    import jax
    import jax.numpy as jnp

    if bias is not None or (x.ndim == 3) != (offs is None) or weight.ndim != 3:
        raise UserError(
            "torch._grouped_mm is lowered for rows [rows, in] and weights [groups, in, out] without a bias; add the "
            "bias to its result, and give groups of columns as a sum of products."
        )
    if offs is None:
        result = matmul(x, weight)
    else:
        ends = offs.astype(jnp.int32)
        result = jax.lax.ragged_dot(x, weight, jnp.diff(ends, prepend=jnp.zeros(1, jnp.int32)))
        model_flops.record_matmul(result.shape, x.shape[-1])
    return result if out_dtype is None else result.astype(jax_dtype_of(out_dtype))


def einsum(equation: str, *operands: Any) -> Any:
    """Lower `torch.einsum`; operands may be one list. FLOPs are counted as a matmul's.

    They are counted only for two operands and an equation with an arrow and without an ellipsis.
    """
    import jax.numpy as jnp

    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    result = jnp.einsum(equation, *operands)
    text = equation.replace(" ", "")
    if len(operands) == 2 and "." not in text and "->" in text:
        inputs, output = text.split("->")
        sizes = {
            letter: size
            for part, operand in zip(inputs.split(","), operands, strict=True)
            for letter, size in zip(part, operand.shape, strict=True)
        }
        contracted = 1
        for letter, size in sizes.items():
            if letter not in output:
                contracted *= size
        model_flops.record_matmul(result.shape, contracted)
    return result


def take_rows(
    table: Any, ids: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    """Return rows of an embedding table by one plain gather; ids are valid, so nothing is filled or clamped.

    As in torch, the row `padding_idx`, if not negative, has no gradient.

    Raises `UserError` for `scale_grad_by_freq`.
    """
    import jax
    import jax.numpy as jnp

    if scale_grad_by_freq:
        raise UserError("embedding with `scale_grad_by_freq` has no lowering; leave it out.")
    rows = table.at[ids].get(mode="promise_in_bounds", wrap_negative_indices=False)
    if padding_idx < 0:
        return rows
    return jnp.where((ids == padding_idx)[..., None], jax.lax.stop_gradient(rows), rows)


def embedding(
    ids: Any,
    table: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Lower `torch.nn.functional.embedding` without renormalisation; a negative `padding_idx` counts from the end.

    Raises `UserError` for `max_norm` and `scale_grad_by_freq`.
    """
    if max_norm is not None:
        raise UserError(
            "embedding with `max_norm` has no lowering, since it writes to its own weights; renormalise what it gives."
        )
    return take_rows(table, ids, -1 if padding_idx is None else padding_idx % table.shape[0], scale_grad_by_freq)


def embedding_bag(
    ids: Any,
    table: Any,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Lower `torch.nn.functional.embedding_bag` without renormalisation; return [B, dim].

    Bags are rows of `ids` [B, N], or start at `offsets` [B] of `ids` [N]. The last offset is only an end with
    `include_last_offset`. Ids equal to `padding_idx` are ignored; a negative one counts from the end. An empty bag
    gives zeros in each of the modes `sum`, `mean` and `max`.

    Raises `UserError` for `max_norm` and `scale_grad_by_freq`.
    """
    import jax
    import jax.numpy as jnp

    if max_norm is not None or scale_grad_by_freq:
        raise UserError("embedding_bag with `max_norm` or `scale_grad_by_freq` has no lowering; leave them out.")
    count = ids.shape[0] if offsets is None else offsets.shape[0] - include_last_offset
    bag: Any = None if offsets is None else jnp.searchsorted(offsets[:count], jnp.arange(len(ids)), side="right") - 1
    valid = jnp.ones(ids.shape, bool) if padding_idx is None else ids != padding_idx % table.shape[0]
    rows = take_rows(table, ids)
    if mode == "max":
        lowest = jnp.asarray(-jnp.inf, rows.dtype)
        rows = jnp.where(valid[..., None], rows, lowest)
        reduced = rows.max(1) if offsets is None else jax.ops.segment_max(rows, bag, count)
        return jnp.where(jnp.isneginf(reduced), 0, reduced)
    weights = valid.astype(rows.dtype) if per_sample_weights is None else jnp.where(valid, per_sample_weights, 0)

    def summed(values: Any) -> Any:
        """Return the sum of each bag's values [B, ...]."""
        return values.sum(1) if offsets is None else jax.ops.segment_sum(values, bag, count)

    reduced = rows if per_sample_weights is None and padding_idx is None else rows * weights[..., None]
    if mode == "sum":
        return summed(reduced)
    return summed(reduced) / jnp.maximum(summed(valid.astype(rows.dtype)), 1)[:, None]


def repeat_interleave(x: Any, repeats: Any, dim: int | None = None, *, output_size: int | None = None) -> Any:
    """Lower `torch.repeat_interleave`; without `dim`, `x` is flattened.

    A fixed count along a dim becomes a broadcast and a reshape instead of a gather. Counts that are traced need
    `output_size`.
    """
    import jax.numpy as jnp

    if dim is None or not isinstance(repeats, int):
        return jnp.repeat(x, repeats, axis=dim, total_repeat_length=output_size)
    place = dim % x.ndim
    wide = jnp.broadcast_to(jnp.expand_dims(x, place + 1), (*x.shape[: place + 1], repeats, *x.shape[place + 1 :]))
    return wide.reshape(*x.shape[:place], x.shape[place] * repeats, *x.shape[place + 1 :])


def arange(
    start: Any = 0, end: Any = None, step: Any = 1, *, dtype: Any = None, device: Any = None, **others: Any
) -> Any:
    """Lower `torch.arange`; a single bound is the end, also as the keyword `end`.

    Bounds may be traced if their difference is a constant.

    Raises `ValueError` for a step of zero or of the wrong sign.
    """
    from jax import core
    from torchax.ops import jaten

    if end is None:
        start, end = 0, start
    known = all(isinstance(each, (int, float)) for each in (start, end, step))
    if known and (step == 0 or (end - start) / step < 0):
        raise ValueError("upper bound and lower bound inconsistent with step sign")
    if isinstance(start, core.Tracer) and (count := _steps_after(start, end)) is not None:
        counted: Any = jaten._aten_arange(0, count, step, dtype=dtype)
        return counted + start.astype(counted.dtype)
    return jaten._aten_arange(start, end, step, dtype=dtype)


def filled(value: int) -> Callable[..., Any]:
    """Return the lowering of `torch.ones`, `torch.zeros` or `torch.empty`, which fills with `value`.

    The shape may be one tuple, several whole numbers, or the keyword `size`. Without a dtype it is torch's default
    dtype.
    """

    def make(*sizes: Any, size: Any = None, dtype: Any = None, **others: Any) -> Any:
        """Return the filled array; `others`, such as the device, are ignored."""
        import jax.numpy as jnp
        import torch

        given = sizes if size is None else (size,)
        shape = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
        return jnp.full(tuple(shape), value, jax_dtype_of(dtype or torch.get_default_dtype()))

    return make


def full(size: Any, fill_value: Any, *, dtype: Any = None, **others: Any) -> Any:
    """Lower `torch.full`; without a dtype, whole numbers and booleans determine it, else it is torch's default dtype.

    A fill value that is a tensor has its own dtype.
    """
    import jax.numpy as jnp
    import torch

    if dtype is None and not isinstance(fill_value, (bool, int, float, complex)):
        return jnp.full(tuple(size), fill_value)
    own = type(fill_value) if isinstance(fill_value, (bool, int)) else torch.get_default_dtype()
    return jnp.full(tuple(size), fill_value, jax_dtype_of(dtype or own))


def jax_dtype_of(dtype: Any) -> Any:
    """Return the JAX dtype of a torch dtype or a Python type; 64 bits become 32 unless JAX has 64 enabled."""
    import jax
    import torch
    from torchax.ops import mappings

    python: dict[Any, Any] = {bool: torch.bool, int: torch.int64, float: torch.float64}
    return jax.dtypes.canonicalize_dtype(mappings.t2j_dtype(python.get(dtype, dtype)))


def _steps_after(start: Any, end: Any) -> int | None:
    """Return the constant by which `end` exceeds `start`, both traced; None if it is unknown.

    It is known if `end` comes from `start` by additions of constants and casts alone.
    """
    if end is start or getattr(end, "val", end) is getattr(start, "val", start):
        return 0
    equation = getattr(end, "parent", None)
    if equation is None or equation.primitive.name not in ("add", "convert_element_type"):
        return None
    known, others = 0, []
    for side in equation.in_tracers:
        value = getattr(getattr(side, "val", None), "val", None)  # the value of a literal
        if value is None:
            others.append(side)
        else:
            known += int(value)
    before = _steps_after(start, others[0]) if len(others) == 1 else None
    return None if before is None else before + known


def unfold(x: Any, dim: int, size: int, step: int) -> Any:
    """Lower `torch.Tensor.unfold`: return windows [..., count, ..., size] of `dim`, which start every `step`.

    Neighbours may overlap, and a rest that fills no window is left out.
    """
    import jax.numpy as jnp

    count = (x.shape[dim] - size) // step + 1
    parts = [jnp.take(x, jnp.arange(count) * step + offset, axis=dim, mode="clip") for offset in range(size)]
    return jnp.stack(parts, axis=-1)


def ceil(x: Any) -> Any:
    """Lower `torch.ceil`; the dtype stays, also for whole numbers."""
    import jax.numpy as jnp

    return jnp.ceil(x).astype(x.dtype)


def add(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    """Return `x + alpha * y`, in torch's promoted dtype."""
    x, y = _promoted(x, y)
    return x + (y if alpha == 1 else y * alpha)


def sub(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    """Return `x - alpha * y`, in torch's promoted dtype."""
    x, y = _promoted(x, y)
    return x - (y if alpha == 1 else y * alpha)


def rsub(x: Any, y: Any, *, alpha: Any = 1) -> Any:
    """Return `y - alpha * x`, in torch's promoted dtype."""
    return sub(y, x, alpha=alpha)


def mul(x: Any, y: Any) -> Any:
    """Return `x * y`, in torch's promoted dtype."""
    x, y = _promoted(x, y)
    return x * y


def div(x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    """Return `x / y`; integers divide to floats unless a rounding mode is given.

    The modes are `floor`, and `trunc` towards zero.
    """
    import jax
    import jax.numpy as jnp

    x, y = _promoted(x, y)
    if rounding_mode is None:
        return x / y
    if rounding_mode == "floor":
        return jnp.floor_divide(x, y)
    dtype = jnp.result_type(x, y)
    if jnp.issubdtype(dtype, jnp.integer):
        # Floats of 32 bits cannot represent every integer above 2^24.
        return jax.lax.div(*jnp.broadcast_arrays(jnp.asarray(x, dtype), jnp.asarray(y, dtype)))
    return jnp.trunc(x / y).astype(dtype)


def power(x: Any, y: Any) -> Any:
    """Return `x ** y`; whole exponents from 1 to 4 become multiplications, which differentiate and run better.

    An exponent of 0.5 becomes a square root. Whole numbers to a float exponent give floats.
    """
    import jax
    import jax.numpy as jnp

    if isinstance(y, (int, float)) and not isinstance(x, (int, float)):
        if float(y).is_integer() and 0 < y <= 4:
            base = x if isinstance(y, int) or jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
            return base * base if y == 2 else jax.lax.integer_pow(base, int(y))
        if y == 0.5:
            return jnp.sqrt(x)
    x, y = _promoted(x, y)
    return jnp.power(x, y)


def _promoted(x: Any, y: Any) -> tuple[Any, Any]:
    """Cast a 0-d array to the dtype of the other operand if that has dims and is of the same kind or a higher one.

    Kinds are booleans, whole numbers and all others. JAX follows this rule of torch for Python numbers only, which are
    returned unchanged.
    """
    import jax.numpy as jnp

    def rank(value: Any) -> int:
        """Return the number of dims of an array, and -1 for a Python number."""
        return getattr(value, "ndim", -1)

    def kind(value: Any) -> int:
        """Return 0 for booleans, 1 for whole numbers, 2 for other dtypes."""
        dtype = value.dtype
        return 0 if dtype == jnp.bool_ else 1 if jnp.issubdtype(dtype, jnp.integer) else 2

    if rank(x) == 0 and rank(y) > 0 and kind(x) <= kind(y):
        return x.astype(y.dtype), y
    if rank(y) == 0 and rank(x) > 0 and kind(y) <= kind(x):
        return x, y.astype(x.dtype)
    return x, y
