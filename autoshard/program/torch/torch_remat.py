"""Rematerialisation in torch layers: marks on results of modules, and policies for `torch.utils.checkpoint`."""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from autoshard.errors import UserError
from autoshard.program.remat_marks import CONTEXT, INPUT, check_names, chosen_name, mark, mark_of, naming
from autoshard.program.remat_policy import Policy
from autoshard.program.torch_ops.torchax_environment import environment


@contextlib.contextmanager
def marking(layer: Any, names: Sequence[str], found: dict[str, None]) -> Iterator[None]:
    """Mark the results of the linear layers in the torch module `layer` that `names` refer to, while inside.

    Every value that a policy could name is recorded in `found`. Names of other values in the layer are marked by the
    code that computes them.

    - `names`: paths of modules in the layer, or their ends, and names such as `input`.
    """
    hooks = [
        child.register_forward_hook(_hook(path)) for path, child in layer.named_modules() if path and multiplies(child)
    ]
    try:
        with naming(names, found):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def multiplies(module: Any) -> bool:
    """Return True if a torch module is a linear layer: its own parameters are a 2-D `weight` and at most one other.

    Embedding tables do not count.
    """
    import torch

    weight = module._parameters.get("weight")
    own = [value for value in module._parameters.values() if value is not None]
    tables = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return weight is not None and weight.ndim == 2 and len(own) <= 2 and not isinstance(module, tables)


def _hook(path: str) -> Any:
    """Return a forward hook that marks a module's result as `path`."""

    def after(module: Any, args: Any, out: Any) -> Any:
        """Return the module's result, marked."""
        return mark_torch(out, path)

    return after


def mark_torch(value: Any, path: str) -> Any:
    """Mark a torch tensor that has a JAX value as `path`; return any other value unchanged.

    A path that no policy in effect names leaves the tensor unchanged. A tensor stored in parts is marked in place.
    """
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    parts = getattr(value, "_parts", None)
    if parts is not None:  # several results in one tensor, stored in parts
        value._parts = mark(parts, path)  # type: ignore[attr-defined]
        return value
    env = environment()
    return value if mark_of(path) is None else env.j2t_iso(mark(env.t2j_iso(value), path))


@contextlib.contextmanager
def hooks_outside(layer: Any) -> Iterator[None]:
    """Disable the layer's own hooks while inside; the outer call, whose forward is replaced, runs them.

    Hooks that collect outputs (transformers' `output_hidden_states`) would otherwise collect each twice, once from a
    finished trace.
    """
    hooks = layer._forward_pre_hooks, layer._forward_hooks
    layer._forward_pre_hooks, layer._forward_hooks = type(hooks[0])(), type(hooks[1])()
    try:
        yield
    finally:
        layer._forward_pre_hooks, layer._forward_hooks = hooks


# Matmul ops without batch dims.
_PRODUCTS = ("mm.default", "addmm.default", "_scaled_mm.default", "_int_mm.default")
_BATCHED = ("bmm.default", "baddbmm.default")
"""Matmul ops with a batch dim, which has size 1 where an einsum has no batch."""
_ATTENTION = (
    "_scaled_dot_product_flash_attention.default",
    "_scaled_dot_product_flash_attention_for_cpu.default",
    "_scaled_dot_product_efficient_attention.default",
    "_scaled_dot_product_cudnn_attention.default",
    "_scaled_dot_product_fused_attention_overrideable.default",
    "_flash_attention_forward.default",
    "_efficient_attention_forward.default",
)
"""Fused ops to which `torch.nn.functional.scaled_dot_product_attention` dispatches; their row sums are saved too."""


def torch_contexts(policy: Policy, module: Any, marks: Mapping[str, Sequence[str]]) -> Callable[[], Any] | None:
    """Return the `context_fn` of `torch.utils.checkpoint.checkpoint` for layers in `module`; None for the policy
    `none`.

    It saves the values that the policy keeps, all matmuls without batch dims for `dots`, and recomputes the rest. The
    policy `full` without named values recomputes everything.

    - `marks`: names of modules that compute a value, by the value's name; the default is the module of that name.

    Raises `UserError` if `module` does not compute a named value, or if the policy offloads a value to the host. It is
    raised too if `marks` has the layer's input or its context.
    """
    from torch.utils import checkpoint

    if policy.base == "none":
        return None
    if policy.offload:
        raise UserError(
            f"remat `{policy}` sends {', '.join(policy.offload)} to the host, which torch's checkpoints cannot; plan "
            "with values that stay on the device, such as `full,keep=q_proj`."
        )
    for name in (INPUT, CONTEXT):
        if name in marks:
            raise UserError(
                f"`names` has `{name}`, which no module makes: torch finds it by its op, or always saves it."
            )
    modules = _modules(policy, module, marks)
    if policy.base == "full" and not modules and CONTEXT not in policy.keep:
        return checkpoint.noop_context_fn  # every checkpoint saves the layer's input
    keeps = _of_ops(policy.base == "dots", CONTEXT in policy.keep)
    if not modules:
        return functools.partial(checkpoint.create_selective_checkpoint_contexts, keeps)
    return _Contexts(modules, keeps)


def _modules(policy: Policy, module: Any, marks: Mapping[str, Sequence[str]]) -> dict[str, list[Any]]:
    """Map each value that the policy saves, other than input and context, to the modules that compute it.

    Raises `UserError` if no module computes a value.
    """
    linear = {path: child for path, child in module.named_modules() if path and multiplies(child)}
    named = [name for name in policy.keep if name not in (INPUT, CONTEXT)]
    check_names(str(policy), [name for name in named if name not in marks], linear, type(module).__name__)
    value_of = {end: name for name in named for end in marks.get(name, (name,))}
    modules_of: dict[str, list[Any]] = {name: [] for name in named}
    for path, child in module.named_modules():
        end = chosen_name(path, value_of)
        if end is not None and (value_of[end] in marks or path in linear):
            modules_of[value_of[end]].append(child)
    for name, makers in modules_of.items():
        if not makers:
            modules = ", ".join(f"`{each}`" for each in marks[name])
            raise UserError(
                f"`names` gives {modules} for `{name}`, but no module of `{type(module).__name__}` is called so."
            )
    return modules_of


def _of_ops(products: bool, attention: bool) -> Callable[..., Any]:
    """Return a policy for `create_selective_checkpoint_contexts` that decides by the op alone; it recomputes other ops.

    - `products`: save matmuls without batch dims.
    - `attention`: save fused attention.
    """

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Return `MUST_SAVE` or `PREFER_RECOMPUTE` for an op."""
        from torch.utils.checkpoint import CheckpointPolicy

        is_saved = (products and _is_product(op, args)) or (attention and _name(op) in _ATTENTION)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


class _Contexts:
    """A `context_fn` that saves the matmul results of some modules; a policy by op decides on all other results.

    Each call makes the pair of contexts for one forward pass of a layer and its recomputation.
    """

    def __init__(self, modules: Mapping[str, Sequence[Any]], keeps: Callable[..., Any]) -> None:
        """Store the modules of each value, by its name, and the policy by op."""
        self.modules, self.keeps = modules, keeps
        self.unseen = set(modules)
        """Values for which no matmul has run so far."""

    def __call__(self) -> tuple[Any, Any]:
        """Return torch's contexts of a layer's forward pass and of its recomputation."""
        from torch.utils.checkpoint import create_selective_checkpoint_contexts

        layer_pass = _LayerPass(self)
        forward, again = create_selective_checkpoint_contexts(layer_pass.policy)
        return _Watched(layer_pass, forward), _Watched(layer_pass, again)


class _LayerPass:
    """The named modules that run at present, in one pass of one layer."""

    def __init__(self, owner: _Contexts) -> None:
        """Begin a pass of a layer without running modules; `owner` has the named modules."""
        self.owner = owner
        self.thread = 0
        """Identifier of the thread that runs the pass; calls in other threads are not recorded."""
        self.running: list[str] = []
        """Values whose modules run at present, innermost last."""
        self.ran: set[str] = set()
        """Values whose modules have run in this pass."""

    def policy(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Return `MUST_SAVE` for a matmul, batched or not, inside a named module; leave other ops to the policy by op.

        The value of the innermost named module is no longer unseen.
        """
        from torch.utils.checkpoint import CheckpointPolicy

        if self.running and _is_product(op, args, batched=True):
            self.owner.unseen.discard(self.running[-1])
            return CheckpointPolicy.MUST_SAVE
        return self.owner.keeps(ctx, op, *args, **kwargs)

    def hooks(self, value: str, module: Any) -> tuple[Any, Any]:
        """Register hooks that record when `module`, which computes `value`, starts and ends; return their handles."""

        def enter(*_: Any) -> None:
            """Record that the module starts."""
            if threading.get_ident() == self.thread:
                self.running.append(value)
                self.ran.add(value)

        def leave(*_: Any) -> None:
            """Record that the innermost running module ends."""
            if threading.get_ident() == self.thread and self.running:
                self.running.pop()

        return module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)


class _Watched:
    """A re-entrant wrapper of one of torch's contexts that also records which modules run.

    On exit without an error it warns once of each value whose module ran without a matmul.
    """

    def __init__(self, layer_pass: _LayerPass, inner: Any) -> None:
        """Wrap torch's context `inner`, which is entered and left with this one."""
        self.layer_pass, self.inner = layer_pass, inner
        self.hooks: list[Any] = []

    def __enter__(self) -> Any:
        self.layer_pass.thread, self.layer_pass.running = threading.get_ident(), []
        named = self.layer_pass.owner.modules
        self.hooks = [
            hook for value, own in named.items() for each in own for hook in self.layer_pass.hooks(value, each)
        ]
        return self.inner.__enter__()

    def __exit__(self, *error: Any) -> Any:
        for hook in self.hooks:
            hook.remove()
        handled = self.inner.__exit__(*error)
        without = self.layer_pass.owner.unseen & self.layer_pass.ran
        if without and error[0] is None:
            self.layer_pass.owner.unseen -= without
            names = ", ".join(f"`{name}`" for name in sorted(without))
            warnings.warn(f"No matmul ran in {names}, so none of its values is saved.", UserWarning, stacklevel=2)
        return handled


def _is_product(op: Any, args: Sequence[Any], batched: bool = False) -> bool:
    """Return True if an op multiplies matrices; with `batched`, also batches of them.

    Without it, a batched op counts if the first dim of its last operand is 1.
    """
    name = _name(op)
    if name in _BATCHED:
        return batched or args[-1].shape[0] == 1
    return name in _PRODUCTS


def _name(op: Any) -> str:
    """Return `mm.default` for `aten.mm.default`, and an empty text for an op of another library."""
    library, _, name = str(op).partition(".")
    return name if library == "aten" else ""
