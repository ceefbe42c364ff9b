"""Running the repeated layers of a torch module as `jax.lax.scan`."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from autoshard.errors import UserError
from autoshard.program import _flops
from autoshard.program._layers import Block
from autoshard.program._marks import INPUT, mark_torch, marking
from autoshard.program._policy import Policy, jax_policy
from autoshard.program._remat import listed_layers
from autoshard.program._scan_stages import run_in_stages
from autoshard.program._stack import Pipeline


class NotRepeatedError(Exception):
    """The layers of `block` are not simply called one after another; they have to run one by one."""

    def __init__(self, block: Block, reason: str) -> None:
        super().__init__(reason)
        self.block = block


@dataclasses.dataclass(frozen=True, slots=True)
class LayerRemat:
    """What layers compute again in the backward pass."""

    of: Callable[[str], Policy]
    """From a layer's name."""
    found: dict[str, None]
    """Every value of a layer that a policy may name, noted as layers are traced."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeights:
    """What the layers of one block hold, for each offset in a group: a dict from the name inside the layer."""

    params: list[dict[str, Any]]
    """Stacked parameters [repeats, ...]."""
    buffers: list[dict[str, Any]]
    """Stacked buffers; replaced by the updated ones when the block has run and is `stateful`."""
    fixed: list[dict[str, Any]]
    """Constants that all repeats share."""
    stateful: bool
    """True if the layers may update their buffers."""
    cache: Any = None
    """A `ServingCache` whose arrays the layers read and write."""
    pipeline: Pipeline | None = None
    """The stages that the layers are cut into; None: they run one after the other."""
    along: tuple[int, ...] = ()
    """Which of the tensors that layers of a pipeline are given belong to the batch, by their order."""
    firsts: list[int] = dataclasses.field(default_factory=list)
    """First dims of the hidden state and of those tensors, once the block has run."""


class _Pending:
    """Stands for the hidden state between two layers of a scan: shape and dtype, no value."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)


@contextlib.contextmanager
def scanned(
    module: Any,
    blocks: Sequence[Block],
    weights: dict[Block, LayerWeights],
    prepare: Callable[[Any], Any],
    remat: "LayerRemat",
    env: Any,
) -> Iterator[None]:
    """While inside, the layers of every block run as one scan.

    `prepare` is applied to one layer's parameters inside the body (casts to the compute dtype there, so that no full
    copy exists); `remat` is the same for all layers of a block.
    """
    replaced: list[Any] = []
    runs: list[_BlockRun] = []
    try:
        for block in blocks:
            run = _BlockRun(module, block, weights[block], prepare, remat, env)
            for index in range(block.period * block.repeats):
                layer = run.layers[index]
                layer.__dict__["forward"] = run.stand_in(index)
                replaced.append(layer)
            runs.append(run)
        try:
            yield
        except (NotRepeatedError, UserError):
            raise
        except Exception as error:  # the module's own code meets a hidden state that has no value yet
            for run in runs:
                if run.next:
                    reason = "something happens to the hidden state between two layers"
                    raise NotRepeatedError(run.block, reason) from error
            raise
    finally:
        for layer in replaced:
            layer.__dict__.pop("forward", None)


class _BlockRun:
    """One pass through one block: remembers the calls, then runs the scan at the last one."""

    def __init__(
        self,
        module: Any,
        block: Block,
        weights: LayerWeights,
        prepare: Callable[[Any], Any],
        remat: LayerRemat,
        env: Any,
    ) -> None:
        count = block.period * block.repeats
        self.block, self.weights = block, weights
        self.prepare, self.env = prepare, env
        self.policy, self.found = remat.of(block.layer(0)), remat.found
        self.layers = [module.get_submodule(block.layer(i % block.period, i // block.period)) for i in range(count)]
        self.calls: list[tuple[Any, Any, Any]] = []
        self.hidden: Any = None
        self.pending: Any = None
        self.rest: list[Any] = []
        self.beside: dict[int, Any] = {}
        self.next = 0

    def stand_in(self, index: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.call(index, args, kwargs)

        return forward

    def call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden, place = self._hidden(args, kwargs)
        if index != self.next:
            raise NotRepeatedError(self.block, "the layers are not called in order")
        if index == 0:
            self.calls, self.hidden, self.pending, self.rest = [], hidden, hidden, []
        self.next = (index + 1) % len(self.layers)
        if hidden is not self.pending:
            raise NotRepeatedError(self.block, "something happens to the hidden state between two layers")
        if index < self.block.period:
            self.calls.append((args, kwargs, place))
            self.rest.append(self._probe(index, hidden))
        else:
            first_args, first_kwargs, _ = self.calls[index % self.block.period]
            if not self._same((first_args, first_kwargs), (args, kwargs), hidden):
                raise NotRepeatedError(self.block, "the layers are called with different arguments")
        rebuild = self.rest[index % self.block.period]
        if index + 1 == len(self.layers):
            self.pending = None
            return rebuild(self._run())
        shape, dtype = tuple(hidden.shape), self.hidden._elem.dtype
        from torchax import tensor

        self.pending = tensor.Tensor(cast(Any, _Pending(shape, dtype)), self.env)
        return rebuild(self.pending)

    def _hidden(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        import torch

        if args and isinstance(args[0], torch.Tensor):
            value, place = args[0], 0
        elif isinstance(kwargs.get("hidden_states"), torch.Tensor):
            value, place = kwargs["hidden_states"], "hidden_states"
        else:
            raise NotRepeatedError(self.block, "the first argument of a layer is not a tensor")
        from torchax.view import View

        return (value.torch() if isinstance(value, View) else value), place

    def _invoke(
        self, offset: int, slices: tuple[Any, Any], hidden: Any, cached: dict[str, Any], index: Any
    ) -> tuple[Any, tuple[Any, Any]]:
        """Call one layer, number `index` of its stack; its output, and its buffers and the caches of all afterwards."""
        import torch

        params, buffers = slices
        state = self.env.j2t_iso({**self.prepare(params), **buffers, **self.weights.fixed[offset]})
        args, kwargs, place = self.calls[offset]
        if self.beside:
            args, kwargs = _replaced((args, kwargs), self.beside)
        layer = self.layers[offset]
        stand_in = layer.__dict__.pop("forward")
        try:
            with (
                self.weights.cache.layer(cached, index) if cached else contextlib.nullcontext({}) as written,
                marking(layer, self.policy.names, self.found),
                _hooks_outside(layer),
            ):
                hidden = mark_torch(hidden, INPUT)
                if place == 0:
                    args = (hidden, *args[1:])
                else:
                    kwargs = {**kwargs, place: hidden}
                out = torch.func.functional_call(layer, state, args, kwargs)
            return out, ({key: self.env.t2j_iso(state[key]) for key in buffers}, dict(written))
        finally:
            layer.__dict__["forward"] = stand_in

    def _probe(self, offset: int, hidden: Any) -> Callable[[Any], Any]:
        """Trace one layer abstractly; gives the function from the new hidden state to the layer's output."""
        import jax
        import torch

        known: dict[str, Any] = {}

        def one(h: Any, slices: Any, cached: Any, index: Any) -> Any:
            with _flops.counting():
                out, _ = self._invoke(offset, slices, self.env.j2t_iso(h), cached, index)
            known["container"] = type(out) if isinstance(out, (tuple, list)) else None
            first = out if isinstance(out, torch.Tensor) else out[0]
            known["others"] = [] if isinstance(out, torch.Tensor) else list(out[1:])
            return self.env.t2j_iso(first)

        shape = jax.ShapeDtypeStruct(tuple(hidden.shape), self.hidden._elem.dtype)
        slices = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape[1:], v.dtype), self._stacked(offset))
        number = jax.ShapeDtypeStruct((), jax.numpy.int32)
        result = jax.eval_shape(one, shape, slices, self._cached(offset), number)
        if (result.shape, result.dtype) != (shape.shape, shape.dtype):
            raise NotRepeatedError(self.block, "a layer changes the shape or dtype of the hidden state")
        args, kwargs, _ = self.calls[offset]
        given = {id(_element(x)) for x in _tensors((args, kwargs))}
        for other in known["others"]:
            if any(id(_element(x)) not in given for x in _tensors(other)):
                raise NotRepeatedError(self.block, "a layer returns more than its hidden state")
        container, others = known["container"], known["others"]
        return lambda h: h if container is None else container([h, *others])

    def _same(self, first: Any, now: Any, hidden: Any) -> bool:
        from torch.utils import _pytree

        a, a_tree = _pytree.tree_flatten(first)
        b, b_tree = _pytree.tree_flatten(now)
        if a_tree != b_tree:
            return False
        for x, y in zip(a, b, strict=True):
            if y is hidden or _element(y) is _element(hidden):
                continue
            if _element(x) is not _element(y) and not (_is_plain(x) and type(x) is type(y) and x == y):
                return False
        return True

    def _stacked(self, offset: int) -> tuple[Any, Any]:
        return self.weights.params[offset], self.weights.buffers[offset]

    def _cached(self, offset: int) -> dict[str, Any]:
        cache = self.weights.cache
        return (cache.stacked(self.block, offset) if cache is not None else None) or {}

    def _run(self) -> Any:
        import jax
        import jax.numpy as jnp

        counted: list[float] = [0.0]
        offsets = range(self.block.period)

        def body(h: Any, slices: Any, caches: Any = None, index: Any = None) -> Any:
            after: list[Any] = []
            written: list[Any] = []
            with _flops.counting() as scope:
                value = self.env.j2t_iso(h)
                for offset in offsets:
                    held = caches[offset] if caches else {}
                    out, (buffers, cached) = self._invoke(offset, slices[offset], value, held, index)
                    after.append(buffers if self.weights.stateful else {})
                    written.append(cached)
                    value = out[0] if isinstance(out, (tuple, list)) else out
            counted[0] = scope[0]
            return self.env.t2j_iso(value), after, written

        stacked = [self._stacked(offset) for offset in offsets]
        hidden = self.env.t2j_iso(self.hidden)
        beside = {id(_element(t)): t for args, kwargs, _ in self.calls for t in _tensors((args, kwargs))}
        beside.pop(id(_element(self.hidden)), None)
        beside = {key: t for key, t in beside.items() if not isinstance(_element(t), _Pending)}
        self.weights.firsts[:] = [t.shape[0] if t.ndim else 0 for t in (self.hidden, *beside.values())]
        if self.weights.pipeline is not None:
            return self.env.j2t_iso(self._staged(body, counted, stacked, hidden, beside))
        policy = jax_policy(self.policy)
        run = body if policy is None else jax.checkpoint(body, policy=policy, prevent_cse=False)

        def step(h: Any, slices: Any) -> Any:
            h, after, _ = run(h, slices)
            return h, after

        def caching(carried: Any, slices: Any) -> Any:
            h, index, caches = carried
            h, after, caches = run(h, slices, caches, index)
            return (h, index + 1, caches), after

        caches = [self._cached(offset) for offset in offsets]
        if any(caches):
            carried = (hidden, jnp.int32(0), caches)
            (final, _, caches), after = jax.lax.scan(caching, carried, stacked)
        else:
            final, after = jax.lax.scan(step, hidden, stacked)
        for offset, (buffers, cached) in enumerate(zip(after, caches, strict=True)):
            self.weights.buffers[offset].update(buffers)
            if cached:
                self.weights.cache.close_block(self.block, offset, cached)
        _flops.record(counted[0] * self.block.repeats)
        return self.env.j2t_iso(final)

    def _staged(
        self, body: Callable[..., Any], counted: list[float], stacked: Any, hidden: Any, given: dict[int, Any]
    ) -> Any:
        """The hidden state after the block, whose layers are the stages of a pipeline."""
        import jax

        assert self.weights.pipeline is not None
        policy = jax_policy(self.policy, mapped=1)

        def layer(now: Any, slices: Any, beside: Sequence[Any]) -> Any:
            def one(now: Any, slices: Any, beside: Sequence[Any]) -> Any:
                self.beside = dict(zip(given, self.env.j2t_iso(list(beside)), strict=True))
                try:
                    return body(now, slices)[0]
                finally:
                    self.beside = {}

            run = one if policy is None else jax.checkpoint(one, policy=policy, prevent_cse=False)
            after = run(now, slices, list(beside))
            _flops.record(counted[0])
            return after

        values = self.env.t2j_iso(list(given.values()))
        return run_in_stages(self.block, layer, stacked, hidden, values, self.weights.along, self.weights.pipeline)


@contextlib.contextmanager
def checkpointed_lists(module: Any, blocks: Sequence[Block], remat: LayerRemat, env: Any) -> Iterator[None]:
    """Rematerialise layers of module lists that are not scanned, one by one."""
    import jax
    import torch
    from torch.utils import _pytree

    replaced: list[Any] = []

    def wrap(layer: Any, choice: Policy) -> Callable[..., Any]:
        policy = jax_policy(choice)

        def forward(*args: Any, **kwargs: Any) -> Any:
            own = layer.__dict__.pop("forward")
            try:
                buffers = dict(layer.named_buffers())
                weights = {**dict(layer.named_parameters()), **buffers}
                flat, tree = _pytree.tree_flatten((weights, args, kwargs))
                where = [i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)]

                def pure(*arrays: Any) -> Any:
                    given = list(flat)
                    for i, array in zip(where, env.j2t_iso(arrays), strict=True):
                        given[i] = array
                    w, a, k = _pytree.tree_unflatten(given, tree)
                    with marking(layer, choice.names, remat.found), _hooks_outside(layer):
                        if a:
                            a = (mark_torch(a[0], INPUT), *a[1:])
                        elif "hidden_states" in k:
                            k = {**k, "hidden_states": mark_torch(k["hidden_states"], INPUT)}
                        out = torch.func.functional_call(layer, w, a, k)
                    return env.t2j_iso((out, {key: w[key] for key in buffers}))

                run = jax.checkpoint(pure, policy=policy)
                out, after = run(*env.t2j_iso([flat[i] for i in where]))
                for key, buffer in buffers.items():
                    buffer._elem = after[key]
                return env.j2t_iso(out)
            finally:
                layer.__dict__["forward"] = own

        return forward

    try:
        for name in listed_layers(module, blocks):
            choice = remat.of(name)
            if choice.base != "none":
                layer = module.get_submodule(name)
                layer.__dict__["forward"] = wrap(layer, choice)
                replaced.append(layer)
        yield
    finally:
        for layer in replaced:
            layer.__dict__.pop("forward", None)


@contextlib.contextmanager
def _hooks_outside(layer: Any) -> Iterator[None]:
    """While inside, a call of the layer runs no hooks of its own: the call that its forward stands in for runs them.

    Hooks that collect outputs (transformers' `output_hidden_states`) would have each twice, and once from a trace that
    is over.
    """
    kept = layer._forward_pre_hooks, layer._forward_hooks
    layer._forward_pre_hooks, layer._forward_hooks = type(kept[0])(), type(kept[1])()
    try:
        yield
    finally:
        layer._forward_pre_hooks, layer._forward_hooks = kept


def _tensors(tree: Any) -> list[Any]:
    import torch
    from torch.utils import _pytree

    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _replaced(tree: Any, values: dict[int, Any]) -> Any:
    """A tree of tensors with others for some, by their elements."""
    from torch.utils import _pytree

    leaves, spec = _pytree.tree_flatten(tree)
    return _pytree.tree_unflatten([values.get(id(_element(leaf)), leaf) for leaf in leaves], spec)


def _element(value: Any) -> Any:
    """What tells a tensor from others; a view, which is made of its elements anew each time, is told by itself."""
    return value if hasattr(value, "view_info") else getattr(value, "_elem", value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, tuple))
