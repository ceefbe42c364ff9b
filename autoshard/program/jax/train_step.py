"""Losses and whole training steps in JAX."""

from collections.abc import Callable
from typing import Any

from autoshard.program.jax.gradient_groups import Reduced, Reduction
from autoshard.program.torch_ops.wide_integers import in_64_bits


_MEAN = Reduced()


def training_step(
    loss_fn: Callable[..., Any],
    optimizer: Any,
    *,
    aux: bool = False,
    accumulation: int = 1,
    gradient_groups: int = 1,
    whole_on: Any = None,
    gradients: str | None = None,
    wide: bool = False,
    reduction: Reduced = _MEAN,
) -> Callable[..., Any]:
    """Return `step(params, opt_state, batch[, buffers]) -> (params, opt_state[, buffers], loss)`.

    - `loss_fn`: `loss_fn(params, batch[, buffers])` returns the loss, or with `aux` the loss and the updated buffers.
    - `accumulation`: number of microbatches that are computed in sequence, without `aux`.
    - `gradient_groups`: number of groups of examples with separate gradients. They are averaged only after the backward
      passes of all microbatches, so devices with a group each send gradients once a step.
    - `whole_on`: a `jax.sharding.AbstractMesh` on which every device then has the averages whole.
    - `gradients`: dtype to which gradients are rounded for the optimizer; None to leave them unchanged.
    - `wide`: True to compute loss and gradients in 64 bits.
    - `reduction`: reduction of gradients and losses over microbatches and groups. `SUM` adds them. For a `QUOTIENT`,
      sums of dividends are divided by sums of divisors. All others average them.

    The leading dim of the batch must divide into microbatches and groups.
    """
    import jax
    import optax

    quotient = reduction.kind is Reduction.QUOTIENT
    mean = reduction.kind not in (Reduction.SUM, Reduction.QUOTIENT)
    computed = _dividend_and_divisor(loss_fn, reduction.division) if quotient else loss_fn
    gradient = jax.value_and_grad(computed, has_aux=aux or quotient)
    if wide:
        gradient = in_64_bits(gradient)
    if gradient_groups > 1:
        gradient = _by_group(gradient, gradient_groups)
    if accumulation > 1:
        gradient = _accumulated(gradient, accumulation, mean)
    if gradient_groups > 1:
        gradient = _over_groups(gradient, whole_on, mean)
    if quotient:
        gradient = _divided(gradient)

    def step(params: Any, opt_state: Any, batch: Any, *buffers: Any) -> Any:
        value, grads = gradient(params, batch, *buffers)
        if gradients is not None:
            grads = jax.tree.map(lambda x: x.astype(gradients), grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        if aux:
            loss, updated = value
            return params, opt_state, updated, loss
        return params, opt_state, value

    return step


def gradient_step(loss_fn: Callable[..., Any], *, aux: bool = False, **forms: Any) -> Callable[..., Any]:
    """Return `step(params, batch[, buffers]) -> ((loss, gradients), buffers)`, with the options of `training_step`.

    Buffers are an empty dict without `aux`.
    """
    import jax
    import jax.numpy as jnp
    import optax

    def keep(updates: Any, state: Any, params: Any = None) -> Any:
        """Leave the parameters unchanged and return the gradient as the state."""
        return jax.tree.map(jnp.zeros_like, updates), updates

    seeing = optax.GradientTransformation(lambda params: (), keep)
    inner = training_step(loss_fn, seeing, aux=aux, **forms)

    def step(params: Any, batch: Any, *buffers: Any) -> Any:
        _, gradients, *updated, loss = inner(params, (), batch, *buffers)
        return (loss, gradients), updated[0] if updated else {}

    return step


def _dividend_and_divisor(loss: Callable[..., Any], division: int) -> Callable[..., tuple[Any, Any]]:
    """Return a function of the arguments of `loss` that computes the dividend and the divisor of a quotient.

    `division` is the number of the dividing operation in the trace of `loss`. Operations after it apply to the
    dividend. The divisor is cast to f32 at least.
    """
    import jax
    from jax.extend.core import jaxpr_as_fun

    def run(*args: Any) -> tuple[Any, Any]:
        closed = jax.make_jaxpr(loss)(*args)
        eqns = list(closed.jaxpr.eqns)
        eqn = eqns[division]
        assert eqn.primitive.name == "div"
        dividend, over = eqn.invars
        # After a division by one, the later operations apply to the dividend instead of the quotient.
        eqns[division] = eqn.replace(invars=[dividend, _one(over)])
        outs = [*closed.jaxpr.outvars, over]
        names = closed.jaxpr.debug_info._replace(result_paths=None)
        both = closed.replace(jaxpr=closed.jaxpr.replace(eqns=eqns, outvars=outs, debug_info=names))
        total, count = jaxpr_as_fun(both)(*jax.tree.leaves(args))
        return total, count.astype(jax.numpy.promote_types(count.dtype, "float32"))

    return run


def _one(like: Any) -> Any:
    """Return a literal one with the type of `like`."""
    import numpy as np
    from jax.extend.core import Literal

    return Literal(np.ones((), like.aval.dtype), like.aval)


def _by_group(gradient: Callable[..., Any], groups: int) -> Callable[..., Any]:
    """Return a function with the results of `gradient` for `groups` contiguous parts of the batch as a leading dim."""
    import jax

    def run(params: Any, batch: Any, *buffers: Any) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(groups, x.shape[0] // groups, *x.shape[1:]), batch)
        return jax.vmap(lambda part: gradient(params, part, *buffers))(parts)

    return run


def _divided(gradient: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the loss and gradients of a quotient, from those of its dividend and from its divisor."""
    import jax

    def run(params: Any, batch: Any, *buffers: Any) -> Any:
        (total, count), grads = gradient(params, batch, *buffers)
        return (total / count).astype(total.dtype), jax.tree.map(lambda x: (x / count).astype(x.dtype), grads)

    return run


def _over_groups(gradient: Callable[..., Any], whole_on: Any, mean: bool) -> Callable[..., Any]:
    """Return a function with means, or sums, over the leading dim of the results of `gradient`.

    They are replicated on the mesh `whole_on`, if it is given.
    """
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    def run(params: Any, batch: Any, *buffers: Any) -> Any:
        reduced = jax.tree.map(lambda x: x.mean(0) if mean else x.sum(0), gradient(params, batch, *buffers))
        if whole_on is None:
            return reduced
        return jax.lax.with_sharding_constraint(reduced, NamedSharding(whole_on, PartitionSpec()))

    return run


def _accumulated(gradient: Callable[..., Any], count: int, mean: bool) -> Callable[..., Any]:
    """Return a function with means, or sums, of the results of `gradient` for `count` microbatches in sequence.

    A microbatch has every `count`-th row, so that a batch that is split over devices does not move.
    """
    import jax
    import jax.numpy as jnp

    def run(params: Any, batch: Any, *buffers: Any) -> Any:
        parts = jax.tree.map(lambda x: x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1), batch)

        def add(total: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, gradient(params, part, *buffers)), None

        like = jax.eval_shape(gradient, params, jax.tree.map(lambda x: x[0], parts), *buffers)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        total, _ = jax.lax.scan(add, zeros, parts)
        return jax.tree.map(lambda x: x / count, total) if mean else total

    return run


def without_padding(logits: Any, classes: int) -> Any:
    """Return logits [..., V] whose entries from `classes` on are the lowest number, so that no loss depends on them."""
    import jax
    import jax.numpy as jnp

    counts = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) < classes
    return jnp.where(counts, logits, jnp.finfo(logits.dtype).min)


def token_loss(logits: Any, labels: Any) -> Any:
    """Return the mean negative log-likelihood in fp32; `logits` [..., V], `labels` [...] (already the next tokens).

    The label's logit is the sum over an iota comparison: with a split vocabulary this needs one small all-reduce.
    """
    import jax
    import jax.numpy as jnp

    logits = logits.astype(jnp.float32)
    hit = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) == labels[..., None]
    picked = jnp.where(hit, logits, 0.0).sum(-1)
    return (jax.nn.logsumexp(logits, axis=-1) - picked).mean()
