"""A torch module becomes a JAX function over named parameters, and that a `Program`."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard.errors import UserError
from autoshard.program import _flops, _train, _values
from autoshard.program._layers import Block, find_blocks
from autoshard.program._program import Program, Role
from autoshard.program._scan import NotRepeatedError, checkpoint_policy, scanned
from autoshard.program._torch_env import canonical_modules, environment
from autoshard.program._trace import trace

_CONSTANT_ELEMENTS = 1 << 16
"""Largest computed buffer that becomes a constant of the program instead of an argument."""


class TorchFunction:
    """A torch module as a pure function of named arrays, repeated layers scanned.

    `params` and `buffers` are dicts from names to `jax.ShapeDtypeStruct`; a stacked name is `model.layers.*.mlp.w`.
    """

    def __init__(
        self, module: Any, *, compute_dtype: str | None = None, remat: str = "none", scan: bool = True
    ) -> None:
        self.module, self.compute_dtype, self.remat = module, compute_dtype, remat
        self.blocks: tuple[Block, ...] = find_blocks(module) if scan else ()
        self.notes: list[str] = []
        self._describe()

    def _describe(self) -> None:
        """Fill `params`, `buffers` and `constants` for the blocks as they are now."""
        self.params: dict[str, Any] = {}
        self.buffers: dict[str, Any] = {}
        self.constants: dict[str, Any] = {}
        self.members: dict[str, tuple[Block, int, str]] = {}
        self.shared: dict[str, tuple[Block, int, str]] = {}
        repeated: dict[str, tuple[Block, int, int, str]] = {}
        modules = dict(self.module.named_modules())
        for block in self.blocks:
            for offset in range(block.period):
                for repeat in range(block.repeats):
                    prefix = block.layer(offset, repeat)
                    for key in _own_names(modules[prefix]):
                        repeated[f"{prefix}.{key}"] = (block, offset, repeat, key)
        for name, tensor in self.module.named_parameters():
            self._add(self.params, name, tensor, repeated)
        transient = {
            f"{prefix}.{key}" if prefix else key
            for prefix, child in modules.items()
            for key in child._non_persistent_buffers_set
        }
        for name, tensor in self.module.named_buffers():
            if name in transient and tensor.device.type != "meta" and tensor.numel() <= _CONSTANT_ELEMENTS:
                if name not in repeated or repeated[name][2] == 0:
                    self.constants[name] = tensor.detach().cpu().numpy()
                if name in repeated:
                    block, offset, _, key = repeated[name]
                    self.shared[name] = (block, offset, key)
            else:
                self._add(self.buffers, name, tensor, repeated)

    def _add(self, kind: dict[str, Any], name: str, tensor: Any, repeated: Mapping[str, Any]) -> None:
        import jax

        shape, dtype = tuple(tensor.shape), _jax_dtype(tensor.dtype)
        if name in repeated:
            block, offset, repeat, key = repeated[name]
            if repeat:
                return
            name = f"{block.label(offset)}.{key}"
            shape = (block.repeats, *shape)
            self.members[name] = (block, offset, key)
        kind[name] = jax.ShapeDtypeStruct(shape, dtype)

    def __call__(
        self, params: Mapping[str, Any], args: Any, kwargs: Any, buffers: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the module on JAX values; its output as a pytree of JAX values (a model output becomes a dict)."""
        with _flops.counting() as scope:
            result = self._apply(params, args, kwargs, buffers or {}, lambda out: out)
        _flops.record(scope[0])
        return plain(result)

    def apply(self, params: Mapping[str, Any], args: Any, kwargs: Any, buffers: Any, then: Callable[[Any], Any]) -> Any:
        """Run the module and then `then(output)` in torch; the result as a pytree of JAX values."""
        return plain(self._apply(params, args, kwargs, buffers or {}, then))

    def _apply(self, params: Any, args: Any, kwargs: Any, buffers: Any, then: Callable[[Any], Any]) -> Any:
        import jax
        import jax.numpy as jnp
        import numpy as np
        import torch

        env = environment()
        dtype = self.compute_dtype

        def prepare(weights: Any) -> Any:
            if dtype is None:
                return weights
            return jax.tree.map(lambda w: w.astype(dtype) if jnp.issubdtype(w.dtype, jnp.floating) else w, weights)

        stacks: dict[Block, list[dict[str, Any]]] = {block: [{} for _ in range(block.period)] for block in self.blocks}
        fixed: dict[Block, list[dict[str, Any]]] = {block: [{} for _ in range(block.period)] for block in self.blocks}
        outer: dict[str, Any] = {}
        for name, value in [*params.items(), *buffers.items()]:
            if name in self.members:
                block, offset, key = self.members[name]
                stacks[block][offset][key] = value
            else:
                outer[name] = prepare(value) if name in params else value
        for name, value in self.constants.items():
            if name in self.shared:
                block, offset, key = self.shared[name]
                fixed[block][offset][key] = jnp.asarray(value)
            else:
                outer[name] = jnp.asarray(value)
        with contextlib.ExitStack() as stack:
            stack.enter_context(canonical_modules())
            stack.enter_context(scanned(self.module, self.blocks, stacks, fixed, prepare, self.remat, env))
            if self.remat != "none":
                stack.enter_context(_checkpointed_lists(self.module, self.blocks, self.remat, env))
            stack.enter_context(env)
            given = jax.tree.map(
                lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, (outer, tuple(args), dict(kwargs))
            )
            state, torch_args, torch_kwargs = env.j2t_iso(given)
            return then(torch.func.functional_call(self.module, state, torch_args, torch_kwargs))

    def settle(self, run: Callable[[], Any]) -> Any:
        """Call `run`, giving up the scan of blocks whose layers turn out not to be a plain chain."""
        while True:
            try:
                return run()
            except NotRepeatedError as error:
                self._give_up(error.block, str(error))
            except TypeError as error:
                if "_Pending" not in str(error) or not self.blocks:
                    raise
                self._give_up(self.blocks[0], "the hidden state between two layers is used elsewhere")

    def _give_up(self, block: Block, reason: str) -> None:
        self.blocks = tuple(other for other in self.blocks if other != block)
        self.notes.append(f"The layers of `{block.owner}` are not scanned: {reason}.")
        self._describe()

    def values(self, dtype: str | None = None) -> dict[str, Any]:
        """The module's own parameters as host arrays, stacked like `params`; only for modules with real weights."""
        own = dict(self.module.named_parameters())
        return {name: self._value(name, own, dtype) for name in self.params}

    def buffer_values(self) -> dict[str, Any]:
        """The module's own buffers as host arrays, stacked like `buffers`."""
        own = dict(self.module.named_buffers())
        return {name: self._value(name, own, None) for name in self.buffers}

    def _value(self, name: str, own: Mapping[str, Any], dtype: str | None) -> Any:
        import numpy as np

        if name not in self.members:
            array = _host(own[name])
        else:
            block, offset, key = self.members[name]
            array = np.stack([_host(own[f"{block.layer(offset, r)}.{key}"]) for r in range(block.repeats)])
        return array if dtype is None else array.astype(dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class TrainOptions:
    """How a forward function becomes a training step."""

    optimizer: str = "adamw"
    param_dtype: str = "float32"
    state_dtype: str = "float32"


def from_torch(
    module: Any,
    example_inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    *,
    name: str | None = None,
    train: bool = False,
    loss: Callable[..., Any] | None = None,
    targets: Any = None,
    optimizer: str = "adamw",
    dtype: str | None = None,
    param_dtype: str | None = None,
    state_dtype: str | None = None,
    remat: str = "none",
    scan: bool = True,
    make_args: Callable[[int], tuple[Any, ...]] | None = None,
) -> Program:
    """A `Program` from any `torch.nn.Module`, on the meta device or with real weights.

    `example_inputs` (a tensor or a tuple of them) and `kwargs` are what `module` is called with; meta tensors will do.
    Inference gives `forward(params, batch[, buffers])`; `train` gives a whole step `(params, opt_state, batch[, buffers])
    -> (params, opt_state, loss)` with an optax optimizer. `loss(output)`, or `loss(output, targets)` if `targets` is
    given, is torch code. The module runs in evaluation mode (no dropout, batch statistics fixed). `dtype` is the
    compute dtype, `param_dtype` that of the stored parameters, `state_dtype` that of the optimizer's moments.

    Raises `UserError` if an operation has no lowering or the call fails.
    """
    import jax

    label = name or type(module).__name__
    _check_remat(remat)
    inputs = tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
    was_training = module.training
    module.eval()
    function = TorchFunction(module, compute_dtype=dtype, remat=remat, scan=scan)
    batch, rebuild = _split_inputs(module, inputs, dict(kwargs or {}), targets)
    notes = ["The module runs in evaluation mode: no dropout, fixed batch statistics."] if was_training else []
    if train and loss is None:
        notes.append("No loss was given: the step minimises the mean of squares of the first output.")

    def outputs(params: Any, data: Any, buffers: Any) -> Any:
        args, keywords, _ = rebuild(data)
        return function(params, args, keywords, buffers)

    def loss_of(params: Any, data: Any, *buffers: Any) -> Any:
        import jax.numpy as jnp

        args, keywords, wanted = rebuild(data)
        if loss is None:
            first = jax.tree.leaves(function(params, args, keywords, buffers[0] if buffers else None))[0]
            return jnp.mean(jnp.square(first.astype(jnp.float32)))

        def then(out: Any) -> Any:
            return loss(out) if targets is None else loss(out, environment().j2t_iso(wanted))

        return function.apply(params, args, keywords, buffers[0] if buffers else None, then)

    def forward(params: Any, data: Any, *buffers: Any) -> Any:
        return outputs(params, data, buffers[0] if buffers else None)

    function.settle(lambda: _probe(function, loss_of if train else forward, batch, label))
    own = function.values if _is_real(module) else None
    return torch_program(
        function,
        loss_of if train else forward,
        batch,
        name=label,
        train=TrainOptions(optimizer, param_dtype or "", state_dtype or "float32") if train else None,
        param_dtype=param_dtype,
        make_args=make_args,
        values=own,
        notes=notes,
    )


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
) -> Program:
    """Trace `run(params, batch[, buffers])`, a loss if `train` is given, into a `Program` with roles and model FLOPs."""
    import jax
    import jax.numpy as jnp

    def stored(leaf: Any) -> Any:
        if not param_dtype or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(param_dtype))

    params = {key: stored(leaf) for key, leaf in function.params.items()}
    extra = (function.buffers,) if function.buffers else ()
    forward_flops = [0.0]

    def counted(*args: Any) -> Any:
        with _flops.counting() as scope:
            result = run(*args)
        forward_flops[0] = scope[0]
        return result

    if train is None:
        counted.__name__ = "forward"
        args: tuple[Any, ...] = (params, batch, *extra)
        fn, names, donate = counted, ("", "batch", ""), ()
        factor = 1.0
    else:
        optimizer = _train.make_optimizer(train.optimizer, train.state_dtype)
        fn = _train.training_step(counted, optimizer)
        args = (params, jax.eval_shape(optimizer.init, params), batch, *extra)
        names, donate = ("", "optimizer", "batch", ""), (0, 1)
        factor = 3.0
    shown = [key for key in function.buffers]
    program = trace(
        fn,
        args,
        name=name,
        donate_argnums=donate,
        roles=_roles_of(params, shown),
        training=train is not None,
        arg_names=names[: len(args)],
        tokens=tokens,
        make_args=make_args,
        notes=(*notes, *function.notes),
    )
    if make_args is None:
        fill = _values.fill(
            args, [a.name for a in program.arguments], [a.role for a in program.arguments], lambda _: id_limit
        )
        make_args = fill if values is None else _with_values(fill, function, values, train is not None, params)
    return dataclasses.replace(program, model_flops=factor * forward_flops[0] or None, make_args=make_args)


def _with_values(
    fill: Any, function: TorchFunction, values: Any, training: bool, params: Any
) -> Callable[[int], tuple[Any, ...]]:
    def make(seed: int) -> tuple[Any, ...]:
        made = list(fill(seed))
        own = values()
        made[0] = {key: own[key].astype(leaf.dtype) for key, leaf in params.items()}
        if function.buffers:
            made[-1] = function.buffer_values()
        return tuple(made)

    return make


def _roles_of(params: Mapping[str, Any], buffers: Sequence[str]) -> Callable[[str], Role | None]:
    known = set(buffers)

    def role(name: str) -> Role | None:
        if name in params:
            return Role.PARAMETER
        if name in known:
            return Role.OTHER
        if name.startswith("batch."):
            return Role.BATCH
        return Role.OPTIMIZER_STATE

    return role


def _probe(function: TorchFunction, run: Callable[..., Any], batch: Any, label: str) -> None:
    """Trace the forward pass alone once: the cheap way to learn whether scans hold and whether every op lowers."""
    import jax

    extra = (function.buffers,) if function.buffers else ()
    try:
        jax.eval_shape(run, function.params, batch, *extra)
    except (NotRepeatedError, UserError):
        raise
    except TypeError as error:
        if "_Pending" in str(error):
            raise
        raise lowering_error(error, label) from error
    except Exception as error:  # the user's own code runs here
        raise lowering_error(error, label) from error


def lowering_error(error: Exception, label: str) -> UserError:
    """The sentence for a module that does not run through torchax."""
    lines = str(error).strip().splitlines()
    text = lines[0].rstrip(".") if lines else "no message"
    if type(error).__name__ == "OperatorNotFound":
        return UserError(
            f"`{label}` uses a torch operation that has no lowering ({text}); replace it, or give the program as a JAX function."
        )
    return UserError(f"`{label}` could not be lowered: {type(error).__name__}: {text}.")


@contextlib.contextmanager
def _checkpointed_lists(module: Any, blocks: Sequence[Block], remat: str, env: Any) -> Any:
    """Rematerialise layers of module lists that are not scanned, one by one."""
    import jax
    import torch

    inside = {block.layer(o, r) for block in blocks for o in range(block.period) for r in range(block.repeats)}
    replaced: list[Any] = []
    policy = checkpoint_policy(remat)

    def wrap(layer: Any) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            own = layer.__dict__.pop("forward")
            try:
                weights = {k: v for k, v in [*layer.named_parameters(), *layer.named_buffers()]}
                flat, tree = torch.utils._pytree.tree_flatten((weights, args, kwargs))
                where = [i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)]

                def pure(*arrays: Any) -> Any:
                    given = list(flat)
                    for i, array in zip(where, env.j2t_iso(arrays), strict=True):
                        given[i] = array
                    w, a, k = torch.utils._pytree.tree_unflatten(given, tree)
                    return env.t2j_iso(torch.func.functional_call(layer, w, a, k))

                return env.j2t_iso(jax.checkpoint(pure, policy=policy)(*env.t2j_iso([flat[i] for i in where])))
            finally:
                layer.__dict__["forward"] = own

        return forward

    try:
        for name, child in module.named_modules():
            if isinstance(child, torch.nn.ModuleList) and not any(name.startswith(done + ".") for done in inside):
                for index, layer in enumerate(child):
                    full = f"{name}.{index}" if name else str(index)
                    if full not in inside and next(layer.parameters(), None) is not None:
                        layer.__dict__["forward"] = wrap(layer)
                        replaced.append(layer)
        yield
    finally:
        for layer in replaced:
            layer.__dict__.pop("forward", None)


def plain(value: Any) -> Any:
    """Torch outputs as pytrees of JAX values: mappings become dicts, absent entries go."""
    import torch

    if isinstance(value, torch.Tensor):
        return environment().t2j_iso(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items() if item is not None}
    if isinstance(value, (tuple, list)):
        return tuple(plain(item) for item in value if item is not None)
    return value


def _split_inputs(module: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any], targets: Any) -> tuple[Any, Any]:
    """The tensors of a call as a dict of shapes, and the function that puts such a dict back into a call."""
    import inspect

    import jax
    import torch
    from torch.utils import _pytree

    names = [
        p.name
        for p in inspect.signature(module.forward).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    names += [f"input{i}" for i in range(len(names), len(inputs))]
    tree = {"in": {names[i]: value for i, value in enumerate(inputs)} | kwargs}
    if targets is not None:
        tree["in"]["targets"] = targets
    flat, spec = _pytree.tree_flatten_with_path(tree["in"])
    batch: dict[str, Any] = {}
    keys: list[str | None] = []
    for path, leaf in flat:
        if isinstance(leaf, torch.Tensor):
            text = ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)
            batch[text] = jax.ShapeDtypeStruct(_static_shape(leaf, text), _jax_dtype(leaf.dtype))
            keys.append(text)
        else:
            keys.append(None)
    rest = [leaf for _, leaf in flat]

    def rebuild(data: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        leaves = [rest[i] if key is None else data[key] for i, key in enumerate(keys)]
        given = _pytree.tree_unflatten(leaves, spec)
        wanted = given.pop("targets") if targets is not None else None
        args = tuple(given[names[i]] for i in range(len(inputs)))
        return args, {key: given[key] for key in kwargs}, wanted

    return batch, rebuild


def _static_shape(tensor: Any, name: str) -> tuple[int, ...]:
    for size in tensor.shape:
        if not isinstance(size, int):
            raise UserError(
                f"input `{name}` has the dynamic shape {tuple(tensor.shape)}; a plan is made for fixed sizes."
            )
    return tuple(tensor.shape)


def _own_names(layer: Any) -> list[str]:
    return [name for name, _ in layer.named_parameters()] + [name for name, _ in layer.named_buffers()]


def _is_real(module: Any) -> bool:
    tensors = [*module.parameters()]
    return bool(tensors) and all(t.device.type == "cpu" for t in tensors)


def _host(tensor: Any) -> Any:
    import torch

    value = tensor.detach().cpu()
    if value.dtype == torch.bfloat16:
        import ml_dtypes

        return value.float().numpy().astype(ml_dtypes.bfloat16)
    return value.numpy()


def _jax_dtype(dtype: Any) -> Any:
    import jax
    import numpy as np

    text = str(dtype).removeprefix("torch.")
    return jax.dtypes.canonicalize_dtype(np.bool_ if text == "bool" else jax.numpy.dtype(text))


def _check_remat(remat: str) -> None:
    if remat not in ("none", "dots", "full"):
        raise UserError(f"remat `{remat}` does not exist; use `none`, `dots` or `full`.")
