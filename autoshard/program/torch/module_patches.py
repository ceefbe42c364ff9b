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
    tensor_methods,
)
from autoshard.program.torch_ops.torchax_environment import environment


@functools.cache
def lowered_environment() -> Any:
    """Return the torchax environment with autoshard's lowerings: torch ops become JAX ops in canonical form."""
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
    env._ops[torch.nn.functional.batch_norm] = dataclasses.replace(
        counted_op, torch_op=torch.nn.functional.batch_norm, func=layer_lowerings.batch_norm, is_jax_function=False
    )
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
        names = ("low", "high", "size")
        return draw(*args, *(kwargs.pop(key) for key in names if key in kwargs), **kwargs)

    return randint


_CHECKS = "TRANSFORMERS_DISABLE_TORCH_CHECK"


@contextlib.contextmanager
def drawing(env: Any) -> Iterator[None]:
    """Draw random numbers from one constant key while inside, and restore torchax's own key afterwards.

    A key that was split inside a trace would otherwise leak a tracer.
    """
    import jax

    with jax.ensure_compile_time_eval():
        key = jax.random.PRNGKey(0)
    param = env.param
    holder, ours = env._property, type(param).override(param, prng=key)
    before = holder.content
    holder.content = [*before, ours] if isinstance(before, list) else ours  # torch_xla's torchax stores a stack
    try:
        yield
    finally:
        holder.content = before


@contextlib.contextmanager
def canonical_modules() -> Iterator[None]:
    """Replace code that merges dims or inspects values by equal code that does not, while inside.

    Most replacements are for transformers; checks of torch's distributions and the attention fast path are off.
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
    """Return replacements that make model code believe that torch compiles it, so that it reads no values.

    Modules that also ask if they are exported are left alone, since they choose kernels by the answer.
    """
    import sys

    name, other = "is_torchdynamo_compiling", "is_torchdynamo_exporting"
    modules = {key: vars(each) for key, each in sys.modules.items() if key.startswith("transformers.models.") and each}
    return {(key, "", name): _always for key, names in modules.items() if name in names and other not in names}


def _conv1d(self: Any, x: Any) -> Any:
    """Compute GPT-2's linear layer (weight [in, out]) on [..., in] without flattening the leading dims.

    Query, key and value from one weight are computed as [..., 3, out]. Splitting [..., 3 out] into three would need a
    reshard wherever that dim is split.
    """
    width, total = self.weight.shape
    if total != 3 * width:
        return x @ self.weight + self.bias
    env = environment()
    value, weight, bias = (env.t2j_iso(tensor) for tensor in (x, self.weight, self.bias))
    parts = op_lowerings.linear_parts(value, weight.reshape(width, 3, width), bias.reshape(3, width))
    return _fused_type()(parts, env)


@functools.cache
def _fused_type() -> type:
    """Return the class of a tensor [..., n * out] that is stored as [..., n, out].

    Splitting such a tensor into its n parts cuts no dim.
    """
    from torchax import tensor

    class Fused(tensor.Tensor):
        @staticmethod
        def __new__(cls, parts: Any, env: Any) -> Any:
            return tensor.Tensor.__new__(cls, parts, env)

        def __init__(self, parts: Any, env: Any) -> None:
            self._parts, self._env = parts, env

        @property
        def _elem(self) -> Any:
            return self._parts.reshape(*self._parts.shape[:-2], -1)

        def split(self, split_size: Any, dim: int = 0) -> Any:
            count, width = self._parts.shape[-2:]
            if split_size == width and dim in (-1, self.ndim - 1):
                return tuple(self._env.j2t_iso(self._parts[..., i, :]) for i in range(count))
            return self._env.j2t_iso(self._elem).split(split_size, dim)

    return Fused


def _expand_kv(self: Any, kv_nope: Any, k_rot: Any) -> tuple[Any, Any]:
    """Compute DeepSeek's keys and values from latents by concatenation instead of writes into an empty tensor."""
    import torch

    batch, _, length, _ = kv_nope.shape
    nope, width = self.qk_nope_head_dim, self.qk_nope_head_dim + self.v_head_dim
    expanded = self.kv_b_proj(kv_nope).view(batch, length, -1, width).transpose(1, 2)
    key, value = expanded[..., :nope], expanded[..., nope:]
    return torch.cat([key, k_rot.expand(-1, key.shape[1], -1, -1)], dim=-1), value


def _always() -> bool:
    """Return True, so that model code caches no traced values for another call."""
    return True


def _not_packed(position_ids: Any) -> None:
    """Return None: positions are those of whole sequences.

    Several sequences packed in one row are not supported.
    """
    return None


def _biases(self: Any, device: Any) -> Any:
    """Return Levit's attention biases without the cache of its own code."""
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
"""Replacements by module name, class (empty for a function of the module) and attribute."""
