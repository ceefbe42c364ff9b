"""Conversion of any torch module to a `Program`."""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Unpack

from autoshard.base.processes import collecting_seldom
from autoshard.errors import UserError
from autoshard.program import example_values
from autoshard.program import model_flops as flop_counter
from autoshard.program.argument_names import input_names, leaf_name
from autoshard.program.jax import optimizers, train_step
from autoshard.program.jax.gradient_groups import Reduced, doubled_reduction, reduction_of
from autoshard.program.jax.layer_stack import in_stages
from autoshard.program.jax.trace import trace
from autoshard.program.moe.experts import check_experts
from autoshard.program.program_record import Program, Role
from autoshard.program.segments import one_microbatch
from autoshard.program.torch.eager_twin import EagerCall, EagerTwin, closed_types, first_tensor, host_tensor
from autoshard.program.torch.linear_backward import checked_reduction
from autoshard.program.torch.low_rank import check_lora, with_adapters
from autoshard.program.torch.module_mode import ModuleMode
from autoshard.program.torch.module_patches import lowered_environment
from autoshard.program.torch.module_state import preserved
from autoshard.program.torch.step_options import (
    ModuleOptions,
    TrainOptions,
    given_options,
    read_layers,
    read_training,
)
from autoshard.program.torch.torch_function import TorchFunction, jax_dtype
from autoshard.program.torch_ops import wide_integers
from autoshard.program.torch_ops.layer_lowerings import without_batch_statistics
from autoshard.program.torch_ops.torch_imports import require_torch


@collecting_seldom()
def from_torch(
    module: Any,
    example_inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    loss: Callable[..., Any] | None = None,
    targets: Any = None,
    make_args: Callable[[int], tuple[Any, ...]] | None = None,
    **options: Unpack[ModuleOptions],
) -> Program:
    """Return a `Program` from any `torch.nn.Module`, on the meta device or with real weights.

    Inference gives `forward(params, batch[, buffers])`. With `train` the program is a whole step with an optax
    optimizer: `(params, opt_state, batch[, buffers]) -> (params, opt_state, loss)`. A module that writes to its buffers
    (a cache of keys and values, a counter) returns them too: `forward(params, batch, buffers) -> (result, buffers)`.
    Its step is `(params, opt_state, batch, buffers) -> (params, opt_state, buffers, loss)`. A training step is that of
    the module after `module.train()`, without dropout; parts that the user put into evaluation mode stay in it. A
    forward pass is that of evaluation mode.

    - `example_inputs`, `kwargs`: the arguments of the module's call; a tensor or a tuple of tensors, meta tensors
      allowed.
    - `loss`, `targets`: torch code `loss(output)`, or `loss(output, targets)` if `targets` is given.
    - `make_args`: function from a seed to example arguments of the program; by default they are generated.

    Options:

    - `train`: True for a training step. `optimizer`: a name in `optimizers.OPTIMIZERS`, by default `adamw`.
    - `dtype`: compute dtype. Parameters are cast to it where they are used, and float inputs too; targets stay.
    - `param_dtype`, `state_dtype`: dtype of the stored parameters, and of the optimizer's moments.
    - `cast_inputs`: False leaves inputs uncast; torch then promotes the other operands to the dtype of the inputs.
    - `batch_statistics`: let all batch norms use and update running statistics, or none. By default those of a training
      step do, unless the user put them into evaluation mode.
    - `scan`: False unrolls repeated layers.
    - `remat`: `none`, `dots` or `full`, optionally with values, such as `full,keep=q_proj/k_proj,offload=input`. `keep`
      saves on the device, `offload` in the host's memory. `full:20+none` gives the first 20 layers another policy.
    - `attention`: kernel for `scaled_dot_product_attention`. `plain` has scores in memory, `splash` is jax's TPU
      kernel, `cudnn` is for GPUs. `auto` is splash wherever possible; a note names the exceptions.
    - `exchange`: exchange of queries with keys and values when a plan splits the sequence. `gather` gathers keys and
      values, `heads` swaps the sequence for heads and back, `ring` passes keys and values around, `auto` is the
      fastest.
    - `microbatches`: parts of the batch that are computed one after another in training. Gradients are averaged, or
      summed if the loss is a sum over examples. A loss that divides by a count (of targets that are not ignored) is
      divided by the whole batch's count.
    - `experts`, `capacity_factor`, `imbalance`: dispatch of tokens to experts in transformers' Mixtral and DeepSeek-V3,
      as in `hf:` sources.
    - `stages`, `schedule`: pipeline stages of the repeated layers, and their schedule, as in `autoshard.stack`. By
      default there are as many `microbatches` as stages.
    - `gradient_groups`: parts of the batch with separate gradients until all microbatches are done. Devices with one
      part each then reduce gradients once a step.
    - `lora`: trains low-rank adapters of a copy of the module and freezes its parameters: `16` or
      `r=16,alpha=32,targets=q_proj/v_proj,base=nf4`. `base` (`int8`, `int4` or `nf4`) stores the weights of linear
      layers in 8 or 4 bits.
    - `quantize`: `int8` or `fp8` multiplies the linear layers of repeated layers in 8 bits, in both passes of a step.

    Raises `UserError` if an operation has no lowering or the call fails.
    """
    require_torch()
    import jax

    label = name or type(module).__name__
    given = given_options("from_torch", ModuleOptions, options)
    layers = read_layers(given)
    training = read_training(given, layers, own_loss=loss is not None)
    train, param_dtype, lora = training is not None, given.get("param_dtype"), check_lora(given)
    for flag in ("dtype", "param_dtype", "state_dtype"):
        _check_dtype(flag, given.get(flag))
    example_inputs, kwargs, targets = one_microbatch(example_inputs, kwargs, targets)
    inputs = tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
    mode = ModuleMode(train, given.get("batch_statistics"))
    asking = next(iter(mode.asking(module)), None)
    notes = []
    if _has_dropout(module):
        notes.append(f"Dropout is off{'' if train and asking else ': the module runs in evaluation mode'}.")
    elif asking and not train:
        notes.append(f"The module runs in evaluation mode: `{asking.__name__}` asks whether it is being trained.")
    if lora is not None:
        module, more = with_adapters(module, lora, label)
        notes += more
    with preserved(module):
        statistics = mode(module)
    function = TorchFunction(
        module,
        dataclasses.replace(layers, experts=check_experts(given, module, label)),
        compute_dtype=given.get("dtype"),
        frozen_apart=train,
        stateful=statistics,
        mode=mode,
    )
    function.may_become_stateful = True
    if train:
        _check_storages(module, label)
    kwargs = dict(kwargs or {})
    if train and _caches(module, kwargs):
        kwargs["use_cache"] = False
        notes.append("`use_cache` is off: no other step reads what a step of training would keep.")
    _note_widths(function, input_names(module, len(inputs)), inputs, kwargs)
    batch, rebuild, examples = _split_inputs(module, inputs, kwargs, targets)
    if train and loss is None:
        notes.append("No loss was given: the step minimises the mean of squares of the first output.")
    hooked = [path for path, child in module.named_modules() if child._backward_hooks or child._backward_pre_hooks]
    if train and hooked:
        more = f" and {len(hooked) - 1} more" if len(hooked) > 1 else ""
        notes.append(
            f"Backward hooks of `{hooked[0] or label}`{more} are not run: no gradient is as they would make it."
        )

    def cast(data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `data` with float inputs cast to the compute dtype, but not targets; unchanged without one or
        `cast_inputs`.
        """
        if function.compute_dtype is None or not given.get("cast_inputs", True):
            return data
        fed = {key for key in data if targets is None or key.partition(".")[0] != "targets"}
        return {
            key: value.astype(function.compute_dtype)
            if key in fed and jax.numpy.issubdtype(value.dtype, jax.numpy.floating)
            else value
            for key, value in data.items()
        }

    def forward(params: Any, data: Any, *buffers: Any) -> Any:
        """Return the module's output for a batch of named arrays."""
        args, keywords, _ = rebuild(cast(data))
        return function(params, args, keywords, buffers[0] if buffers else None)

    closed: list[str] = []

    def loss_of(params: Any, data: Any, *buffers: Any) -> Any:
        """Return the loss of one batch; without a user's loss, the fp32 mean of squares of the first output."""
        import jax.numpy as jnp

        if loss is None:
            first = jax.tree.leaves(forward(params, data, *buffers))[0]
            return jnp.mean(jnp.square(first.astype(jnp.float32)))
        args, keywords, wanted = rebuild(cast(data))
        extra = () if targets is None else (lowered_environment().j2t_iso(wanted),)

        def judged(out: Any, of: Callable[..., Any] = loss) -> Any:
            """Return the user's loss of an output, whose closed types are noted."""
            closed[:] = closed_types(out)
            return of(out, *extra)

        return function.apply(params, args, keywords, buffers[0] if buffers else None, judged)

    def eager_call(module: Any, data: Mapping[str, Any]) -> Any:
        """Call the module in eager torch on host arrays, and return its result, or in training its loss as in
        `loss_of`.
        """
        args, keywords, wanted = rebuild({key: host_tensor(value, examples[key].dtype) for key, value in data.items()})
        with mode.noiseless(module):
            out = module(*args, **keywords)
        if not train:
            return out
        if loss is None:
            return first_tensor(out).float().square().mean()
        return loss(out) if targets is None else loss(out, wanted)

    function.settle(loss_of if train else forward, batch, label)
    inner = (path for path, child in module.named_modules() if path and _caches(child, {}))
    if layers.scan and not function.blocks and (cached := next(inner, None)):
        notes.append(
            f"The layers of `{cached}` are not scanned, since each writes to a cache of its own: set `use_cache` of "
            "its configuration to False."
        )
    own = function.values if _is_real(module) else None
    program = torch_program(
        function,
        loss_of if train else forward,
        batch,
        name=label,
        train=training,
        param_dtype=param_dtype,
        make_args=make_args,
        values=own,
        notes=notes,
        eager=EagerCall(eager_call, mode, examples if make_args is None else {}),
    )

    def reduction(dims: Mapping[str, int]) -> Reduced:
        """Return the reduction of the examples in the user's loss, else in the first output; see `Program`."""

        def traced(*args: Any) -> Any:
            """Return the loss or the first output, and buffers; JAX would keep the trace of a function of outside."""
            first = jax.tree.leaves(forward(*args) if loss is None else loss_of(*args))[0]
            return first, *(function.updated_buffers[name] for name in written)

        args = function.params, batch, *((function.buffers,) if function.buffers else ())
        written = sorted(function.buffers) if function.stateful else []
        with without_batch_statistics() as norms, function.attends_in("plain"):
            examples = {key: dims.get(key, -1) for key in batch}
            found = checked_reduction(lambda: doubled_reduction(traced, args, 1, examples), traced, args)
        names = tuple(written[number] for number in found.written)
        return dataclasses.replace(found, norms=bool(norms), written=names, closed=closed[0] if closed else "")

    return dataclasses.replace(program, reduction=reduction)


def _caches(module: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return True if a model of transformers returns a cache of keys and values by default.

    It has `use_cache` set in its text configuration and as an argument of `forward`. False if `kwargs` decide on a
    cache.
    """
    if any(key in kwargs for key in ("use_cache", "past_key_values")):
        return False
    read = getattr(getattr(module, "config", None), "get_text_config", None)
    model = module.get_base_model() if hasattr(module, "get_base_model") else module  # PEFT passes its inputs on
    caches = read is not None and getattr(read(), "use_cache", False)
    return bool(caches) and "use_cache" in inspect.signature(model.forward).parameters


def torch_program(
    function: TorchFunction,
    run: Callable[..., Any],
    batch: dict[str, Any],
    *,
    name: str,
    train: TrainOptions | None,
    param_dtype: str | None,
    id_limit: int = 2,
    tokens: int | None = None,
    make_args: Callable[[int], tuple[Any, ...]] | None = None,
    values: Callable[[], dict[str, Any]] | None = None,
    notes: Sequence[str] = (),
    eager: EagerCall | None = None,
) -> Program:
    """Trace `run(params, batch[, buffers])` into a `Program` with roles and model FLOPs; with `train`, `run` is a loss.

    With `train` the program is the whole step with the optimizer; parameters and optimizer state are donated. Written
    buffers are results too, and donated.

    - `function`: the traced module, settled.
    - `batch`: inputs as shapes, by name.
    - `name`: name of the program.
    - `train`: options of training; None for the forward pass.
    - `param_dtype`: dtype of the stored floating parameters; None for the module's own.
    - `id_limit`: bound (exclusive) of the whole numbers in example inputs.
    - `tokens`: tokens of a step, if known.
    - `make_args`: function from a seed to example arguments; by default they are generated.
    - `values`: function that returns the module's real weights for generated arguments; None for random weights.
    - `notes`: sentences of the program, followed by those of `function`.
    - `eager`: calls of the module in eager torch, for comparison; None for none.

    Raises `UserError` if the batch cannot be divided into the microbatches or gradient groups.
    """
    import jax
    import jax.numpy as jnp

    def stored(leaf: Any) -> Any:
        """Return the shape of a parameter in its stored dtype."""
        if not param_dtype or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(param_dtype))

    params = {key: stored(leaf) for key, leaf in function.params.items()}
    extra = (function.buffers,) if function.buffers else ()
    flops = [0.0, 0.0]
    updates = function.stateful and bool(function.buffers) and (train is not None or bool(function.written))

    def counted(*args: Any) -> Any:
        """Run `run`, record its FLOPs, cast a float64 loss to float32, and add the updated buffers if they are
        returned.
        """
        with flop_counter.counting() as scope:
            result = run(*args)
        flops[:] = scope
        if train is not None and result.dtype == "float64":
            result = result.astype("float32")
        return (result, function.updated_buffers) if updates else result

    if function.pipeline is not None:
        _check_microbatches(
            function.pipeline.microbatches, 1 if train is None else train.gradient_groups, batch, updates, name
        )
    parts = (1, 1)
    if train is None:
        step = counted if updates else lambda *given: (counted(*given), {})
        counted.__name__ = "forward"
        args: tuple[Any, ...] = (params, batch, *extra)
        fn, names, donate = counted, ("", "batch", ""), ((2,) if updates else ())
    else:
        optimizer = optimizers.make_optimizer(train.optimizer, train.state_dtype)
        groups = train.gradient_groups
        _check_microbatches(train.microbatches, groups, batch, updates, name)
        count, reduction = train.microbatches * groups, Reduced()
        if train.own_loss and count > 1:
            known = not function.wide
            given = params, batch, *extra

            def summed() -> Reduced:
                """Return the reduction of the parts in the loss."""
                return reduction_of(counted, given, 1, count)

            reduction = checked_reduction(summed, counted, given) if known else Reduced.unread()
        if reduction.why:
            notes = (
                *notes,
                f"Gradients are means over {count} parts of the batch, each of equal weight: the loss is no plain mean "
                f"over examples, as it has {reduction.why}.",
            )
        forms: dict[str, Any] = {"aux": updates, "accumulation": train.microbatches, "gradient_groups": groups}
        forms |= {"wide": function.wide, "reduction": reduction}
        fn = train_step.training_step(counted, optimizer, **forms)
        step = train_step.gradient_step(counted, **forms)
        # If the loss's reduction is known, the parts together equal the whole batch.
        parts = (train.microbatches, groups) if reduction.why or not train.own_loss else (1, 1)
        args = (params, jax.eval_shape(optimizer.init, params), batch, *extra)
        names, donate = ("", "optimizer", "batch", ""), ((0, 1, 3) if updates else (0, 1))
    program = trace(
        fn,
        args,
        name=name,
        donate_argnums=donate,
        roles=_roles_of(params, function.buffers, function.frozen),
        training=train is not None,
        arg_names=names[: len(args)],
        tokens=tokens,
        make_args=make_args,
        notes=(*notes, *function.notes),
    )
    if make_args is None:
        fill = example_values.fill(
            args, [a.name for a in program.arguments], [a.role for a in program.arguments], lambda _: id_limit
        )
        make_args = fill if values is None else _with_values(fill, function, values, params)
    inputs, model_flops = make_args, _model_flops(flops, train)
    twin = None
    if eager is not None:
        place = 1 if train is None else 2
        given = (function, step, eager, lambda seed: inputs(seed)[place], train is not None)
        twin = EagerTwin(*given, *parts, model_flops)
    program = dataclasses.replace(
        program,
        model_flops=model_flops or None,
        layers=len(function.layers),
        savable=tuple(function.savable),
        block_classes=_block_classes(function),
        weights=function.weights(),
        make_args=make_args,
        exchange=function.exchange,
        eager=twin,
    )
    return in_stages(program, function.stacks, function.pipeline)


def _note_widths(function: TorchFunction, names: Sequence[str], inputs: tuple[Any, ...], kwargs: Any) -> None:
    """Record the dtypes and bounds of the tensors of a call in `function.inputs`, keyword arguments last.

    An input of float64 or complex128 widens the function to 64 bits, with a note for the first.

    - `names`: names of `inputs`.

    Raises `UserError` for whole numbers of more than 32 bits.
    """
    import torch
    from torch.utils import _pytree

    flat, _ = _pytree.tree_flatten_with_path(dict(zip(names, inputs, strict=True)) | kwargs)
    tensors = [(path, leaf) for path, leaf in flat if isinstance(leaf, torch.Tensor)]
    function.inputs = [(leaf.dtype, wide_integers.bound_of_values(leaf)) for _, leaf in tensors]
    for path, leaf in tensors:
        reason = wide_integers.wide_reason(leaf)
        if reason.startswith("is"):
            if not function.wide:
                function.widen(f"an input {reason}")
        elif reason:
            raise UserError(
                f"input `{leaf_name(path)}` {reason}, and a planned step takes whole numbers of 32 bits: hash or "
                "renumber them before the step."
            )


def _check_storages(module: Any, label: str) -> None:
    """Raise `UserError` for two trained parameters that share elements, since a planned step would train them apart."""
    import torch

    ranges: dict[int, list[tuple[int, int, str]]] = {}
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        if parameter.requires_grad and parameter.numel():
            start = parameter.storage_offset()
            span = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
            storage = parameter.untyped_storage()._cdata
            ranges.setdefault(storage, []).append((start, start + span, name))
    for each in ranges.values():
        each.sort()
        if all(stop < start for (_, stop, _), (start, _, _) in itertools.pairwise(each)):
            continue
        owners = torch.zeros(max(stop for _, stop, _ in each) + 1, dtype=torch.int32)
        for number, (start, _, second) in enumerate(each, 1):
            strides = parameters[second].stride()
            sizes = [size if stride else 1 for size, stride in zip(parameters[second].shape, strides, strict=True)]
            own = owners.as_strided(sizes, strides, start)
            if other := int(own.max()):
                first = each[other - 1][-1]
                raise UserError(
                    f"`{label}` has two parameters that share elements, `{first}` and `{second}`, which a planned step "
                    "would train apart: make them one parameter, or one a view that is computed in `forward`."
                )
            own.fill_(number)


def _model_flops(count: Sequence[float], train: TrainOptions | None) -> float:
    """Return the model FLOPs of a step on the whole batch.

    - `count`: FLOPs of one forward pass on one part of the batch, and those that its backward pass is spared.
    - `train`: options of training, whose microbatches times groups are the parts; None for a forward pass.
    """
    forward, without = count
    # A backward pass has two matmuls for each forward matmul, one per operand, less those that need no gradient.
    return forward if train is None else (3.0 * forward - without) * (train.microbatches * train.gradient_groups)


def _check_microbatches(count: int, groups: int, batch: Mapping[str, Any], updates: bool, name: str) -> None:
    """Raise `UserError` if a step cannot divide its batch into `count` microbatches of `groups` groups.

    Numbers below 1 are refused. With several parts, every input's first dim must be divisible by `count * groups`, and
    no buffer may be updated.

    - `batch`: inputs as shapes, by name.
    - `updates`: True if every call changes buffers.
    - `name`: name of the program in the error.
    """
    if count < 1:
        raise UserError(f"{count} microbatches cannot be; 1 is the whole batch at once.")
    if groups < 1:
        raise UserError(f"{groups} gradient groups cannot be; with 1, gradients are summed as they come.")
    parts = f"{count} microbatches" if groups == 1 else f"{groups} gradient groups"
    parts += f" of each of {count} microbatches" if groups > 1 and count > 1 else ""
    if count * groups > 1 and updates:
        raise UserError(
            f"`{name}` has buffers that every call changes (batch norms learn from the whole batch, say), so {parts} "
            "would train another model; use 1, or in Python keep statistics as they are "
            "(`from_torch(..., batch_statistics=False)`)."
        )
    for key, leaf in batch.items() if count * groups > 1 else ():
        if not leaf.shape or leaf.shape[0] % (count * groups):
            size = leaf.shape[0] if leaf.shape else "no dim"
            raise UserError(f"{parts} do not divide the batch: `{key}` has {size} examples.")


def _with_values(fill: Any, function: TorchFunction, values: Any, params: Any) -> Callable[[int], tuple[Any, ...]]:
    """Return a function of a seed that makes arguments with the module's real weights and buffers.

    Weights have the dtypes of `params`; batch and optimizer state are those of `fill(seed)`.
    """

    def make(seed: int) -> tuple[Any, ...]:
        """Return the arguments of a seed, with the module's weights first and its buffers last."""
        arguments = list(fill(seed))
        own = values()
        arguments[0] = {key: own[key].astype(leaf.dtype) for key, leaf in params.items()}
        if function.buffers:
            arguments[-1] = function.buffer_values()
        return tuple(arguments)

    return make


def _roles_of(
    params: Mapping[str, Any], buffers: Mapping[str, Any], frozen: Collection[str]
) -> Callable[[str], Role | None]:
    """Return a function from an argument's name to its role.

    Other buffers have the role `OTHER`. A name that is no weight and does not begin with `batch.` is optimizer state.
    """

    def role(name: str) -> Role | None:
        """Return the role of the argument `name`."""
        if name in params:
            return Role.PARAMETER
        if name in frozen:
            return Role.FROZEN
        if name in buffers:
            return Role.OTHER
        if name.startswith("batch."):
            return Role.BATCH
        return Role.OPTIMIZER_STATE

    return role


def _split_inputs(
    module: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any], targets: Any
) -> tuple[Any, Any, dict[str, Any]]:
    """Return `(batch, rebuild, examples)` of a call.

    - `batch`: shapes of the tensors of inputs, keyword arguments and targets, by leaf name.
    - `rebuild`: function from such a dict of values to `(args, kwargs, targets)`; other leaves are those of this call.
    - `examples`: the given tensors, by leaf name.

    Raises `UserError` if a dim of a tensor is dynamic.
    """
    import jax
    import torch
    from torch.utils import _pytree

    names = input_names(module, len(inputs))
    tree = {"in": dict(zip(names, inputs, strict=True)) | kwargs}
    if targets is not None:
        tree["in"]["targets"] = targets
    flat, spec = _pytree.tree_flatten_with_path(tree["in"])
    batch: dict[str, Any] = {}
    examples: dict[str, Any] = {}
    keys: list[str | None] = []
    for path, leaf in flat:
        if isinstance(leaf, torch.Tensor):
            text = leaf_name(path)
            examples[text] = leaf
            batch[text] = jax.ShapeDtypeStruct(_static_shape(leaf, text), jax_dtype(leaf.dtype))
            keys.append(text)
        else:
            keys.append(None)
    rest = [leaf for _, leaf in flat]

    def rebuild(data: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        """Return `(args, kwargs, targets)` with the tensors in `data`; targets are None if the call has none."""
        leaves = [rest[i] if key is None else data[key] for i, key in enumerate(keys)]
        given = _pytree.tree_unflatten(leaves, spec)
        wanted = given.pop("targets") if targets is not None else None
        args = tuple(given[names[i]] for i in range(len(inputs)))
        return args, {key: given[key] for key in kwargs}, wanted

    return batch, rebuild, examples


def _static_shape(tensor: Any, name: str) -> tuple[int, ...]:
    """Return the shape of the input `name`.

    Raises `UserError` if a dim is dynamic.
    """
    for size in tensor.shape:
        if not isinstance(size, int):
            raise UserError(
                f"input `{name}` has the dynamic shape {tuple(tensor.shape)}; a plan is made for fixed sizes."
            )
    return tuple(tensor.shape)


def _check_dtype(name: str, text: str | None) -> None:
    """Raise `UserError` if the option `name` has a text that is no float dtype; None and an empty text pass."""
    import jax.numpy as jnp

    try:
        known = not text or jnp.issubdtype(jnp.dtype(text), jnp.floating)
    except TypeError:
        known = False
    if not known:
        raise UserError(f"{name} `{text}` is not supported; use bfloat16, float32 or float16.")


def _has_dropout(module: Any) -> bool:
    """Return True if the whole module is in training mode and a part of it has dropout with a probability above 0."""
    import torch

    def share(child: Any) -> float:
        """Return the dropout probability of a module: a dropout layer, an RNN or multi-head attention; 0 for others."""
        if isinstance(child, torch.nn.modules.dropout._DropoutNd):
            return child.p
        return child.dropout if isinstance(child, torch.nn.RNNBase | torch.nn.MultiheadAttention) else 0.0

    return module.training and any(share(child) > 0 for child in module.modules())


def _is_real(module: Any) -> bool:
    """Return True if there are parameters and all have values on the CPU."""
    tensors = [*module.parameters()]
    return bool(tensors) and all(t.device.type == "cpu" for t in tensors)


def _block_classes(function: TorchFunction) -> tuple[str, ...]:
    """Return the names of the classes of a module's layers, sorted."""
    modules = dict(function.module.named_modules())
    return tuple(sorted({type(modules[name]).__name__ for name in function.layers}))
