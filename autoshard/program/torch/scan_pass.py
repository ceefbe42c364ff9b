"""One pass through the repeated layers of a torch module: the calls are recorded and become one scan."""

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
from autoshard.program.torch.low_rank import is_cast
from autoshard.program.torch.module_state import Content, call_with, own_forward, reachable
from autoshard.program.torch.repeated_layers import Block
from autoshard.program.torch.stage_scan import run_in_stages
from autoshard.program.torch.torch_remat import hooks_outside, mark_torch, marking
from autoshard.program.torch_ops import views
from autoshard.program.torch_ops.saved_values import saving_as_torch
from autoshard.program.torch_ops.torch_gradients import is_constant, mark_constant


class NotRepeatedError(Exception):
    """Raised when the layers of `block` cannot run as one scan, so that they have to run one by one."""

    def __init__(self, block: Block, reason: str, computed: Mapping[str, str] | None = None) -> None:
        """Store the block and the reason, which is the error's text.

        `computed` maps names of layers to digests of their traces if the traces differ; None for every other reason.
        """
        super().__init__(reason)
        self.block, self.computed = block, computed


@dataclasses.dataclass(frozen=True, slots=True)
class LayerRemat:
    """The rematerialisation policy of each layer, and a record of the values that policies may name."""

    of: Callable[[str], Policy]
    """Function from a layer's name to its policy."""
    found: dict[str, None]
    """Every value of a layer that a policy may name, recorded as layers are traced."""
    trains: bool = False
    """True if the layers have a backward pass."""


@dataclasses.dataclass(frozen=True, slots=True)
class LayerWeights:
    """Arrays of the layers of one block.

    Each list has one dict for each offset in a group, from the name inside the layer to the array.
    """

    params: list[dict[str, Any]]
    """Stacked parameters [repeats, ...], one dict for each offset."""
    buffers: list[dict[str, Any]]
    """Stacked buffers [repeats, ...]; once the block has run as a scan, the dicts have the updated ones."""
    fixed: list[dict[str, Any]]
    """Constants that all repeats share."""
    stateful: bool
    """True if the layers may update their buffers."""
    cache: Any = None
    """A `ServingCache` whose arrays the layers read and write."""
    pipeline: Pipeline | None = None
    """Stages that the layers are cut into; None runs the layers one after another."""
    along: tuple[int, ...] = ()
    """Numbers of the pipeline layers' other input tensors that belong to the batch."""
    firsts: list[int] = dataclasses.field(default_factory=list)
    """First dims of the hidden state and of the other input tensors, once the block has run."""
    written: set[tuple[int, str]] = dataclasses.field(default_factory=set)
    """Arrays that the layers wrote to: the offset in a group, and the name inside the layer."""


class _Pending:
    """A stand-in for a value that one layer of a scan passes to the next: shape and dtype without a value."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)


def _modes() -> tuple[bool, ...]:
    """Return if torch's gradients are on, and if autocast is on for `cpu` and for `cuda`."""
    import torch

    return torch.is_grad_enabled(), *(torch.is_autocast_enabled(device) for device in ("cpu", "cuda"))


@dataclasses.dataclass(slots=True)
class _Call:
    """The first group's call of one of its layers."""

    leaves: list[Any]
    """All arguments of the call, flattened."""
    tree: Any
    """Structure that turns `leaves` back into arguments."""
    links: dict[int, int] | None = None
    """Number of the previous layer's output, by the number of the leaf that receives it.

    None for the first layer until the second group is called.
    """
    modes: tuple[bool, ...] = dataclasses.field(default_factory=_modes)
    """Modes of torch that are on during the call."""


class BlockRun:
    """One pass through one block: records the calls, and runs the scan at the last call.

    The first group's layers are traced abstractly when they are called; the calls of later groups are only compared
    with these. The hidden state may be several tensors: each output of a layer that the next layer is called with.
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
        """Look up the layers of the block and their remat policy.

        - `module`: the whole module, which contains the block.
        - `weights`: stacked arrays of the layers.
        - `prepare`: function that casts one layer's parameters inside the loop's body.
        - `remat`: policy of each layer, and the record of the values that it may name.
        - `env`: the torchax environment.
        - `compared`: True if all layers are known to trace to the same computation.
        """
        count = block.period * block.repeats
        self.block, self.weights, self.compared = block, weights, compared
        self.prepare, self.env = prepare, env
        self.policy, self.found = remat.of(block.layer(0)), remat.found
        self.saves = remat.trains and self.policy.base == "none"
        """True if the backward pass reads saved values."""
        self.layers = [module.get_submodule(block.layer(i % block.period, i // block.period)) for i in range(count)]
        self.forwards = [layer.__dict__.get("forward") for layer in self.layers]
        """The `forward` in each layer's own `__dict__`, as hooks of other libraries store it, or None."""
        self.parameters = [dict(layer.named_parameters()).keys() for layer in self.layers[: block.period]]
        """Names of the parameters, frozen ones included, of the layers of each offset."""
        self.common = [] if compared else [self._held_in_common(offset) for offset in range(block.period)]
        """Objects and containers that the layers of an offset share."""
        self.next = 0
        """Number of the layer that must be called next."""
        self.ran = False
        """True if all layers have been called."""
        self._begin()

    def _begin(self) -> None:
        """Reset the records of calls, so that a new pass starts."""
        self.calls: list[_Call] = []
        self.outputs: list[_Outputs] = []
        self.pending: list[Any] = []
        """Stand-ins that the last call returned."""
        self.written: set[tuple[int, int]] = set()
        """Pairs (offset of a call, linked leaf) of the leaves that a layer writes to."""
        self.shared_values: dict[int, Any] = {}
        """Values in one stage's trace of the layers' unlinked input tensors, by identity of the element."""
        self.deciding: set[int] = set()
        """Offsets of layers whose code reads an attribute in which groups differ."""

    def _held_in_common(self, offset: int) -> list[Any]:
        """Return the reachable objects that the layers of an offset have in common, in the first two groups."""
        theirs = {id(each) for each in reachable(self.layers[offset + self.block.period])}
        return [each for each in reachable(self.layers[offset]) if id(each) in theirs]

    def stand_in(self, index: int) -> Callable[..., Any]:
        """Return the function that replaces the `forward` of layer number `index`."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            """Record the call, and return its result or stand-ins."""
            return self.call(index, args, kwargs)

        return forward

    def call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record a call of layer number `index`, and return its output.

        The last layer's call runs the scan and returns real values. Earlier outputs have tensors with shape and dtype
        alone in place of the computed ones. A call of layer 0 in turn starts a new pass.

        Raises `NotRepeatedError` if the layers cannot run as one scan. Reasons are a call out of order or without a
        tensor, other arguments or modes, and a hidden state that changes between layers.
        """
        from torch.utils import _pytree

        if index != self.next:
            raise self._not_repeated("the layers are not called in order")
        if index == 0:
            self._begin()
        self.next = (index + 1) % len(self.layers)
        leaves, tree = _pytree.tree_flatten((args, kwargs))
        offset = index % self.block.period
        links = self._links(leaves)
        if index < self.block.period:
            if not any(_is_tensor(leaf) for leaf in leaves):
                raise self._not_repeated("a layer is not called with a tensor")
            self.calls.append(_Call(leaves, tree, links if index else None))
            self.outputs.append(self._watched_outputs(index))
        else:
            first = self.calls[offset]
            if first.links is None:
                first.links = links
                self._check_state()
            if not self._same(first, leaves, tree, links):
                raise self._not_repeated("the layers are called with different arguments")
            if first.modes != _modes():
                raise self._not_repeated("some layers are called without gradients or with other casts")
        outputs = self.outputs[offset]
        if index + 1 == len(self.layers):
            self._check_alike()
            self.pending, self.ran = [], True
            return outputs.rebuild(self._run())
        self.pending = [self._without_value(each) for each in outputs.shapes]
        return outputs.rebuild(self.pending)

    def _without_value(self, shape: Any) -> Any:
        """Return a tensor that stands in for a value of this shape and dtype; functions of it raise errors."""
        from torchax import tensor

        return tensor.Tensor(cast(Any, _Pending(tuple(shape.shape), shape.dtype)), self.env)

    def _not_repeated(self, reason: str) -> NotRepeatedError:
        """Return the error that the layers of this block cannot be scanned for `reason`."""
        return NotRepeatedError(self.block, reason)

    def _links(self, leaves: Sequence[Any]) -> dict[int, int]:
        """Return, for each leaf that the previous layer computed, the number of that layer's output.

        The dict is empty for the first layer of a pass.

        Outputs that no layer receives, such as weights of attention, have no values. A module that reads one is not
        scanned.

        Raises `NotRepeatedError` if the module changes or reads the hidden state between two layers. It is raised too
        if the module passes an older hidden state.
        """
        known = {id(each._elem): number for number, each in enumerate(self.pending)}
        links = {i: known[id(_element(leaf))] for i, leaf in enumerate(leaves) if id(_element(leaf)) in known}
        if self.pending and not links:
            raise self._not_repeated("the layers are not called one after the other")
        if any(isinstance(_element(leaf), _Pending) for i, leaf in enumerate(leaves) if i not in links):
            raise self._not_repeated("the hidden state between two layers is used elsewhere")
        return links

    def _check_state(self) -> None:
        """Compare the outputs of the first group with its own linked inputs, which the scan carries.

        Raises `NotRepeatedError` if an input is no tensor, or if its shape or dtype differs.
        """
        first, last = self.calls[0], self.outputs[-1]
        for i, number in (first.links or {}).items():
            if not _is_tensor(first.leaves[i]):
                raise self._not_repeated("the layers are called with different arguments")
            before, after = _array(first.leaves[i]), last.shapes[number]
            if (tuple(before.shape), before.dtype) != (tuple(after.shape), after.dtype):
                raise self._not_repeated("a layer changes the shape or dtype of the hidden state")

    def _same(self, first: _Call, leaves: Sequence[Any], tree: Any, links: dict[int, int]) -> bool:
        """Return True if a later call has the structure, links and unlinked leaves of the `first` call of its offset.

        Unlinked tensors and objects must be identical, plain values equal and of one type.
        """
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
        """Call layer `index`, and return `(output, (buffers afterwards, updated caches))`, the two dicts as JAX values.

        Arguments that are not linked are those of the first group's call. Arrays and arguments that the layer writes
        to are added to `weights.written` and `written`.

        - `slices`: parameters and buffers of this layer, without the leading dim.
        - `given`: torch values of the linked leaves, in the order of `_places`.
        - `cached`: stacked caches of the block; empty without a cache.
        - `number`: number of the layer in its stack, [] int32.

        Raises `NotRepeatedError` if the layer writes to an unlinked argument or to a tensor that all layers share.
        """
        import torch
        from torch.utils import _pytree

        offset = index % self.block.period
        params, buffers = slices
        frozen = {key: value for key, value in buffers.items() if key in self.parameters[offset] and is_cast(key)}
        state = self.env.j2t_iso({**buffers, **self.prepare({**params, **frozen}), **self.weights.fixed[offset]})
        mark_constant([value for name, value in state.items() if name not in params])
        call = self.calls[offset]
        leaves = [self.shared_values.get(id(_element(leaf)), leaf) for leaf in call.leaves]
        layer = self.layers[index]
        with (
            own_forward(layer, self.forwards[index]),
            self.weights.cache.layer(cached, number) if cached else contextlib.nullcontext({}) as written,
            marking(layer, self.policy.names, self.found),
            saving_as_torch(self.saves),
            hooks_outside(layer),
        ):
            places = self._places(call)
            for i, value in zip(places, given, strict=True):
                leaves[i] = mark_torch(value, INPUT)
            args, kwargs = _pytree.tree_unflatten(leaves, call.tree)
            tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
            changed = views.watched([leaves[i] for i in tensors])
            names = list(state)
            written_state = views.watched([state[name] for name in names])
            shared = views.watched([each for each in tensors_of(layer) if isinstance(each, type(state[names[0]]))])
            out = call_with(layer, state, args, kwargs)
            stored = {names[k] for k in written_state()}
            self.weights.written.update((offset, name) for name in stored)
            if shared():
                raise self._not_repeated("a layer writes to a buffer that all of them share")
            for i in (tensors[k] for k in changed()):
                if i not in places:
                    raise self._not_repeated("a layer writes to what all of them are called with")
                self.written.add((offset, i))
        # A frozen parameter that the layer does not write to stays uncast.
        same = frozen.keys() - stored
        after = {key: value if key in same else self.env.t2j_iso(state[key]) for key, value in buffers.items()}
        return out, (after, dict(written))

    def _places(self, call: _Call) -> list[int]:
        """Return the sorted numbers of the leaves of a call that change from group to group.

        Before the links of the first call are known, this is the number of its first tensor.
        """
        if call.links is not None:
            return sorted(call.links)
        return [next(i for i, leaf in enumerate(call.leaves) if _is_tensor(leaf))]

    def _abstract(self, index: int) -> tuple[Any, ...]:
        """Return the last four arguments of `_invoke` for layer `index` as shapes (caches as stored arrays)."""
        import jax

        offset = index % self.block.period
        call = self.calls[offset]
        arrays = [_array(call.leaves[i]) for i in self._places(call)]
        given = [jax.ShapeDtypeStruct(tuple(each.shape), each.dtype) for each in arrays]
        slices = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape[1:], v.dtype), self._stacked(offset))
        return slices, given, self._cached(offset), jax.ShapeDtypeStruct((), jax.numpy.int32)

    def _outputs(self, index: int) -> "_Outputs":
        """Trace layer `index` of the first group abstractly, and return its outputs.

        A returned input that does not change from group to group is no computed tensor, but passed through.
        """
        import jax
        from torch.utils import _pytree

        known: dict[str, Any] = {}

        def one(slices: Any, given: Any, cached: Any, number: Any) -> Any:
            """Return the tensors that the layer computes as JAX values, and record its output's structure."""
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
        passed = [None if i in known["new"] else leaf for i, leaf in enumerate(known["leaves"])]
        return _Outputs(shapes, passed, known["tree"], known["new"])

    def _watched_outputs(self, index: int) -> "_Outputs":
        """Trace one layer like `_outputs`, and add it to `deciding` if its code uses an attribute in which groups
        differ.

        Raises `NotRepeatedError` if the layer changes an object that it shares with the next group's layer.
        """
        if self.compared:
            return self._outputs(index)
        common = [Content(each) for each in self.common[index]]
        with reads(self.layers[index], [each for offset, each in self.block.unlike if offset == index]) as seen:
            outputs = self._outputs(index)
        if seen and self._is_used(index, set(seen)):
            self.deciding.add(index)
        if any(content.is_changed() for content in common):
            raise self._not_repeated("a layer changes an object that others hold too")
        return outputs

    def _is_used(self, index: int, attributes: set[Difference]) -> bool:
        """Return False if all attributes are whole numbers that the layer's code reads only to pass them on.

        A cache that receives the layer's number is such a case. The layer is traced with opaque numbers in their place;
        if that trace fails, they count as used.
        """
        layer = self.layers[index]
        if any(type(layer.get_submodule(path).__dict__.get(key)) is not int for path, key in attributes):
            return True
        try:
            with opaque_numbers(layer, attributes) as used:
                self._outputs(index)
        except Exception:  # C code accepts only a real int
            return True
        return bool(used)

    def _check_alike(self) -> None:
        """Compare the traces of all layers at the offsets in `deciding`, and set `compared` if they agree.

        Nothing happens if no offset is in `deciding` or if the traces are known to agree.

        Raises `NotRepeatedError` if layers of one offset trace to different computations.
        """
        period, layers = self.block.period, range(len(self.layers))
        if self.compared or not self.deciding:
            return
        digests = {index: self._digest(index) for index in layers if index % period in self.deciding}
        if any(digest != digests[index % period] for index, digest in digests.items()):
            computed = {self.block.layer(i % period, i // period): digest for i, digest in digests.items()}
            raise NotRepeatedError(self.block, "its layers compute different things", computed)
        self.compared = True

    def _digest(self, index: int) -> str:
        """Return a digest of the computation of layer `index`, independent of the values of its weights."""

        def one(slices: Any, given: Any, cached: Any, number: Any) -> Any:
            """Return all tensors that the layer computes, its buffers and its caches, for the digest."""
            with model_flops.counting():
                out, (buffers, written) = self._invoke(index, slices, self.env.j2t_iso(given), cached, number)
            return self.env.t2j_iso([leaf for leaf in _leaves(out) if _is_tensor(leaf)]), buffers, written

        return computation_digest(one, self._abstract(index))

    def _stacked(self, offset: int) -> tuple[Any, Any]:
        """Return the stacked parameters and buffers of the layers of one offset."""
        return self.weights.params[offset], self.weights.buffers[offset]

    def _cached(self, offset: int) -> dict[str, Any]:
        """Return the stacked caches [repeats, ...] of the layers of one offset by name; empty without a cache."""
        cache = self.weights.cache
        return (cache.stacked(self.block, offset) if cache is not None else None) or {}

    def _run(self) -> list[Any]:
        """Compute all layers, as a scan or as pipeline stages; return the last layer's computed tensors, in order.

        An output that no layer receives has no value. FLOPs of all layers are counted. First dims are stored in
        `weights.firsts`. A tensor of the caller that layer 0 writes to is marked as lost.
        """

        counted = [0.0, 0.0]
        constant = self._is_constant()
        offsets = range(self.block.period)
        entry = self.calls[0].links or {}
        order = sorted(entry)

        def body(states: Any, slices: Any, caches: Any = None, number: Any = None) -> Any:
            """Run one group of layers; return the hidden states, and for each offset its buffers and caches afterwards.

            The buffers are empty dicts unless the layers are stateful. `counted` receives the group's FLOPs.
            """
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
                    layer_caches = caches[offset] if caches else {}
                    out, (buffers, cached) = self._invoke(offset, slices[offset], given, layer_caches, number)
                    after.append(buffers if self.weights.stateful else {})
                    written.append(cached)
                    leaves = _leaves(out)
                    fresh = [leaves[i] for i in self.outputs[offset].new]
            counted[:] = scope
            return tuple(self.env.t2j_iso([fresh[entry[i]] for i in order])), after, written

        stacked = [self._stacked(offset) for offset in offsets]
        states = tuple(_array(self.calls[0].leaves[i]) for i in order)
        unlinked = {
            id(_element(leaf)): leaf
            for call in self.calls
            for i, leaf in enumerate(call.leaves)
            if _is_tensor(leaf) and i not in (call.links or {})
        }
        tensors = [*states, *unlinked.values()]
        self.weights.firsts[:] = [t.shape[0] if t.ndim else 0 for t in (tensors[0], *tensors[len(states) :])]
        if self.weights.pipeline is not None:
            final = self._staged(body, counted, stacked, states, unlinked)
        else:
            final = self._scanned(body, stacked, states)
            model_flops.record_count(counted, self.block.repeats)
        for offset, i in self.written:
            if offset == 0:  # the written value exists only inside the scan
                views.lose(self.calls[0].leaves[i])
        results = self.env.j2t_iso(list(final))
        if constant:
            mark_constant(results)
        last = [self._without_value(each) for each in self.outputs[-1].shapes]
        for i, value in zip(order, results, strict=True):
            last[entry[i]] = value
        return last

    def _is_constant(self) -> bool:
        """Return True if the layers' results need no gradient: there are no parameters, and all inputs are constant."""
        return not any(self.weights.params) and is_constant([call.leaves for call in self.calls[:1]])

    def _scanned(self, body: Callable[..., Any], stacked: Any, states: Any) -> Any:
        """Return the hidden states after all layers, by one `jax.lax.scan` over the groups.

        The remat policy applies to each group as a whole. The stacked updated buffers are in `weights` afterwards, and
        the new arrays in the cache.

        - `body`: one group of layers, as in `_run`.
        - `stacked`: parameters and buffers for each offset.
        - `states`: hidden states before the block.
        """
        import jax
        import jax.numpy as jnp

        policy = jax_policy(self.policy)
        run = body if policy is None else jax.checkpoint(body, policy=policy, prevent_cse=False)

        def step(now: Any, slices: Any) -> Any:
            """Run one group without a cache: return its hidden states to carry, and its buffers to stack."""
            now, after, _ = run(now, slices)
            return now, after

        def caching(carried: Any, slices: Any) -> Any:
            """Run one group with caches, which are carried whole together with the group's number."""
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
        """Return the hidden states after the block, whose layers run as the stages of a pipeline.

        Updated buffers are dropped, and no cache is read.

        - `body`: one group of layers.
        - `counted`: FLOPs of one group, filled when `body` is traced.
        - `stacked`, `states`: stacked weights, and the hidden states before the block.
        - `given`: the other tensors that the layers are called with, by identity of the element.

        Raises `UserError` if the layers or the batch do not fit the pipeline.
        """
        import jax

        assert self.weights.pipeline is not None
        policy = jax_policy(self.policy, mapped=1)

        def layer(now: Any, slices: Any, shared_inputs: Sequence[Any]) -> Any:
            """Return the hidden state after one group of layers, and count the group's FLOPs."""

            def one(now: Any, slices: Any, shared_inputs: Sequence[Any]) -> Any:
                """Return the hidden state after one group, whose layers read `shared_inputs` in place of the unlinked
                tensors.
                """
                self.shared_values = dict(zip(given, self.env.j2t_iso(list(shared_inputs)), strict=True))
                try:
                    return body(now, slices)[0]
                finally:
                    self.shared_values = {}

            run = one if policy is None else jax.checkpoint(one, policy=policy, prevent_cse=False)
            after = run(now, slices, list(shared_inputs))
            model_flops.record_count(counted)
            return after

        values = self.env.t2j_iso(list(given.values()))
        return run_in_stages(self.block, layer, stacked, states, values, self.weights.along, self.weights.pipeline)


@dataclasses.dataclass(frozen=True, slots=True)
class _Outputs:
    """Outputs of one layer."""

    shapes: list[Any]
    """Shapes and dtypes of the tensors that the layer computes."""
    leaves: list[Any]
    """All output leaves, with None in place of the computed ones."""
    tree: Any
    """Structure that turns `leaves` back into the output."""
    new: list[int]
    """Numbers of the computed leaves; the others are inputs of the layer or no tensors."""

    def rebuild(self, computed: Sequence[Any]) -> Any:
        """Return the output with `computed` at the places `new`, one for each."""
        from torch.utils import _pytree

        leaves = list(self.leaves)
        for i, value in zip(self.new, computed, strict=True):
            leaves[i] = value
        return _pytree.tree_unflatten(leaves, self.tree)


def _leaves(tree: Any) -> list[Any]:
    """Return the leaves of a pytree of torch values."""
    from torch.utils import _pytree

    return _pytree.tree_leaves(tree)


def _is_tensor(value: Any) -> bool:
    """Return True for a torch tensor, also one of torchax."""
    import torch

    return isinstance(value, torch.Tensor)


def tensors_of(layer: Any) -> list[Any]:
    """List the parameters, then the buffers of a layer, including those of its modules; each once."""
    return [*layer.parameters(), *layer.buffers()]


def _array(tensor: Any) -> Any:
    """Return the JAX value of a torchax tensor or view, or the `_Pending` of a stand-in."""
    from torchax.view import View

    return (tensor.torch() if isinstance(tensor, View) else tensor)._elem


def _element(value: Any) -> Any:
    """Return the object that identifies a value: a tensor's element, and any other value itself.

    A view creates its elements at each access, so it identifies itself.
    """
    return value if hasattr(value, "view_info") else getattr(value, "_elem", value)


def _is_plain(value: Any) -> bool:
    """Return True for None, numbers, texts and tuples, which are compared by value."""
    return value is None or isinstance(value, (bool, int, float, str, tuple))
