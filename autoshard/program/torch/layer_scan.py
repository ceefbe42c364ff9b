"""The repeated layers of a torch module as `jax.lax.scan`."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from autoshard.errors import UserError
from autoshard.program.remat_marks import INPUT
from autoshard.program.remat_policy import Policy, jax_policy
from autoshard.program.torch.layer_remat import listed_layers
from autoshard.program.torch.module_state import call_with, own_forward, replace_forward
from autoshard.program.torch.repeated_layers import Block
from autoshard.program.torch.scan_pass import BlockRun, LayerRemat, LayerWeights, NotRepeatedError, tensors_of
from autoshard.program.torch.torch_remat import hooks_outside, mark_torch, marking
from autoshard.program.torch_ops import views
from autoshard.program.torch_ops.torch_gradients import is_constant, mark_constant
from autoshard.program.torch_ops.torchax_environment import used_elsewhere
from autoshard.program.torch_ops.wide_integers import WideNumberError


@contextlib.contextmanager
def scanned(
    module: Any,
    blocks: Sequence[Block],
    weights: dict[Block, LayerWeights],
    prepare: Callable[[Any], Any],
    remat: LayerRemat,
    env: Any,
    compared: set[Block],
) -> Iterator[None]:
    """Run the layers of every block as one scan while inside.

    - `weights`: stacked arrays of each block.
    - `prepare`: casts one layer's parameters inside the loop's body, so that no full copy in the compute dtype exists.
    - `remat`: policies, which must be the same for all layers of a block.
    - `env`: the torchax environment.
    - `compared`: blocks whose layers trace to one computation; blocks that are compared while inside are added.

    Raises `NotRepeatedError` if the layers of a block cannot run as one scan. Examples are layers that are not called
    one after the other, and parts that are used elsewhere. The layers' own `forward` is restored on exit.
    """
    replaced: list[tuple[Any, Any]] = []
    runs: list[BlockRun] = []
    elsewhere: set[Block] = set()
    try:
        runs += [BlockRun(module, block, weights[block], prepare, remat, env, block in compared) for block in blocks]
        layers = [(run, index, layer) for run in runs for index, layer in enumerate(run.layers)]
        for run, index, layer in layers:
            replaced.append((layer, replace_forward(layer, run.stand_in(index))))
        notes = {id(own): _adds(run.block, elsewhere) for run, _, layer in layers for own in tensors_of(layer)}
        try:
            with used_elsewhere(notes):
                yield
        except (NotRepeatedError, UserError, WideNumberError):
            raise
        except Exception as error:  # the module's code uses a hidden state without a value
            for run in runs:
                if run.next:
                    reason = "something happens to the hidden state between two layers"
                    raise NotRepeatedError(run.block, reason) from error
            raise
        for run in runs:
            if not run.ran:  # the module may call parts of a layer directly
                raise NotRepeatedError(run.block, "the layers are not called one after the other")
            if run.block in elsewhere:
                raise NotRepeatedError(run.block, "their parts are used outside of them too")
        compared.update(run.block for run in runs)
    finally:
        for layer, forward in reversed(replaced):
            replace_forward(layer, forward)


def _adds(block: Block, to: set[Block]) -> Callable[[], None]:
    """Return a function that adds the block to a set."""
    return lambda: to.add(block)


@contextlib.contextmanager
def checkpointed_lists(module: Any, blocks: Sequence[Block], remat: LayerRemat, env: Any) -> Iterator[None]:
    """Recompute the layers of unscanned module lists in the backward pass, one by one, while inside.

    Layers with the policy `none` run as they are. Values that policies name are marked, and found ones recorded in
    `remat.found`.
    """
    import jax
    import torch
    from torch.utils import _pytree

    replaced: list[tuple[Any, Any]] = []

    def wrap(layer: Any, choice: Policy) -> Callable[..., Any]:
        """Return a `forward` that runs the layer inside `jax.checkpoint`."""
        policy, own = jax_policy(choice), layer.__dict__.get("forward")

        def forward(*args: Any, **kwargs: Any) -> Any:
            with own_forward(layer, own):
                buffers, changed = dict(layer.named_buffers()), set[int]()
                stored: set[str] = set()
                weights = {**dict(layer.named_parameters()), **buffers}
                flat, tree = _pytree.tree_flatten((weights, args, kwargs))
                where = [i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)]

                def pure(*arrays: Any) -> Any:
                    """Run the layer on JAX arrays, and return its output and its buffers afterwards."""
                    given = list(flat)
                    for i, array in zip(where, env.j2t_iso(arrays), strict=True):
                        given[i] = array
                        if is_constant(flat[i]):
                            mark_constant(array)
                    w, a, k = _pytree.tree_unflatten(given, tree)
                    with marking(layer, choice.names, remat.found), hooks_outside(layer):
                        if a:
                            a = (mark_torch(a[0], INPUT), *a[1:])
                        elif "hidden_states" in k:
                            k = {**k, "hidden_states": mark_torch(k["hidden_states"], INPUT)}
                        called = [each for each in _pytree.tree_leaves((a, k)) if isinstance(each, torch.Tensor)]
                        written, names = views.watched(called), list(w)
                        written_weights = views.watched([w[name] for name in names])
                        out = call_with(layer, w, a, k)
                    changed.update(written())
                    stored.update(names[k] for k in written_weights())
                    return env.t2j_iso((out, {key: w[key] for key in buffers}))

                run = jax.checkpoint(pure, policy=policy)
                out, after = run(*env.t2j_iso([flat[i] for i in where]))
                for key in stored:
                    if key in buffers:
                        buffers[key]._elem = after[key]
                    else:
                        views.lose(weights[key])
                called = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
                for place in changed:  # the written value exists only inside the checkpoint
                    views.lose(called[place])
                results = env.j2t_iso(out)
                if is_constant([flat[i] for i in where]):
                    mark_constant(results)
                return results

        return forward

    try:
        for name in listed_layers(module, blocks):
            choice = remat.of(name)
            if choice.base != "none":
                layer = module.get_submodule(name)
                replaced.append((layer, replace_forward(layer, wrap(layer, choice))))
        yield
    finally:
        for layer, forward in reversed(replaced):
            replace_forward(layer, forward)
