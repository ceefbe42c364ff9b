"""One pass through the repeated layers of a torch module: their calls are remembered, and become one scan."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from autoshard.program import model_flops
from autoshard.program.jax.jaxprs import computation_digest
from autoshard.program.jax.layer_stack import Pipeline
from autoshard.program.remat_marks import INPUT
from autoshard.program.remat_policy import Policy, jax_policy
from autoshard.program.torch.layer_differences import Difference, opaque_numbers, reads
from autoshard.program.torch.module_state import Content, call_with, own_forward, reachable
from autoshard.program.torch.repeated_layers import Block
from autoshard.program.torch.stage_scan import run_in_stages
from autoshard.program.torch.torch_remat import hooks_outside, mark_torch, marking
from autoshard.program.torch_ops import views
from autoshard.program.torch_ops.torch_gradients import is_constant, mark_constant


class NotRepeatedError(Exception):
    """The layers of `block` are not simply called one after another; they have to run one by one."""

    def __init__(self, block: Block, reason: str, computed: Mapping[str, str] | None = None) -> None:
        """`computed` has a digest of what each layer traces to, by name, if these differ."""
        super().__init__(reason)
        self.block, self.computed = block, computed


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
    written: set[tuple[int, str]] = dataclasses.field(default_factory=set)
    """What the layers have written to of what they hold: the offset in a group, and the name inside the layer."""


class _Pending:
    """Stands for what one layer of a scan hands to the next: shape and dtype, no value."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)


def _modes() -> tuple[bool, ...]:
    """Return which of torch's modes are on that change what layers compute: gradients, and automatic casts."""
    import torch

    return torch.is_grad_enabled(), *(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))


@dataclasses.dataclass(slots=True)
class _Call:
    """How the first group calls one of its layers."""

    leaves: list[Any]
    """Everything that it is called with."""
    tree: Any
    """Puts `leaves` back into arguments."""
    links: dict[int, int] | None = None
    """Which of `leaves` are which of the outputs of the layer before; of the first layer, from the second group on."""
    modes: tuple[bool, ...] = dataclasses.field(default_factory=_modes)
    """Modes of torch in which it is called."""


class BlockRun:
    """One pass through one block: remembers the calls, then runs the scan at the last one.

    Layers hand on one hidden state or several: whatever of a layer's outputs the next one is called with.
    """

    def __init__(
        self,
        module: Any,
        block: Block,
        weights: LayerWeights,
        prepare: Callable[[Any], Any],
        remat: LayerRemat,
        env: Any,
        compared: bool = False,
    ) -> None:
        """`compared`: what the layers trace to is known to be the same."""
        count = block.period * block.repeats
        self.block, self.weights, self.compared = block, weights, compared
        self.prepare, self.env = prepare, env
        self.policy, self.found = remat.of(block.layer(0)), remat.found
        self.layers = [module.get_submodule(block.layer(i % block.period, i // block.period)) for i in range(count)]
        self.forwards = [layer.__dict__.get("forward") for layer in self.layers]
        """The `forward` that a layer has in its `__dict__`, as hooks of other libraries put it there, or None."""
        self.common = [] if compared else [self._held_in_common(offset) for offset in range(block.period)]
        """Objects and containers that the layers of an offset share."""
        self.next = 0
        self.ran = False
        """Whether all layers have been called."""
        self._begin()

    def _begin(self) -> None:
        self.calls: list[_Call] = []
        self.outputs: list[_Outputs] = []
        self.pending: list[Any] = []
        self.written: set[tuple[int, int]] = set()
        """Which linked leaves of which call its layer writes to."""
        self.beside: dict[int, Any] = {}
        self.deciding: set[int] = set()
        """Offsets of layers whose code reads something in which groups differ."""

    def _held_in_common(self, offset: int) -> list[Any]:
        theirs = {id(each) for each in reachable(self.layers[offset + self.block.period])}
        return [each for each in reachable(self.layers[offset]) if id(each) in theirs]

    def stand_in(self, index: int) -> Callable[..., Any]:
        """What layer number `index` is called as."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self.call(index, args, kwargs)

        return forward

    def call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Remember a call; the last one gives what comes out, those before what stands for it."""
        from torch.utils import _pytree

        if index != self.next:
            raise self._not("the layers are not called in order")
        if index == 0:
            self._begin()
        self.next = (index + 1) % len(self.layers)
        leaves, tree = _pytree.tree_flatten((args, kwargs))
        offset = index % self.block.period
        links = self._links(leaves)
        if index < self.block.period:
            if not any(_is_tensor(leaf) for leaf in leaves):
                raise self._not("a layer is not called with a tensor")
            self.calls.append(_Call(leaves, tree, links if index else None))
            self.outputs.append(self._watched_outputs(index))
        else:
            first = self.calls[offset]
            if first.links is None:
                first.links = links
                self._check_state()
            if not self._same(first, leaves, tree, links):
                raise self._not("the layers are called with different arguments")
            if first.modes != _modes():
                raise self._not("some layers are called without gradients or with other casts")
        outputs = self.outputs[offset]
        if index + 1 == len(self.layers):
            self._check_alike()
            self.pending, self.ran = [], True
            return outputs.rebuild(self._run())
        from torchax import tensor

        self.pending = [
            tensor.Tensor(cast(Any, _Pending(tuple(each.shape), each.dtype)), self.env) for each in outputs.shapes
        ]
        return outputs.rebuild(self.pending)

    def _not(self, reason: str) -> NotRepeatedError:
        return NotRepeatedError(self.block, reason)

    def _links(self, leaves: Sequence[Any]) -> dict[int, int]:
        """Which leaves are what the layer before hands on."""
        known = {id(each._elem): number for number, each in enumerate(self.pending)}
        links = {i: known[id(_element(leaf))] for i, leaf in enumerate(leaves) if id(_element(leaf)) in known}
        if self.pending and not links:
            raise self._not("something happens to the hidden state between two layers")
        if any(isinstance(_element(leaf), _Pending) for i, leaf in enumerate(leaves) if i not in links):
            raise self._not("the hidden state between two layers is used elsewhere")
        if self.pending and set(links.values()) != set(range(len(self.pending))):
            raise self._not("a layer returns more than its hidden state")
        return links

    def _check_state(self) -> None:
        """Raises `NotRepeatedError` if what a group hands to the next is not like what the first is called with."""
        first, last = self.calls[0], self.outputs[-1]
        for i, number in (first.links or {}).items():
            if not _is_tensor(first.leaves[i]):
                raise self._not("the layers are called with different arguments")
            before, after = _array(first.leaves[i]), last.shapes[number]
            if (tuple(before.shape), before.dtype) != (tuple(after.shape), after.dtype):
                raise self._not("a layer changes the shape or dtype of the hidden state")

    def _same(self, first: _Call, leaves: Sequence[Any], tree: Any, links: dict[int, int]) -> bool:
        if first.tree != tree or first.links != links:
            return False
        for i, (x, y) in enumerate(zip(first.leaves, leaves, strict=True)):
            if i not in links and _element(x) is not _element(y):
                if not (_is_plain(x) and type(x) is type(y) and x == y):
                    return False
        return True

    def _invoke(
        self, index: int, slices: tuple[Any, Any], given: Sequence[Any], cached: dict[str, Any], number: Any
    ) -> tuple[Any, tuple[Any, Any]]:
        """Call layer `index`, which is `number` of its stack, with `given` for the leaves that are linked.

        Its output, and its buffers and the caches of all afterwards.
        """
        import torch
        from torch.utils import _pytree

        offset = index % self.block.period
        params, buffers = slices
        state = self.env.j2t_iso({**self.prepare(params), **buffers, **self.weights.fixed[offset]})
        mark_constant([value for name, value in state.items() if name not in params])
        call = self.calls[offset]
        leaves = [self.beside.get(id(_element(leaf)), leaf) for leaf in call.leaves]
        layer = self.layers[index]
        with (
            own_forward(layer, self.forwards[index]),
            self.weights.cache.layer(cached, number) if cached else contextlib.nullcontext({}) as written,
            marking(layer, self.policy.names, self.found),
            hooks_outside(layer),
        ):
            places = self._places(call)
            for i, value in zip(places, given, strict=True):
                leaves[i] = mark_torch(value, INPUT)
            args, kwargs = _pytree.tree_unflatten(leaves, call.tree)
            tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
            changed = views.watched([leaves[i] for i in tensors])
            names = list(state)
            kept = views.watched([state[name] for name in names])
            common = views.watched([each for each in tensors_of(layer) if isinstance(each, type(state[names[0]]))])
            out = call_with(layer, state, args, kwargs)
            self.weights.written.update((offset, names[k]) for k in kept())
            if common():
                raise self._not("a layer writes to a buffer that all of them share")
            for i in (tensors[k] for k in changed()):
                if i not in places:
                    raise self._not("a layer writes to what all of them are called with")
                self.written.add((offset, i))
        return out, ({key: self.env.t2j_iso(state[key]) for key in buffers}, dict(written))

    def _places(self, call: _Call) -> list[int]:
        """Leaves of a call that change from group to group; of the first call at first the first tensor."""
        if call.links is not None:
            return sorted(call.links)
        return [next(i for i, leaf in enumerate(call.leaves) if _is_tensor(leaf))]

    def _abstract(self, index: int) -> tuple[Any, ...]:
        """What `_invoke` is given of layer `index`, as shapes: slices, linked values, caches and number."""
        import jax

        offset = index % self.block.period
        call = self.calls[offset]
        arrays = [_array(call.leaves[i]) for i in self._places(call)]
        given = [jax.ShapeDtypeStruct(tuple(each.shape), each.dtype) for each in arrays]
        slices = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape[1:], v.dtype), self._stacked(offset))
        return slices, given, self._cached(offset), jax.ShapeDtypeStruct((), jax.numpy.int32)

    def _outputs(self, index: int) -> "_Outputs":
        """Trace one layer abstractly to see what comes out of it."""
        import jax
        from torch.utils import _pytree

        known: dict[str, Any] = {}

        def one(slices: Any, given: Any, cached: Any, number: Any) -> Any:
            values = self.env.j2t_iso(given)
            with model_flops.counting():
                out, _ = self._invoke(index, slices, values, cached, number)
            call = self.calls[index]
            linked = set(self._places(call))
            leaves, known["tree"] = _pytree.tree_flatten(out)
            fixed = {id(_element(x)): x for i, x in enumerate(call.leaves) if _is_tensor(x) and i not in linked}
            known["leaves"] = [fixed.get(id(_element(leaf)), leaf) if _is_tensor(leaf) else leaf for leaf in leaves]
            known["new"] = [i for i, leaf in enumerate(leaves) if _is_tensor(leaf) and id(_element(leaf)) not in fixed]
            return self.env.t2j_iso([leaves[i] for i in known["new"]])

        shapes = jax.eval_shape(one, *self._abstract(index))
        kept = [None if i in known["new"] else leaf for i, leaf in enumerate(known["leaves"])]
        return _Outputs(shapes, kept, known["tree"], known["new"])

    def _watched_outputs(self, index: int) -> "_Outputs":
        """Trace one layer as `_outputs` does, and note if its code reads what decides between groups."""
        if self.compared:
            return self._outputs(index)
        common = [Content(each) for each in self.common[index]]
        with reads(self.layers[index], [each for offset, each in self.block.unlike if offset == index]) as seen:
            outputs = self._outputs(index)
        if seen and self._is_used(index, set(seen)):
            self.deciding.add(index)
        if any(content.is_changed() for content in common):
            raise self._not("a layer changes an object that others hold too")
        return outputs

    def _is_used(self, index: int, attributes: set[Difference]) -> bool:
        """Return False if a layer's code only passes on what it reads there, as a cache is given the layer's number."""
        layer = self.layers[index]
        if any(type(layer.get_submodule(path).__dict__.get(key)) is not int for path, key in attributes):
            return True
        try:
            with opaque_numbers(layer, attributes) as used:
                self._outputs(index)
        except Exception:  # C code takes no other object for a number
            return True
        return bool(used)

    def _check_alike(self) -> None:
        """Raises `NotRepeatedError` if layers of one offset trace to different computations."""
        period, layers = self.block.period, range(len(self.layers))
        if self.compared or not self.deciding:
            return
        digests = {index: self._digest(index) for index in layers if index % period in self.deciding}
        if any(digest != digests[index % period] for index, digest in digests.items()):
            computed = {self.block.layer(i % period, i // period): digest for i, digest in digests.items()}
            raise NotRepeatedError(self.block, "its layers compute different things", computed)
        self.compared = True

    def _digest(self, index: int) -> str:
        """Return a digest of what layer `index` computes, apart from the values of its weights."""

        def one(slices: Any, given: Any, cached: Any, number: Any) -> Any:
            with model_flops.counting():
                out, (buffers, written) = self._invoke(index, slices, self.env.j2t_iso(given), cached, number)
            return self.env.t2j_iso([leaf for leaf in _leaves(out) if _is_tensor(leaf)]), buffers, written

        return computation_digest(one, self._abstract(index))

    def _stacked(self, offset: int) -> tuple[Any, Any]:
        return self.weights.params[offset], self.weights.buffers[offset]

    def _cached(self, offset: int) -> dict[str, Any]:
        cache = self.weights.cache
        return (cache.stacked(self.block, offset) if cache is not None else None) or {}

    def _run(self) -> list[Any]:
        """What comes out of the last layer, all layers computed."""

        counted = [0.0, 0.0]
        constant = self._is_constant()
        offsets = range(self.block.period)
        entry = self.calls[0].links or {}
        order = sorted(entry)

        def body(states: Any, slices: Any, caches: Any = None, number: Any = None) -> Any:
            after: list[Any] = []
            written: list[Any] = []
            with model_flops.counting() as scope:
                given = self.env.j2t_iso(list(states))
                if constant:
                    mark_constant(given)
                fresh: list[Any] = []
                for offset in offsets:
                    if offset:
                        links = self.calls[offset].links or {}
                        given = [fresh[links[i]] for i in self._places(self.calls[offset])]
                    held = caches[offset] if caches else {}
                    out, (buffers, cached) = self._invoke(offset, slices[offset], given, held, number)
                    after.append(buffers if self.weights.stateful else {})
                    written.append(cached)
                    leaves = _leaves(out)
                    fresh = [leaves[i] for i in self.outputs[offset].new]
            counted[:] = scope
            return tuple(self.env.t2j_iso([fresh[entry[i]] for i in order])), after, written

        stacked = [self._stacked(offset) for offset in offsets]
        states = tuple(_array(self.calls[0].leaves[i]) for i in order)
        beside = {
            id(_element(leaf)): leaf
            for call in self.calls
            for i, leaf in enumerate(call.leaves)
            if _is_tensor(leaf) and i not in (call.links or {})
        }
        tensors = [*states, *beside.values()]
        self.weights.firsts[:] = [t.shape[0] if t.ndim else 0 for t in (tensors[0], *tensors[len(states) :])]
        if self.weights.pipeline is not None:
            final = self._staged(body, counted, stacked, states, beside)
        else:
            final = self._scanned(body, stacked, states)
            model_flops.record_count(counted, self.block.repeats)
        for offset, i in self.written:
            if offset == 0:  # what it was is only known to the scan
                views.lose(self.calls[0].leaves[i])
        places = {entry[i]: k for k, i in enumerate(order)}
        results = self.env.j2t_iso([final[places[number]] for number in range(len(places))])
        if constant:
            mark_constant(results)
        return results

    def _is_constant(self) -> bool:
        """Return True if no gradient reaches what the layers compute: neither they nor their inputs need one."""
        return not any(self.weights.params) and is_constant([call.leaves for call in self.calls[:1]])

    def _scanned(self, body: Callable[..., Any], stacked: Any, states: Any) -> Any:
        """The states after all layers; buffers and caches are left as layers have written them."""
        import jax
        import jax.numpy as jnp

        policy = jax_policy(self.policy)
        run = body if policy is None else jax.checkpoint(body, policy=policy, prevent_cse=False)

        def step(now: Any, slices: Any) -> Any:
            now, after, _ = run(now, slices)
            return now, after

        def caching(carried: Any, slices: Any) -> Any:
            now, number, caches = carried
            now, after, caches = run(now, slices, caches, number)
            return (now, number + 1, caches), after

        caches = [self._cached(offset) for offset in range(self.block.period)]
        if any(caches):
            carried = (states, jnp.int32(0), caches)
            (final, _, caches), after = jax.lax.scan(caching, carried, stacked)
        else:
            final, after = jax.lax.scan(step, states, stacked)
        for offset, (buffers, cached) in enumerate(zip(after, caches, strict=True)):
            self.weights.buffers[offset].update(buffers)
            if cached:
                self.weights.cache.close_block(self.block, offset, cached)
        return final

    def _staged(
        self, body: Callable[..., Any], counted: list[float], stacked: Any, states: Any, given: dict[int, Any]
    ) -> Any:
        """The states after the block, whose layers are the stages of a pipeline."""
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
            model_flops.record_count(counted)
            return after

        values = self.env.t2j_iso(list(given.values()))
        return run_in_stages(self.block, layer, stacked, states, values, self.weights.along, self.weights.pipeline)


@dataclasses.dataclass(frozen=True, slots=True)
class _Outputs:
    """What a layer gives back."""

    shapes: list[Any]
    """The shapes and dtypes of the tensors that it computes."""
    leaves: list[Any]
    """All that comes back, None in the place of what is computed."""
    tree: Any
    new: list[int]
    """Which leaves are computed; the others are what the layer was given."""

    def rebuild(self, computed: Sequence[Any]) -> Any:
        """The output with these tensors."""
        from torch.utils import _pytree

        leaves = list(self.leaves)
        for i, value in zip(self.new, computed, strict=True):
            leaves[i] = value
        return _pytree.tree_unflatten(leaves, self.tree)


def _leaves(tree: Any) -> list[Any]:
    from torch.utils import _pytree

    return _pytree.tree_leaves(tree)


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def tensors_of(layer: Any) -> list[Any]:
    """List the parameters and buffers of a layer, those of its modules included."""
    return [*layer.parameters(), *layer.buffers()]


def _array(tensor: Any) -> Any:
    """The JAX value of a tensor, or what stands for it."""
    from torchax.view import View

    return (tensor.torch() if isinstance(tensor, View) else tensor)._elem


def _element(value: Any) -> Any:
    """What tells a tensor from others; a view, which is made of its elements anew each time, is told by itself."""
    return value if hasattr(value, "view_info") else getattr(value, "_elem", value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str, tuple))
