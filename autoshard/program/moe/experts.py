"""Mixtures of experts: dispatch of tokens to their experts, by einsums into slots or by sorting.

Gathering expert weights for each token cannot scale. With `slots`, tokens are cut into groups along the sequence, and
every expert has `capacity` slots in each group. One-hot matrices move tokens to slots and back, as in GShard (Lepikhin
et al. 2020, section 3.2). Each dim can be split: batch, group, expert, slot, features.

With `sorted`, the tokens of each sequence are sorted by expert, which costs no matmul and drops none. A mesh can then
split batch, groups of experts, and features. With `ragged` they are sorted too, and devices send only real rows.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from autoshard.errors import UserError
from autoshard.program import model_flops
from autoshard.program.kernels.ragged_dots import grouped_matmul
from autoshard.program.moe.expert_dispatch import dispatch, rows_of
from autoshard.program.remat_marks import mark


GROUP = 512
"""Most tokens in a group, since the FLOPs of moving a token are proportional to the group's size."""

CAPACITY_FACTOR = 1.25
"""Slots of an expert relative to its mean number of tokens; tokens beyond its slots are dropped."""

EXPERTS = ("slots", "sorted", "ragged", "auto")
"""Forms of dispatch to experts; `auto` is the fastest form that drops no token."""

LOSSLESS = ("sorted", "sorted:2", "sorted:4", "ragged:4", "ragged:8", "slots:all")
"""Forms from which `auto` chooses, all with the same result."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertForm:
    """A form of dispatch of tokens to experts."""

    kind: str = "slots"
    """`slots` or `sorted`; ragged forms are `sorted` too."""
    groups: int = 1
    """Number of groups of experts that tokens are sorted into; groups can lie on different devices."""
    ragged: bool = False
    """True if only the real rows of a group and sequence are sent to its device."""

    all_slots: bool = False
    """True if each expert has as many slots as there may be tokens."""

    @property
    def text(self) -> str:
        """The spelling that `parse_experts` reads."""
        if self.kind == "slots":
            return "slots:all" if self.all_slots else "slots"
        return f"{'ragged' if self.ragged else 'sorted'}:{self.groups}"

    @property
    def limited(self) -> bool:
        """True if the form may drop tokens, and so takes a capacity factor: several sorted groups, or limited slots."""
        return self.groups > 1 if self.kind == "sorted" else not self.all_slots


def parse_experts(text: str) -> ExpertForm:
    """Parse `slots`, `slots:all`, `sorted`, `sorted:8` or `ragged:8` (two groups or more).

    Raises `UserError` for any other text, `auto` included.
    """
    kind, _, more = text.partition(":")
    if kind == "slots" and more in ("", "all"):
        return ExpertForm(all_slots=more == "all")
    if kind == "sorted" and (not more and ":" not in text or more.isdecimal() and int(more) > 0):
        return ExpertForm(kind, int(more or 1))
    if kind == "ragged" and more.isdecimal() and int(more) > 1:
        return ExpertForm("sorted", int(more), ragged=True)
    raise UserError(
        f"experts `{text}` is not known; use slots, slots:all (none is dropped), sorted, or sorted:8 or ragged:8 for "
        "experts in 8 groups that may lie on different devices."
    )


def check_experts(given: Mapping[str, Any], module: Any, label: str) -> ExpertForm:
    """Return the form of dispatch, by default `slots`.

    - `given`: options of a step, with `experts`, `capacity_factor` and `imbalance`.
    - `module`: the torch module, named `label` in errors.

    Raises `UserError` for an unknown form, and for a capacity factor or imbalance that the form does not take. An
    imbalance below 1 raises it too, and so does any of these options if the module has no experts.
    """
    text, factor, imbalance = (given.get(name) for name in ("experts", "capacity_factor", "imbalance"))
    for flag, value in (("--experts", text), ("--capacity-factor", factor), ("--imbalance", imbalance)):
        if value is not None and not any(hasattr(each, "experts") for each in module.modules()):
            raise UserError(f"{flag} is for mixtures of experts; `{label}` has none, so leave it out.")
    form = parse_experts(text or "slots")
    if factor is not None and not form.limited:
        raise UserError(
            f"--capacity-factor limits what an expert may be sent, but experts `{text}` drop no token; use slots, "
            "sorted:8 or ragged:8, or leave it out."
        )
    if imbalance is not None:
        if imbalance < 1:
            raise UserError(
                f"--imbalance is {imbalance:g}, but the busiest device has no less than the mean: give 1 or more."
            )
        if form.kind != "sorted" or form.groups == 1:
            raise UserError(
                f"--imbalance is for experts in groups, such as sorted:8: `{text or 'slots'}` takes the same however "
                "tokens are spread, so leave it out."
            )
    return form


@dataclasses.dataclass(frozen=True, slots=True)
class _Dispatching:
    """The dispatch of experts in the current context, and its list of notes."""

    form: ExpertForm
    factor: float | None
    """Capacity factor; None for the form's default."""
    notes: list[str] | None
    """Receives sentences about the dispatch."""
    imbalance: float = 1.0
    """Tokens of the busiest device of experts relative to the mean."""
    length: int | None = None
    """Tokens of a sequence, if they are known."""


_how: contextvars.ContextVar[_Dispatching | None] = contextvars.ContextVar("experts", default=None)


@contextlib.contextmanager
def capacity(
    factor: float | None,
    notes: list[str],
    form: ExpertForm | None = None,
    imbalance: float = 1.0,
    length: int | None = None,
) -> Iterator[None]:
    """Dispatch tokens by `form` (by default slots) while inside, and describe the dispatch in `notes`.

    - `factor`: capacity factor; None for the form's default: `CAPACITY_FACTOR` for slots, room for all if sorted.
    - `imbalance`: tokens of the busiest device of experts relative to the mean.
    - `length`: tokens of a sequence, for experts that receive the tokens of all sequences in one dim.
    """
    token = _how.set(_Dispatching(form or ExpertForm(), factor, notes, imbalance, length))
    try:
        yield
    finally:
        _how.reset(token)


def group_size(length: int) -> int:
    """Return the largest divisor of a sequence length that is at most `GROUP`."""
    return max(size for size in range(1, min(length, GROUP) + 1) if length % size == 0)


def choose(scores: Any, count: int) -> list[Any]:
    """Return `count` one-hot boolean masks [..., E] of the largest scores, largest first; the lower index wins a tie.

    They have no gradient.

    Reductions and comparisons compute them, which can be split over every dim, unlike a sort.
    """
    import jax
    import jax.numpy as jnp

    scores = jax.lax.stop_gradient(scores)
    size = scores.shape[-1]
    index = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    chosen: list[Any] = []
    for _ in range(count):
        best = scores.max(-1, keepdims=True)
        first = jnp.where(scores == best, index, size).min(-1, keepdims=True)
        hot = index == first
        chosen.append(hot)
        scores = jnp.where(hot, -jnp.inf, scores)
    return chosen


Times = Callable[[Any, Any, Any], Any]
"""Function that multiplies tokens grouped by expert with weights [E, F, D], and adds biases [E, F] or None."""


class Experts(Protocol):
    """The computation of each expert on its tokens."""

    @property
    def count(self) -> int:
        """Number of experts."""
        ...

    @property
    def weights_each(self) -> int:
        """Elements of the weight matrices of one expert: each costs two FLOPs per token."""
        ...

    def apply(self, moved: Any, times: Times, one: bool) -> Any:
        """Return the experts' results for tokens grouped by expert; `one` is True in a step of one token a sequence."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class GatedExperts:
    """Experts `down(activation(gate(x)) * up(x))`, with gate and up as the two halves of one weight."""

    gate_up: Any
    """Weights [E, 2 I, D]."""
    down: Any
    """Weights [E, D, I]."""
    activation: Callable[[Any], Any]
    biases: tuple[Any, Any] | None = None
    """Biases of the two matmuls: [E, 2 I] and [E, D]."""

    @property
    def count(self) -> int:
        """Number of experts."""
        return int(self.down.shape[0])

    @property
    def weights_each(self) -> int:
        """Elements of the weight matrices of one expert."""
        return 3 * int(self.down.shape[1] * self.down.shape[2])

    def apply(self, moved: Any, times: Times, one: bool) -> Any:
        """Return the experts' results for tokens grouped by expert.

        The gate and up halves are sliced before the matmul, so that each device has its share of either half. A step of
        one token a sequence (`one`) spends nearly all its time on reading the weights. XLA copies slices of a layer's
        stack in a loop, so such a step multiplies by the whole stored weight and slices the small result.
        """
        experts, dim, inner = self.down.shape
        wide, narrow = self.biases or (None, None)
        if one:
            both = times(moved, self.gate_up, wide)
            gate, up = both[..., :inner], both[..., inner:]
        else:
            halves = self.gate_up.reshape(experts, 2, inner, dim)
            gate, up = (
                times(moved, halves[:, half], None if wide is None else wide.reshape(experts, 2, inner)[:, half])
                for half in range(2)
            )
        gate, up = mark(gate, "experts.gate_up_proj"), mark(up, "experts.gate_up_proj")
        return mark(times(self.activation(gate) * up, self.down, narrow), "experts.down_proj")


def mix(x: Any, weights: Any, mask: Any, gate_up: Any, down: Any, activation: Callable[[Any], Any], active: int) -> Any:
    """Return `sum_e weights[..., e] * expert_e(x)` over the gated experts that `mask` selects.

    - `x`: tokens [B, S, D], and the result too.
    - `weights`, `mask`: [B, S, E]; weights must be zero outside of the mask.
    - `gate_up`: [E, 2 I, D].
    - `down`: [E, D, I].
    - `active`: number of experts of a token.
    """
    return mix_experts(x, weights, mask, GatedExperts(gate_up, down, activation), active)


def mix_experts(x: Any, weights: Any, mask: Any, experts: Experts, active: int) -> Any:
    """Return `sum_e weights[..., e] * expert_e(x)` over the `experts` that `mask` selects, with the shapes of `mix`.

    The dispatch is that of `capacity`, by default slots. Sequences of one token are dispatched together.
    """
    import jax.numpy as jnp

    one = x.shape[1] == 1
    dispatched = _sorted if (_how.get() or _Dispatching(ExpertForm(), None, None)).form.kind == "sorted" else _slotted
    if one and x.shape[0] > 1:  # one token in each sequence: the sequences share the slots
        x, weights, mask = (jnp.swapaxes(value, 0, 1) for value in (x, weights, mask))
        return jnp.swapaxes(dispatched(x, weights, mask, experts, active, one), 0, 1)
    return dispatched(x, weights, mask, experts, active, one)


def sequence_length() -> int | None:
    """Return the number of tokens of a sequence as set by `capacity`; None if it is unknown."""
    how = _how.get()
    return None if how is None else how.length


def _tell(text: str) -> None:
    """Append a sentence to the notes of the current context, once."""
    how = _how.get()
    if how is not None and how.notes is not None and text not in how.notes:
        how.notes.append(text)


def _sorted(x: Any, weights: Any, mask: Any, layers: Experts, active: int, one: bool) -> Any:
    """Compute `mix` for the tokens [B, S, D] of each sequence, sorted by expert, inside of `capacity`.

    Raises `UserError` if the groups do not divide the experts. Model FLOPs are recorded.

    - `weights`, `mask`: [B, S, E].
    - `layers`: the experts.
    - `active`: number of experts of a token.
    - `one`: True in a step of one token a sequence.
    """
    import jax
    import jax.numpy as jnp

    how = _how.get()
    assert how is not None
    (batch, length), experts, groups = x.shape[:2], mask.shape[-1], how.form.groups
    if experts % groups:
        raise UserError(f"experts `{how.form.text}` cannot be: {experts} experts do not divide into {groups} groups.")
    rows = rows_of(length, active, experts, groups, how.factor)
    lossless = rows == rows_of(length, active, experts, groups, None)
    ragged = how.form.ragged and batch % groups == 0
    if how.form.ragged and not ragged:
        _tell(f"Rows of experts are sent padded: the batch of {batch} is no multiple of the {groups} groups.")
    _tell(
        "Experts get the tokens of each sequence sorted"
        + (f", in {groups} groups of experts with {rows} rows each" if groups > 1 else "")
        + (", of which only those that are real are sent" if ragged else "")
        + (" (no token is ever dropped)." if lossless else "; tokens beyond the rows are dropped.")
    )
    index = jax.lax.broadcasted_iota(jnp.int32, mask.shape, 2)
    hot = choose(mask.astype(jnp.float32), active)
    chosen = jnp.stack([jnp.where(each, index, 0).sum(-1) for each in hot], -1)
    share = jnp.stack([jnp.where(each, weights, 0.0).sum(-1) for each in hot], -1)
    real = batch * min(groups * rows, length * active)
    busiest = min(how.imbalance, max(1.0, groups * rows / (length * active)))  # at most as many as there are rows
    if busiest > 1 and experts > groups:
        _tell(
            f"The busiest device is assumed to have {busiest:g} times the mean number of tokens for its experts: their "
            "matmuls take as much longer where groups of experts are split; the exchange "
            + ("takes as much longer too." if ragged else "is padded, and takes the same.")
        )
    exchange = dispatch(chosen, experts, groups, rows).by_group(real if ragged else None, busiest)
    moved, counts = exchange.to_rows(x), exchange.sizes

    def times(rows: Any, weight: Any, bias: Any) -> Any:
        product = grouped_matmul(rows, weight, counts, real, busiest)
        return product if bias is None else product + _bias_of_rows(bias, counts, rows.shape[2]).astype(product.dtype)

    out = layers.apply(moved, times, one)
    model_flops.record(2.0 * batch * length * active * layers.weights_each)
    return jnp.einsum("bskd,bsk->bsd", exchange.from_rows(out), share.astype(x.dtype))


def _bias_of_rows(bias: Any, sizes: Any, rows: int) -> Any:
    """Return biases [E, F] for rows grouped by expert, `sizes` [G, P, E / G] of each: [G, P, R, F].

    Rows beyond the sizes have zeros.
    """
    import jax
    import jax.numpy as jnp

    ends = jnp.cumsum(sizes, axis=-1)[:, :, None]
    place = jax.lax.broadcasted_iota(jnp.int32, (1, 1, rows, 1), 2)
    own = (place < ends) & (place >= ends - sizes[:, :, None])
    bias = bias.reshape(sizes.shape[0], sizes.shape[-1], bias.shape[-1])
    return jnp.einsum("gpre,gef->gprf", own.astype(bias.dtype), bias)


def _slotted(x: Any, weights: Any, mask: Any, layers: Experts, active: int, one: bool) -> Any:
    """Compute `mix` by slots, for tokens along the second dim; the arguments are those of `_sorted`.

    The first tokens of an expert in each group of tokens get its slots; others are dropped.
    """
    import jax
    import jax.numpy as jnp

    batch, length, dim = x.shape
    experts = mask.shape[-1]
    size = group_size(length)
    how = _how.get()
    factor = CAPACITY_FACTOR if how is None or how.factor is None else how.factor
    # The mean number of an expert's tokens in a group, times the factor.
    slots = min(size, max(1, math.ceil(size * active * factor / experts)))
    if how is not None and how.form.all_slots:
        slots = size
    _tell(
        f"Experts are dispatched by einsum: groups of {size} tokens, {slots} slots for each of {experts} experts"
        + (" (no token is ever dropped)." if slots == size else "; tokens beyond the slots are dropped.")
    )
    groups = (batch, length // size, size)
    x = x.reshape(*groups, dim)
    mask, weights = mask.reshape(*groups, experts), weights.reshape(*groups, experts)
    # Position of a token among those of its expert: a triangular matmul, since a cumulative sum cannot be split.
    row = jax.lax.broadcasted_iota(jnp.int32, (size, size), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (size, size), 1)
    before = (row > column).astype(jnp.float32)
    place = jnp.einsum("st,bnte->bnse", before, mask.astype(jnp.float32))
    slot = jax.lax.broadcasted_iota(jnp.float32, (1, 1, 1, 1, slots), 4)
    dispatch = (place[..., None] == slot) & mask[..., None]
    moved = jnp.einsum("bnsec,bnsd->ebncd", dispatch.astype(x.dtype), x)

    def times(tokens: Any, weight: Any, bias: Any) -> Any:
        product = jnp.einsum("ebncd,efd->ebncf", tokens, weight)
        return product if bias is None else product + bias[:, None, None, None].astype(product.dtype)

    out = layers.apply(moved, times, one)
    model_flops.record(2.0 * batch * length * active * layers.weights_each)
    combine = (dispatch * weights[..., None]).astype(x.dtype)
    mixed = jnp.einsum("bnsec,ebncd->bnsd", combine, out)
    return mixed.reshape(batch, length, dim)
