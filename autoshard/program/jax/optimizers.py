"""Optimizers of training steps by name: those of optax, and Muon for matrices."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from autoshard.errors import UserError


LEARNING_RATE = 3e-4  # a usual rate for AdamW; it changes neither time nor memory
_DECAY = 0.1

OPTIMIZERS: Mapping[str, str] = {
    "adamw": "two moments",
    "sgd": "no state",
    "momentum": "SGD that accumulates the gradients",
    "lion": "one moment, whose sign is the update",
    "adafactor": "second moments as one row and one column of each matrix",
    "muon": "one moment, made orthogonal; AdamW for embeddings, heads, norms and biases",
}
"""Names of optimizers -> their state and update in words."""


def make_optimizer(name: str, state_dtype: str | tuple[str, str] | None = None) -> Any:
    """Return the optax transformation of an optimizer in `OPTIMIZERS`.

    Moments are stored in `state_dtype` and updated in fp32; with None both are in the dtype of their parameters. A pair
    of dtypes is for AdamW's first and second moments. The learning rate is `LEARNING_RATE`; weights decay in AdamW,
    Lion and Muon. Raises `UserError` for another name.
    """
    import optax

    first = None
    if isinstance(state_dtype, tuple):
        first, state_dtype = state_dtype

    def adamw() -> Any:
        return optax.adamw(LEARNING_RATE, b1=0.9, b2=0.95, weight_decay=_DECAY, mu_dtype=first)

    makers: dict[str, Callable[[], Any]] = {
        "adamw": adamw,
        "sgd": lambda: optax.sgd(LEARNING_RATE),
        "momentum": lambda: optax.sgd(LEARNING_RATE, momentum=0.9),
        "lion": lambda: optax.lion(LEARNING_RATE, b1=0.9, b2=0.99, weight_decay=_DECAY),
        "adafactor": lambda: optax.adafactor(LEARNING_RATE),
        "muon": lambda: optax.partition({"muon": _muon(), "adamw": adamw()}, _with_muon),
    }
    if name not in makers:
        raise UserError(f"there is no optimizer `{name}`; use one of {', '.join(f'`{key}`' for key in makers)}.")
    inner = makers[name]()
    return inner if state_dtype is None else _stored_as(inner, state_dtype, apart=first is not None)


def _stored_as(inner: Any, dtype: str, apart: bool) -> Any:
    """Return `inner` with its float state stored in `dtype` and cast to fp32 for updates.

    If `apart`, first moments (`mu`) are never cast: `inner` gives them a dtype of their own.
    """
    import jax
    import jax.numpy as jnp
    import optax

    first_moments = jax.tree_util.GetAttrKey("mu")

    def convert(state: Any, to: Any) -> Any:
        def cast(path: tuple[Any, ...], x: Any) -> Any:
            uncast = (apart and first_moments in path) or not jnp.issubdtype(x.dtype, jnp.floating)
            return x if uncast else x.astype(to)

        return jax.tree_util.tree_map_with_path(cast, state)

    def init(params: Any) -> Any:
        return convert(inner.init(params), dtype)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        updates, state = inner.update(updates, convert(state, jnp.float32), params)
        return updates, convert(state, dtype)

    return optax.GradientTransformation(init, update)


_NO_MATRIX = re.compile(
    r"(?i)(^|[._])(embed\w*|\w*embeddings?|wte|wpe|shared|\w*head|score|classifier|predictions|norm\w*|ln_\w+)([._]|$)"
)
"""A part of a name that tells an embedding, a head or a norm, which Muon leaves to AdamW."""


def _with_muon(params: Mapping[str, Any]) -> dict[str, str]:
    """Return `muon` or `adamw` by parameter: Muon for matrices inside of the model.

    The dims of a stack of layers (`*` in the name) and of experts count matrices. Kernels of convolutions are no
    matrices.
    """
    return {
        name: "muon" if _is_matrix(name, leaf.ndim) and not _NO_MATRIX.search(name) else "adamw"
        for name, leaf in params.items()
    }


def _is_matrix(name: str, rank: int) -> bool:
    """Return True for a matrix, a stack of them, or a stack of experts' matrices."""
    experts = rank - 2 - name.count("*") == 1 and "experts" in name
    return rank == 2 + name.count("*") or experts


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""The quintic of Muon's Newton-Schulz iteration, as in `torch.optim.Muon`."""
_ITERATIONS, _MOMENTUM, _EPSILON = 5, 0.95, 1e-7


def _muon() -> Any:
    """Return Muon as in `torch.optim.Muon`: Nesterov momentum, made orthogonal in bf16, scaled by the matrix's shape.

    optax's own iterates in fp32, which takes twice the matmul time.
    """
    import optax

    return optax.chain(
        optax.trace(_MOMENTUM, nesterov=True),
        optax.stateless_with_tree_map(lambda x, _: _orthogonal(x)),
        optax.add_decayed_weights(_DECAY),
        optax.scale_by_learning_rate(LEARNING_RATE),
    )


def _orthogonal(x: Any) -> Any:
    """Return matrices [..., rows, columns] after Newton-Schulz iterations, times sqrt(max(1, rows / columns)).

    Source: Keller Jordan's Muon (github.com/KellerJordan/Muon).
    """
    import jax
    import jax.numpy as jnp

    rows, columns = x.shape[-2:]
    y = jnp.swapaxes(x, -1, -2) if rows > columns else x
    y = y.astype(jnp.bfloat16)
    norm = jnp.sqrt(jnp.sum(jnp.square(y.astype(jnp.float32)), axis=(-2, -1), keepdims=True))
    y = (y / jnp.maximum(norm, _EPSILON).astype(jnp.bfloat16)).astype(jnp.bfloat16)
    a, b, c = _COEFFICIENTS

    def matmul(left: Any, right: Any) -> Any:
        return jnp.matmul(left, right, preferred_element_type=jnp.float32)

    def iterate(_: Any, y: Any) -> Any:
        # Sums of a matrix and a product are rounded once, as in torch's `addmm`.
        gram = matmul(y, jnp.swapaxes(y, -1, -2)).astype(y.dtype)
        polynomial = (b * gram.astype(jnp.float32) + c * matmul(gram, gram)).astype(y.dtype)
        return (a * y.astype(jnp.float32) + matmul(polynomial, y)).astype(y.dtype)

    y = jax.lax.fori_loop(0, _ITERATIONS, iterate, y)
    y = jnp.swapaxes(y, -1, -2) if rows > columns else y
    return y.astype(x.dtype) * max(1.0, rows / columns) ** 0.5
