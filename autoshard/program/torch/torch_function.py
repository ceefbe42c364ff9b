"""A torch module as a pure JAX function of named arrays; its repeated layers run as `jax.lax.scan`."""

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from autoshard.errors import ENDINGS, UserError
from autoshard.program import model_flops
from autoshard.program.jax.layer_stack import Pipeline
from autoshard.program.kernels.splash_attention import attention_kernel, check_kernel
from autoshard.program.moe.experts import ExpertForm, capacity
from autoshard.program.remat_marks import check_names
from autoshard.program.remat_policy import Policy
from autoshard.program.segments import asked_segments, watching
from autoshard.program.source_choices import check_exchange_name
from autoshard.program.torch.eight_bit_layers import computed_in_eight_bits, eight_bit_note
from autoshard.program.torch.layer_remat import numbered_layers, parse_remat, remat_text, split_blocks
from autoshard.program.torch.layer_scan import checkpointed_lists, scanned
from autoshard.program.torch.low_rank import is_cast
from autoshard.program.torch.lowering_errors import asks_for_values, lowering_error, place_of
from autoshard.program.torch.module_mode import ModuleMode
from autoshard.program.torch.module_patches import canonical_modules, drawing, lowered_environment
from autoshard.program.torch.module_state import call_with, preserved, without_stale_hooks
from autoshard.program.torch.repeated_layers import Block, find_blocks
from autoshard.program.torch.scan_pass import LayerRemat, LayerWeights, NotRepeatedError
from autoshard.program.torch.stage_scan import Firsts, find_along, staged_blocks
from autoshard.program.torch.step_options import LayerForms
from autoshard.program.torch_ops.masked_reads import media_in_place
from autoshard.program.torch_ops.recurrent import torchs_own_gru
from autoshard.program.torch_ops.torch_gradients import own_gradients, sparing
from autoshard.program.torch_ops.torch_refusals import mixed_floats
from autoshard.program.torch_ops.torchax_environment import folding
from autoshard.program.torch_ops.views import SharedWriteError, watched
from autoshard.program.torch_ops.wide_integers import (
    ASSUMED,
    WideNumberError,
    in_64_bits,
    narrow,
    set_bound,
    wide_reason,
)


_CONSTANT_ELEMENTS = 1 << 16
"""Largest number of elements of a computed buffer that becomes a constant of the program instead of an argument."""


_FOLDED_BUFFER_ELEMENTS = 1 << 10
"""Largest number of elements of a buffer whose values may decide what a module computes.

The limit admits schedules of a few steps and excludes running statistics.
"""


class TorchFunction:
    """A torch module as a pure function of named arrays, with repeated layers scanned.

    `params` and `buffers` are dicts from names to `jax.ShapeDtypeStruct`; a stacked name is `model.layers.*.mlp.w`.
    They are final once `settle` has returned.
    """

    def __init__(
        self,
        module: Any,
        layers: LayerForms | None = None,
        *,
        compute_dtype: str | None = None,
        frozen_apart: bool = False,
        stateful: bool = False,
        mode: ModuleMode | None = None,
    ) -> None:
        """Find the repeated layers of `module`, and describe its arguments; nothing is traced yet.

        - `layers`: forms in which its layers are computed; None for the defaults.
        - `compute_dtype`: dtype to which floating parameters are cast where they are used, also frozen ones; None for
          none.
        - `frozen_apart`: store parameters that need no gradient in `buffers` instead of `params`.
        - `stateful`: let the module update its buffers (running statistics); a call leaves the new ones in
          `updated_buffers`.
        - `mode`: mode in which the module is traced; None for its own.

        Raises `UserError` if the remat policy counts out more layers than the module has, or if a choice is unknown. It
        is raised too for a parameter or buffer whose values exceed 32 bits.
        """
        forms = layers or LayerForms()
        self.mode = mode
        self.module, self.compute_dtype, self.remat = module, compute_dtype, parse_remat(forms.remat)
        self.frozen_apart, self.stateful = frozen_apart, stateful
        self.attention = check_kernel(forms.attention)
        self.exchange = check_exchange_name(forms.exchange)
        self.quantize = forms.quantize
        self.savable: dict[str, None] = {}
        """Paths of the layers' values that a remat policy may name, as recorded in the traces so far."""
        self.updated_buffers: dict[str, Any] = {}
        """Buffers after the last call, by name, if the function is `stateful`."""
        self.may_become_stateful = False
        """True if `settle` makes a module that writes to its buffers `stateful`."""
        self.written: dict[str, None] = {}
        """Names of the parameters, buffers and constants that the module wrote to in the last call."""
        self.assigned: dict[str, None] = {}
        """Names of attributes, neither parameters nor buffers, that the module reassigned in the last call."""
        self.drawn: list[bool] = []
        """Not empty if the module drew random numbers in the last call."""
        self.changing: set[str] = set()
        """Names of small buffers that the module writes to, which therefore cannot be constants."""
        self.cache: Any = None
        """`ServingCache` of the layers, or None."""
        self.staged: dict[Block, Pipeline] = {}
        """Pipeline of each block whose layers run as stages; empty before `settle` and without a pipeline."""
        self.stacks: tuple[int, ...] = ()
        """Number of groups of each scanned block, from which pipeline stages may be formed."""
        self.along: dict[Block, tuple[int, ...]] = {}
        """Numbers of each staged block's other input tensors that belong to the batch."""
        self.firsts: dict[Block, list[int]] = {}
        """First dims of each block's hidden state and of its other input tensors, from the last call."""
        self.computed: dict[str, str] = {}
        """Digests of the layers' traces, by layer name, for lists whose layers trace to different computations."""
        self.compared: set[Block] = set()
        """Blocks whose layers are known to trace to the same computation."""
        blocks = find_blocks(module, trained=frozen_apart) if forms.scan and asked_segments() is None else ()
        self.layers = numbered_layers(module, blocks)
        """Numbers of the layers that have a remat policy of their own, by name and in the module's order."""
        self.remat.check(len(self.layers))
        self.blocks: tuple[Block, ...] = split_blocks(blocks, self.remat, self.layers)
        self.notes: list[str] = []
        """Sentences for the user on decisions of this class."""
        if not self.layers and self.remat.parts != (("none", 0),):
            self.notes.append(
                f"remat `{forms.remat}` changes nothing: no layers were found in `{type(module).__name__}`. They are "
                "looked for in a ModuleList, a ModuleDict numbered in order, and where a Sequential repeats them."
            )
        self.experts, self.capacity_factor, self.imbalance = forms.experts, forms.capacity_factor, forms.imbalance
        self.pipeline = forms.pipeline
        self.inputs: list[tuple[Any, int | None]] = []
        """Torch dtype and largest whole number (None if unknown) of each tensor that the module is called with."""
        self.wide = False
        """True if the module is computed in 64 bits where torch has 64, because its numbers exceed 32 bits."""
        self.folded = False
        """True if values that follow from sizes alone are computed during the trace, because the module reads them."""
        self.folds_buffers = False
        """True if small buffers that nothing updates become constants with the module's initial values.

        The module reads these values while it is traced.
        """
        self._describe()

    def _describe(self) -> None:
        """Fill `params`, `buffers`, `constants` and the maps from their names to layers, for the present blocks.

        A buffer becomes a constant if it has values, at most `_CONSTANT_ELEMENTS` elements, and is not persistent. With
        `folds_buffers`, small persistent buffers do so too. Buffers in `changing` never do.

        Raises `UserError` for a parameter (without a compute dtype) or buffer argument that 32 bits cannot represent.
        """
        import torch

        self.params: dict[str, Any] = {}
        """Shapes of the parameters by argument name; frozen ones are in `buffers` if `frozen_apart`."""
        self.frozen: set[str] = set()
        """Names of the buffers that are parameters without a gradient."""
        self.buffers: dict[str, Any] = {}
        """Shapes of the buffers that are arguments, by argument name."""
        self.constants: dict[str, Any] = {}
        """Host arrays of the buffers that are no arguments, by the module's own names."""
        self.members: dict[str, tuple[Block, int, str]] = {}
        """Block, offset in a group and name inside the layer of each stacked argument, by its name."""
        self.shared: dict[str, tuple[Block, int, str]] = {}
        """Block, offset in a group and name inside the layer of each constant that all layers of an offset use."""
        repeated: dict[str, tuple[Block, int, int, str]] = {}
        modules = dict(self.module.named_modules())
        for block in self.blocks:
            for offset in range(block.period):
                prefixes = [block.layer(offset, repeat) for repeat in range(block.repeats)]
                groups = [_own_tensors(modules[prefix]) for prefix in prefixes]
                # A tensor that all layers share is a separate argument, not part of a stack.
                keys = [key for key, first in groups[0].items() if not all(group[key] is first for group in groups)]
                for repeat, prefix in enumerate(prefixes):
                    repeated |= {f"{prefix}.{key}": (block, offset, repeat, key) for key in keys}
        for name, tensor in self.module.named_parameters():
            if self.compute_dtype is None:
                self._fitting("parameter", name, tensor)
            if self.frozen_apart and not tensor.requires_grad:
                self.frozen |= self._add(self.buffers, name, tensor, repeated)
            else:
                self._add(self.params, name, tensor, repeated)
        transient = {
            f"{prefix}.{key}" if prefix else key
            for prefix, child in modules.items()
            for key in child._non_persistent_buffers_set
        }
        norms = (torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.instancenorm._InstanceNorm)
        updated = {
            f"{prefix}.{key}" if prefix else key
            for prefix, child in modules.items()
            if isinstance(child, norms)
            for key in child._buffers
        }
        for name, tensor in self.module.named_buffers():
            fixed = self.folds_buffers and tensor.numel() <= _FOLDED_BUFFER_ELEMENTS and name not in updated
            if fixed and name in repeated:
                block, offset, _, key = repeated[name]
                fixed = self._is_in_all(block, offset, key)
            if name in self.changing:
                self._add(self.buffers, name, self._fitting("buffer", name, tensor), repeated)
            elif (name in transient or fixed) and tensor.device.type != "meta" and tensor.numel() <= _CONSTANT_ELEMENTS:
                if name not in repeated or repeated[name][2] == 0:
                    self.constants[name] = host_array(tensor)
                if name in repeated:
                    block, offset, _, key = repeated[name]
                    self.shared[name] = (block, offset, key)
            else:
                self._add(self.buffers, name, self._fitting("buffer", name, tensor), repeated)

    def _fitting(self, kind: str, name: str, tensor: Any) -> Any:
        """Return `tensor` itself if a 32-bit argument can represent it.

        Raises `UserError` if not; `kind` and `name` are for its text.
        """
        reason = wide_reason(tensor)
        if reason:
            raise UserError(
                f"the {kind} `{name}` {reason}, and a planned step takes 32 bits at most: use `module.float()`, or "
                "make it a small buffer with `persistent=False`, which is computed with in 64 bits."
            )
        return tensor

    def _is_in_all(self, block: Block, offset: int, key: str) -> bool:
        """Return True if a layer's buffer has the same values in the layers at `offset` of all groups."""
        import torch

        layers = [self.module.get_submodule(block.layer(offset, number)) for number in range(block.repeats)]
        first, *others = (dict(layer.named_buffers())[key] for layer in layers)
        return all(torch.equal(first, other) for other in others)

    def _add(self, kind: dict[str, Any], name: str, tensor: Any, repeated: Mapping[str, Any]) -> set[str]:
        """Add the shape of a tensor to `kind` under its argument's name, and return that name in a set.

        The first layer of a stack adds the whole stack [repeats, ...]; later layers of it add nothing and return an
        empty set.

        - `kind`: `params` or `buffers`, changed in place.
        - `repeated`: block, offset, group and key inside the layer, by the name of a tensor in a stack.
        """
        import jax

        shape, dtype = tuple(tensor.shape), jax_dtype(tensor.dtype)
        if name in repeated:
            block, offset, repeat, key = repeated[name]
            if repeat:
                return set()
            name = f"{block.label(offset)}.{key}"
            shape = (block.repeats, *shape)
            self.members[name] = (block, offset, key)
        kind[name] = jax.ShapeDtypeStruct(shape, dtype)
        return {name}

    @property
    def drops_tokens(self) -> bool:
        """True if the module has experts of transformers, and their form of dispatch may have no free slot for some
        tokens. The dispatch of other modules is their own code.
        """
        form = self.experts or ExpertForm()
        kinds = {type(child) for child in self.module.modules() if hasattr(child, "experts")}
        names = {base.__module__.partition(".")[0] for kind in kinds for base in kind.__mro__}
        return form.limited and "transformers" in names

    @contextlib.contextmanager
    def as_eager(self, wide: bool) -> Iterator[None]:
        """Compute like eager torch while inside: in the weights' dtype, without matmuls of 8 bits, with plain
        attention, and with slots for all tokens.

        The settings are restored on exit. `wide` adds computation in 64 bits; if it is False, a wide function stays
        wide.
        """
        names = ("compute_dtype", "attention", "experts", "capacity_factor", "wide", "quantize")
        before = {name: getattr(self, name) for name in names}
        self.compute_dtype, self.attention, self.wide, self.quantize = None, "plain", wide or self.wide, None
        if (self.experts or ExpertForm()).limited:
            self.experts, self.capacity_factor = ExpertForm(all_slots=True), None
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    @contextlib.contextmanager
    def attends_in(self, kernel: str) -> Iterator[None]:
        """Compute attention in another kernel (`KERNELS`) inside the context, such as in ops that JAX can analyse."""
        kept, self.attention = self.attention, kernel
        try:
            yield
        finally:
            self.attention = kept

    def __call__(
        self, params: Mapping[str, Any], args: Any, kwargs: Any, buffers: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the module on JAX values, and return its output as a pytree of JAX values, as `plain` converts it.

        The FLOPs of the call are added to those of the enclosing count.

        - `params`, `buffers`: arrays with the names of `self.params` and `self.buffers`.
        - `args`, `kwargs`: arguments of the module's call, as JAX or numpy values.
        """
        with model_flops.counting() as scope:
            result = self._apply(params, args, kwargs, buffers or {}, lambda out: out)
        model_flops.record_count(scope)
        return result

    def apply(self, params: Mapping[str, Any], args: Any, kwargs: Any, buffers: Any, then: Callable[[Any], Any]) -> Any:
        """Run the module and then `then(output)` in torch; return that result as `plain` converts it.

        The other arguments are those of `__call__`, with None for no `buffers`.
        """
        return self._apply(params, args, kwargs, buffers or {}, then)

    def _mixes_floats(self, params: Mapping[str, Any], buffers: Mapping[str, Any]) -> bool:
        """Return True if the arguments have several floating dtypes, or a parameter another one than in the module.

        A compute dtype, the option `param_dtype` and statistics in float32 do that, which eager torch may refuse.
        """
        import jax.numpy as jnp

        if self.compute_dtype is not None:
            return True
        own = dict(self.module.named_parameters())
        given = {
            str(each.dtype)
            for each in (*params.values(), *buffers.values())
            if jnp.issubdtype(each.dtype, jnp.floating)
        }
        stored = {
            str(own[names[0]].dtype).removeprefix("torch.") for names in self.weights().values() if names[0] in own
        }
        return len(given) > 1 or bool(stored and given - stored)

    def _apply(self, params: Any, args: Any, kwargs: Any, buffers: Any, then: Callable[[Any], Any]) -> Any:
        """Run the module inside all patches that a trace needs, and return `then(output)` as JAX values.

        `written`, `assigned`, `firsts`, `savable` and, if `stateful`, `updated_buffers` describe this call afterwards.
        In `wide` mode the call is repeated with 64-bit types enabled if they are not.

        Raises `WideNumberError` if a constant needs 64 bits and the function is not `wide`, and `NotRepeatedError` if a
        block cannot be scanned.
        """
        import jax
        import jax.numpy as jnp
        import numpy as np
        from torch.utils import _pytree

        env = lowered_environment()
        dtype = self.compute_dtype

        def prepare(weights: Any) -> Any:
            """Cast the floating arrays of a pytree to the compute dtype, if there is one."""
            if dtype is None:
                return weights
            return jax.tree.map(lambda w: w.astype(dtype) if jnp.issubdtype(w.dtype, jnp.floating) else w, weights)

        if self.wide and jax.dtypes.canonicalize_dtype("int64") == "int32":
            return in_64_bits(self._apply)(params, args, kwargs, buffers, then)
        layers: dict[Block, LayerWeights] = {}
        self.firsts, self.written = {}, {}
        for block in self.blocks:
            own, state, fixed = ([{} for _ in range(block.period)] for _ in range(3))
            pipeline, along = self.staged.get(block), self.along.get(block, ())
            layer_arrays = LayerWeights(own, state, fixed, self.stateful, self.cache, pipeline, along)
            layers[block], self.firsts[block] = layer_arrays, layer_arrays.firsts
        outer: dict[str, Any] = {}
        for name, value in [*params.items(), *buffers.items()]:
            if name in self.members:
                block, offset, key = self.members[name]
                layer_arrays = layers[block].params if name in params else layers[block].buffers
                layer_arrays[offset][key] = value
            else:
                outer[name] = prepare(value) if name in params or name in self.frozen and is_cast(name) else value
        for name, value in self.constants.items():
            if not self.wide and (reason := wide_reason(value)):
                raise WideNumberError(f"the buffer `{name}` {reason}")
            with jax.ensure_compile_time_eval() if self.folded else contextlib.nullcontext():
                constant = jnp.asarray(value)
            if name in self.shared:
                block, offset, key = self.shared[name]
                layers[block].fixed[offset][key] = constant
            else:
                outer[name] = constant
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_stale_hooks())
            stack.enter_context(contextlib.nullcontext() if self.wide else narrow())
            self.assigned = stack.enter_context(preserved(self.module))
            if self.mode is not None:
                self.mode(self.module)
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message="Explicitly requested dtype .*int64")  # torch's ids have 64 bits
            stack.enter_context(canonical_modules())
            stack.enter_context(folding(self.folded))
            stack.enter_context(mixed_floats(self._mixes_floats(params, buffers)))
            length = _sequence_length(args, kwargs)
            stack.enter_context(capacity(self.capacity_factor, self.notes, self.experts, self.imbalance, length))
            stack.enter_context(attention_kernel(self.attention, self.notes, self.exchange))
            stack.enter_context(computed_in_eight_bits(self.module, self.layers, self.quantize))
            remat = LayerRemat(self._remat_of, self.savable, self.frozen_apart)
            stack.enter_context(scanned(self.module, self.blocks, layers, prepare, remat, env, self.compared))
            stack.enter_context(checkpointed_lists(self.module, self.blocks, remat, env))
            stack.enter_context(watching(self.module))
            stack.enter_context(media_in_place(self.module))
            stack.enter_context(torchs_own_gru(self.module))
            stack.enter_context(own_gradients(env))
            stack.enter_context(env)
            self.drawn = stack.enter_context(drawing(env))
            if self.mode is not None:
                stack.enter_context(self.mode.noiseless(self.module))
            with jax.ensure_compile_time_eval() if self.folded else contextlib.nullcontext():
                given = jax.tree.map(
                    lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, (outer, tuple(args), dict(kwargs))
                )
            if self.wide:
                given = self._widened(given)
            state, torch_args, torch_kwargs = env.j2t_iso(given)
            called = [each for each in _pytree.tree_leaves((torch_args, torch_kwargs)) if hasattr(each, "_env")]
            for (_, bound), each in zip(self.inputs, called, strict=False):
                set_bound(each, ASSUMED if not bound else 4 * bound)
            without_gradients = [value for name, value in state.items() if name not in params]
            stack.enter_context(sparing([*without_gradients, torch_args, torch_kwargs] if self.frozen else None))
            names = list(state)
            written = watched([state[name] for name in names])
            result = plain(then(call_with(self.module, state, torch_args, torch_kwargs)))
            self.written = {names[k]: None for k in written()}
            for block, layer_arrays in layers.items():
                self.written.update({f"{block.label(offset)}.{key}": None for offset, key in layer_arrays.written})
            if self.stateful:
                self.updated_buffers = {name: self._after(name, buffers, state, layers, env) for name in buffers}
            return result

    def widen(self, reason: str, place: str = "") -> None:
        """Compute in 64 bits from now on, and add a note that gives the reason and its `place` in the module's code."""
        self.wide = True
        self.notes.append(
            f"The module is computed in 64 bits where torch does so, since {reason}{place}: arguments and parameters "
            "keep 32, and TPUs compute 64 in several steps."
        )

    def _widened(self, given: Any) -> Any:
        """Return `given` with inputs, parameters and buffers that have 64 bits in torch cast to 64 bits.

        - `given`: state by name, positional arguments and keyword arguments, all as JAX values.
        """
        import jax
        import torch
        from torch.utils import _pytree

        state, args, kwargs = given
        own = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        wide = {torch.int64: "int64", torch.float64: "float64", torch.complex128: "complex128"}
        leaves, tree = _pytree.tree_flatten((args, kwargs))
        arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        known = len(self.inputs) == len(arrays)
        for k, i in enumerate(arrays):
            # Whole numbers without a known torch dtype are assumed to be ids, which have 64 bits in torch.
            dtype = self.inputs[k][0] if known else torch.int64 if leaves[i].dtype == "int32" else torch.float32
            leaves[i] = leaves[i].astype(wide.get(dtype, leaves[i].dtype))
        state = {
            name: value.astype(wide.get(own[name].dtype, value.dtype)) if name in own else value
            for name, value in state.items()
        }
        return (state, *_pytree.tree_unflatten(leaves, tree))

    def _remat_of(self, layer: str) -> Policy:
        """Return the remat policy of a layer by its name; an unknown name has that of layer 0."""
        return self.remat.of(self.layers.get(layer, 0))

    def _after(self, name: str, buffers: Any, state: Any, layers: dict[Block, LayerWeights], env: Any) -> Any:
        """Return the value of the buffer or stack of buffers `name` after the call, in its stored dtype.

        `buffers` are the values before the call.
        """
        if name in self.members:
            block, offset, key = self.members[name]
            return layers[block].buffers[offset][key].astype(self.buffers[name].dtype)
        if name in self.frozen and name not in self.written:
            return buffers[name]  # uncast, as it was given
        return env.t2j_iso(state[name]).astype(self.buffers[name].dtype)

    def settle(self, run: Callable[..., Any], batch: Any, label: str) -> None:
        """Trace `run(params, batch[, buffers])` abstractly until every remaining block can be scanned.

        Each failed trace removes or splits blocks, widens to 64 bits, computes values of sizes in the trace, or turns
        buffers into constants. `notes` receives the reasons. Then the blocks are cut into pipeline stages, if there is
        a pipeline.

        - `run`: forward pass or loss that calls this function.
        - `batch`: inputs as shapes.
        - `label`: name of the module in errors.

        Raises `UserError` if the module does not lower, and if its remat policy names a value that the module lacks. It
        is raised too if the module writes to a parameter, or if the pipeline does not fit.
        """
        import jax

        while True:
            extra = (self.buffers,) if self.buffers else ()
            try:
                # JAX would not trace one function twice, and the mode may have changed.
                jax.eval_shape(lambda *given: run(*given), self.params, batch, *extra)
                if self._is_noisy(label):
                    continue
                check_names(remat_text(self.remat.parts), self.remat.names, self.savable, label)
                if self._writes_are_returned(label):
                    break
            except (UserError, *ENDINGS):
                raise
            except WideNumberError as error:
                self.widen(str(error), place_of(error, self.module))
            except NotRepeatedError as error:
                if self._is_noisy(label):
                    continue
                if error.computed is None:
                    self._give_up((error.block,), str(error))
                else:
                    self._tell_apart(error.block, error.computed)
            except BaseException as error:  # the user's code may raise anything
                if self._is_noisy(label):
                    continue
                if asks_for_values(error) and not self.folded:
                    self.folded = True
                    continue
                if asks_for_values(error) and not self.folds_buffers and self._fold_buffers():
                    continue
                if not self.blocks:
                    raise lowering_error(error, label, self.module) from error
                writes = "a layer writes to what it is called with, which is used elsewhere"
                reason = "the hidden state between two layers is used elsewhere"
                self._give_up(self.blocks, writes if isinstance(error, SharedWriteError) else reason)
        self.notes += self.mode.notes() if self.mode is not None else ()
        if self.quantize is not None:
            self.notes.append(eight_bit_note(self.module, self.layers, self.quantize, label))
        if self.drawn:
            self.notes.append(
                "The module draws random numbers, which are the same ones in every planned step: give them as an input."
            )
        if self.assigned:
            name, more = next(iter(self.assigned)), len(self.assigned) - 1
            self.notes.append(
                f"The module changes its attribute `{name}`{f' and {more} more' if more else ''} in a call: every "
                "planned step computes what the first call does; a buffer would be given back."
            )
        self.stacks = tuple(block.repeats for block in self.blocks)
        if self.pipeline is not None:
            self._stage(self.pipeline, run, batch, label)

    def _is_noisy(self, label: str) -> bool:
        """Return True if the last trace drew random numbers in training mode, so that the mode changed.

        Raises `UserError` if the class that drew them also wrote to its buffers.
        """
        if self.mode is None:
            return False
        written = {member for name in self.written for member in self._members(name)}
        return self.mode.settle(written, self.module, label)

    def _writes_are_returned(self, label: str) -> bool:
        """Return True if no other trace is needed because of writes to buffers: all are results, or a note says that
        they are lost.

        If `may_become_stateful` and some are not, the settings change so that the next trace returns the written
        buffers, and the result is False.

        Raises `UserError` if the module writes to its own parameters, since a step returns the optimizer's update of
        them.
        """
        for name in self.written:
            if name in self.params:
                raise UserError(
                    f"`{label}` could not be lowered: its code writes in place to its parameter `{name}`, which a "
                    "planned step would not keep; compute with a copy, or make it a buffer."
                )
        labels = {name: f"{block.label(offset)}.{key}" for name, (block, offset, key) in self.shared.items()}
        constants = [name for name in (*self.constants, *labels) if labels.get(name, name) in self.written]
        if constants and self.may_become_stateful:
            self.changing.update(constants)
            self._describe()
            return False
        lost = [name for name in self.written if not self.stateful or constants]
        if not lost:
            return True
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        if self.may_become_stateful:
            self.stateful = True
            self.notes.append(f"The module writes to its buffers (`{lost[0]}`{more}): a step gives them back.")
            return False
        self.notes.append(f"The module's writes to its buffers (`{lost[0]}`{more}) are lost after each call.")
        return True

    def _fold_buffers(self) -> bool:
        """Make small buffers constants with their present values, add a note, and return True; return False if there
        are none.
        """
        self.folds_buffers = True
        before = set(self.constants)
        self._describe()
        names = sorted(set(self.constants) - before)
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self.notes.append(
                f"The module's ops depend on values of its buffers: `{names[0]}`{more} has the values of the "
                "module at construction, and is no argument of the program."
            )
        return bool(names)

    def _stage(self, pipeline: Pipeline, run: Callable[..., Any], batch: Any, label: str) -> None:
        """Cut the scanned blocks into pipeline stages, and trace once more with them.

        `blocks`, `along` and `staged` change, and `notes` names blocks that stay whole.

        Raises `UserError` if the largest block cannot be cut, or if there is no block. It is raised too if the batch
        dims of the layers' other inputs cannot be found.
        """
        import jax

        cut = staged_blocks(self.blocks, pipeline, label, self.notes)
        staged = tuple(parts[-1] for parts in cut.values())
        self.blocks = tuple(part for block in self.blocks for part in cut.get(block, (block,)))
        self._describe()
        extra = (self.buffers,) if self.buffers else ()

        def note(given: Any) -> Firsts:
            """Trace the module on another batch, and return the first dims of each staged block's inputs."""
            jax.eval_shape(run, self.params, given, *extra)
            return {block: tuple(self.firsts[block]) for block in staged}

        try:
            self.along = find_along(note, batch)
        except (UserError, *ENDINGS):
            raise
        except BaseException as error:  # the user's code runs on an unexpected batch
            raise UserError(
                f"`{label}` cannot be cut into stages: its layers receive tensors with as many rows as the batch, "
                "and their batch dims are unknown, since the module does not run on a larger batch."
            ) from error
        self.staged = dict.fromkeys(staged, pipeline)
        jax.eval_shape(run, self.params, batch, *extra)

    def _give_up(self, blocks: tuple[Block, ...], reason: str) -> None:
        """Replace `blocks` by the repeated layers of the lists inside their layers, and note the reason for each."""
        for owner in dict.fromkeys(block.owner for block in blocks):
            self.notes.append(f"The layers of `{owner}` are not scanned: {reason}.")
        self._replace(blocks, find_blocks(self.module, blocks, self.computed, self.frozen_apart))

    def _tell_apart(self, block: Block, computed: Mapping[str, str]) -> None:
        """Replace the blocks of a list and of lists inside it by those of a new search, since its layers compute
        different things.

        - `computed`: digest of each layer's trace, by layer name; all digests so far count in the search.
        """
        self.computed |= computed
        others = find_blocks(self.module, computed=self.computed, trained=self.frozen_apart)
        prefix = f"{block.owner}." if block.owner else ""
        mine = [each for each in others if each.owner == block.owner or each.owner.startswith(prefix)]
        old = [each for each in self.blocks if each.owner == block.owner or each.owner.startswith(prefix)]
        self._replace(old, mine)

    def _replace(self, old: Collection[Block], new: Collection[Block]) -> None:
        """Replace the blocks `old` by `new`, in the order of the module, and describe the arguments again.

        Blocks are split where the remat policy changes.
        """
        order = {name: place for place, (name, _) in enumerate(self.module.named_modules())}
        remaining = [block for block in self.blocks if block not in old]
        blocks = sorted((*remaining, *new), key=lambda block: order[block.layer(0)])
        if new:
            self.layers = numbered_layers(self.module, blocks)
        self.blocks = split_blocks(blocks, self.remat, self.layers)
        self._describe()

    def values(self, dtype: str | None = None) -> dict[str, Any]:
        """Return the module's parameters as host arrays, stacked and named like `params`.

        The module must have real weights. `dtype` is that of all arrays; None for the parameters' own.
        """
        own = dict(self.module.named_parameters())
        return {name: self._value(name, own, dtype) for name in self.params}

    def buffer_values(self) -> dict[str, Any]:
        """Return the module's present buffers, and its frozen parameters, as host arrays, stacked and named like
        `buffers`.
        """
        own = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return {name: self._value(name, own, None) for name in self.buffers}

    def weights(self) -> dict[str, tuple[str, ...]]:
        """Map each parameter's name, frozen ones included, to the names of the module's tensors that it stacks.

        A parameter that is no stack has its own name alone.
        """
        return {name: self._members(name) for name in (*self.params, *self.frozen)}

    def _members(self, name: str) -> tuple[str, ...]:
        """Return the names of the module's tensors that the argument `name` stacks, first layer first; else `name`
        alone.
        """
        if name not in self.members:
            return (name,)
        block, offset, key = self.members[name]
        return tuple(f"{block.layer(offset, number)}.{key}" for number in range(block.repeats))

    def _value(self, name: str, own: Mapping[str, Any], dtype: str | None) -> Any:
        """Return the argument `name` as a host array, stacked from the tensors `own` by name, cast to `dtype` unless it
        is None.
        """
        import numpy as np

        arrays = [host_array(own[member]) for member in self._members(name)]
        array = np.stack(arrays) if name in self.members else arrays[0]
        return array if dtype is None else array.astype(dtype)


def _sequence_length(args: Any, kwargs: Any) -> int | None:
    """Return the second dim of the first integer array [B, S] of a call, or None if there is none.

    Keyword arguments are searched before positional ones.
    """
    import jax

    leaves = jax.tree.leaves((kwargs, args))
    ids = [leaf.shape for leaf in leaves if getattr(leaf, "ndim", 0) == 2 and leaf.dtype.kind in "iu"]
    return int(ids[0][1]) if ids else None


def plain(value: Any) -> Any:
    """Convert torch outputs to pytrees of JAX values: tensors become arrays, mappings dicts, lists tuples.

    Entries that are None are dropped; any other value is returned unchanged.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return lowered_environment().t2j_iso(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, (tuple, list)):
        return tuple(plain(item) for item in value if item is not None)
    return value


def _own_tensors(layer: Any) -> dict[str, Any]:
    """Return all parameters and buffers of a layer and its modules by name; one under several names has the first."""
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def host_array(tensor: Any) -> Any:
    """Return a copy of a torch tensor on the host as a numpy array; bfloat16 becomes the dtype of `ml_dtypes`."""
    import torch

    value = tensor.detach().cpu().clone()
    if value.dtype == torch.bfloat16:
        import ml_dtypes

        return value.float().numpy().astype(ml_dtypes.bfloat16)
    return value.numpy()


def jax_dtype(dtype: Any) -> Any:
    """Return the JAX dtype of a torch dtype; 64 bits become 32 unless JAX has 64 enabled."""
    import jax
    import numpy as np

    text = str(dtype).removeprefix("torch.")
    return jax.dtypes.canonicalize_dtype(np.bool_ if text == "bool" else jax.numpy.dtype(text))
