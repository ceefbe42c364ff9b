"""torchax with autoshard's lowerings, and replacements for module code that is not canonical."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from autoshard.program.moe import hf_experts, hf_routers
from autoshard.program.torch_ops import (
    indexed_writes,
    layer_lowerings,
    masked_reads,
    math_lowerings,
    op_lowerings,
    pooling,
    recurrent,
    saved_values,
    tensor_methods,
)
from autoshard.program.torch_ops.torchax_environment import environment


@functools.cache
def lowered_environment() -> Any:
    """Return torchax's one environment of the process, with autoshard's lowerings installed in its table of ops.

    The first call changes the environment; later calls return the same object. Ops without a lowering here keep
    torchax's own.
    """
    env = environment()
    import torch
    from torchax.ops import ops_registry

    lowerings = op_lowerings.operation_table() | layer_lowerings.layer_table() | recurrent.recurrent_table()
    lowerings |= indexed_writes.write_table() | pooling.pooling_table() | tensor_methods.method_table()
    lowerings |= math_lowerings.math_table() | math_lowerings.edge_table()
    for operation, lowering in lowerings.items():
        env._ops[operation] = ops_registry.Operator(
            operation, lowering, is_jax_function=True, is_user_defined=True, needs_env=False, is_view_op=False
        )
    env._ops.update(indexed_writes.writers())
    convolution = env._ops[torch.ops.aten.convolution]
    counted = layer_lowerings.counted_convolution(convolution.func)
    counted_op = dataclasses.replace(convolution, func=counted)
    env._ops[torch.ops.aten.convolution] = counted_op
    for norm in (layer_lowerings.batch_norm, layer_lowerings.instance_norm):
        operation = getattr(torch.nn.functional, norm.__name__)
        env._ops[operation] = dataclasses.replace(counted_op, torch_op=operation, func=norm, is_jax_function=False)
    for name in saved_values.POINTWISE:
        packet = getattr(torch.ops.aten, name)
        for operation in (packet, packet.default):
            if operation in env._ops:
                pointwise = env._ops[operation]
                env._ops[operation] = dataclasses.replace(pointwise, func=saved_values.from_inputs(pointwise.func))
    for average in (torch.ops.aten._adaptive_avg_pool2d, torch.ops.aten._adaptive_avg_pool3d):
        env._ops[average] = dataclasses.replace(
            env._ops[average], func=pooling.adaptive_avg_pool(env._ops[average].func)
        )
    env._ops.pop(torch.tensor_split, None)  # torch decomposes it to slices, of any bounds
    drawn = env._get_op_or_decomp(torch.randint)
    env._ops[torch.randint] = dataclasses.replace(drawn, func=_with_sizes_by_name(drawn.func))
    # Some torchax releases register this op under ops, others under decompositions. Ops are looked up first.
    read = env._get_op_or_decomp(torch.Tensor.__getitem__)
    env._ops[torch.Tensor.__getitem__] = dataclasses.replace(read, func=masked_reads.lenient(read.func))
    return env


def _with_sizes_by_name(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torchax's `torch.randint` so that bounds and size may be keyword arguments."""

    def randint(*args: Any, **kwargs: Any) -> Any:
        """Call `draw` with the keywords `low`, `high` and `size` as further positional arguments, in this order."""
        names = ("low", "high", "size")
        return draw(*args, *(kwargs.pop(key) for key in names if key in kwargs), **kwargs)

    return randint


_CHECKS = "TRANSFORMERS_DISABLE_TORCH_CHECK"
"""Environment variable of transformers that turns off checks of torch, which read values."""


@contextlib.contextmanager
def drawing(env: Any) -> Iterator[list[bool]]:
    """Draw torchax's random numbers from `PRNGKey(0)` while inside, and restore its own key on exit.

    Every trace therefore draws the same numbers. A key that was split inside a trace would otherwise leak a tracer. The
    yielded list is empty while inside, and has an element on exit if numbers were drawn.

    - `env`: the torchax environment, whose stored properties change while inside.
    """
    import jax

    with jax.ensure_compile_time_eval():
        key = jax.random.PRNGKey(0)
    param = env.param
    holder, ours = env._property, type(param).override(param, prng=key)
    before = holder.content
    holder.content = [*before, ours] if isinstance(before, list) else ours  # torch_xla's torchax stores a stack
    drawn: list[bool] = []
    try:
        yield drawn
    finally:
        drawn += [True] if ours.prng is not key else []
        holder.content = before


@contextlib.contextmanager
def canonical_modules() -> Iterator[None]:
    """Replace code that merges dims or inspects values by equal code that does not, while inside.

    The attributes of `_REPLACED` and `_compiling` are patched in modules that are already imported; others are skipped.
    Checks of transformers and of torch's distributions, and torch's attention fast path, are off. All is restored on
    exit.
    """
    import os
    import sys

    import torch

    checks = os.environ.get(_CHECKS)
    os.environ[_CHECKS] = "1"  # transformers would read values, and tracers have none
    validates = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)  # torch's checks read values too
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # the fast path is one opaque op per layer
    replaced: list[tuple[Any, str, Any]] = []
    for place, replacement in (_REPLACED | _compiling()).items():
        module_name, owner, attribute = place
        module = sys.modules.get(module_name)
        if module is None:
            continue
        target = getattr(module, owner) if owner else module
        replaced.append((target, attribute, target.__dict__[attribute]))
        setattr(target, attribute, replacement)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        torch.distributions.Distribution.set_default_validate_args(validates)
        os.environ.pop(_CHECKS)
        if checks is not None:
            os.environ[_CHECKS] = checks
        for target, attribute, original in replaced:
            setattr(target, attribute, original)


def _compiling() -> dict[tuple[str, str, str], Callable[..., Any]]:
    """Return replacements of `is_torchdynamo_compiling` by `_always`, keyed like `_REPLACED`.

    They cover the imported modules `transformers.models.*` that have this name: their code then reads no values.
    Modules that also have `is_torchdynamo_exporting` are left out, since they choose kernels by the answer.
    """
    import sys

    name, other = "is_torchdynamo_compiling", "is_torchdynamo_exporting"
    modules = {key: vars(each) for key, each in sys.modules.items() if key.startswith("transformers.models.") and each}
    return {(key, "", name): _always for key, names in modules.items() if name in names and other not in names}


def _conv1d(self: Any, x: Any) -> Any:
    """Compute `x @ weight + bias` of GPT-2's `Conv1D` (weight [in, out]) on [..., in], with leading dims unflattened.

    If out = 3 * in, the layer is assumed to make query, key and value. The result is then a `Fused` tensor, which is
    stored as [..., 3, in]. Splitting [..., 3 in] into three would need a reshard wherever that dim is split.
    """
    width, total = self.weight.shape
    if total != 3 * width:
        return x @ self.weight + self.bias
    env = environment()
    value, weight, bias = (env.t2j_iso(tensor) for tensor in (x, self.weight, self.bias))
    parts = op_lowerings.linear(value, weight.reshape(width, 3, width), bias.reshape(3, width), inner=0)
    return _fused_type()(parts, env)


@functools.cache
def _fused_type() -> type:
    """Return the class `Fused` of torchax tensors [..., n * out] that are stored as [..., n, out].

    `split` into parts of `out` along the last dim cuts no dim; every other op sees the merged array.
    """
    from torchax import tensor

    class Fused(tensor.Tensor):
        """A torchax tensor [..., n * out], stored as parts [..., n, out]."""

        @staticmethod
        def __new__(cls, parts: Any, env: Any) -> Any:
            return tensor.Tensor.__new__(cls, parts, env)

        def __init__(self, parts: Any, env: Any) -> None:
            self._parts, self._env = parts, env

        @property
        def _elem(self) -> Any:
            """Merged JAX array [..., n * out]."""
            return self._parts.reshape(*self._parts.shape[:-2], -1)

        def split(self, split_size: Any, dim: int = 0) -> Any:
            """Return the n parts if `split_size` is out and `dim` the last; else split the merged array."""
            count, width = self._parts.shape[-2:]
            if split_size == width and dim in (-1, self.ndim - 1):
                return tuple(self._env.j2t_iso(self._parts[..., i, :]) for i in range(count))
            return self._env.j2t_iso(self._elem).split(split_size, dim)

    return Fused


def _expand_kv(self: Any, kv_nope: Any, k_rot: Any) -> tuple[Any, Any]:
    """Compute DeepSeek's keys [B, H, S, nope + rope] and values [B, H, S, v] from its latents.

    Keys are concatenated instead of written into an empty tensor.

    - `kv_nope`: latents [B, 1, S, rank], expanded by `kv_b_proj`.
    - `k_rot`: the heads' common rotary part [B, 1, S, rope], broadcast over the heads.
    """
    import torch

    batch, _, length, _ = kv_nope.shape
    nope, width = self.qk_nope_head_dim, self.qk_nope_head_dim + self.v_head_dim
    expanded = self.kv_b_proj(kv_nope).view(batch, length, -1, width).transpose(1, 2)
    key, value = expanded[..., :nope], expanded[..., nope:]
    return torch.cat([key, k_rot.expand(-1, key.shape[1], -1, -1)], dim=-1), value


def _always() -> bool:
    """Return True in place of `is_torchdynamo_compiling`, so that model code reads and caches no traced values."""
    return True


def _not_packed(position_ids: Any) -> None:
    """Return None in place of `find_packed_sequence_indices`: every row is one whole sequence.

    Rows with several packed sequences are not detected, so they are masked as one sequence.
    """
    return None


def _biases(self: Any, device: Any) -> Any:
    """Return Levit's attention biases, read by its index table, without the cache by device of its own code."""
    return self.attention_biases[:, self.attention_bias_idxs]


_LEVIT = "transformers.models.levit.modeling_levit"
_LONGCAT = "transformers.models.longcat_flash.modeling_longcat_flash"
_SWITCH = "transformers.models.switch_transformers.modeling_switch_transformers"
_DBRX = "transformers.models.dbrx.modeling_dbrx"
_JETMOE = "transformers.models.jetmoe.modeling_jetmoe"
_REPLACED: dict[tuple[str, str, str], Callable[..., Any]] = {
    ("transformers.pytorch_utils", "Conv1D", "forward"): _conv1d,
    ("transformers.models.mixtral.modeling_mixtral", "MixtralSparseMoeBlock", "forward"): hf_routers.mixtral_block,
    ("transformers.models.deepseek_v3.modeling_deepseek_v3", "DeepseekV3MoE", "forward"): hf_routers.deepseek_block,
    ("transformers.models.deepseek_v3.modeling_deepseek_v3", "DeepseekV3Attention", "expand_kv"): _expand_kv,
    (_LEVIT, "LevitAttention", "get_attention_biases"): _biases,
    (_LEVIT, "LevitAttentionSubsample", "get_attention_biases"): _biases,
    (_LONGCAT, "LongcatFlashExperts", "forward"): hf_experts.longcat_experts,
    (_SWITCH, "SwitchTransformersExperts", "forward"): hf_experts.switch_experts,
    (_DBRX, "DbrxExperts", "forward"): hf_experts.dbrx_experts,
    (_JETMOE, "JetMoeMoE", "forward"): hf_experts.jetmoe_mlp,
    (_JETMOE, "JetMoeMoA", "map"): hf_experts.jetmoe_queries,
    (_JETMOE, "JetMoeMoA", "reduce"): hf_experts.jetmoe_outputs,
    ("transformers.masking_utils", "", "find_packed_sequence_indices"): _not_packed,
    ("transformers.pytorch_utils", "", "is_torchdynamo_compiling"): _always,  # turns off caches of results
}
"""Replacements by module name, class (empty for a function of the module) and attribute; all are for transformers."""
