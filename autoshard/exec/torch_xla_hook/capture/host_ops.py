"""Ops that PyTorch/XLA computes on the host, since it has no kernel for them.

PyTorch/XLA compiles a program each time that it gathers a split tensor for the host, so in every step for such an op.
Here the tensor is assembled on the host from its shards instead.
"""

import functools
import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from autoshard.exec.torch_xla_hook.capture.op_events import without_observers
from autoshard.exec.torch_xla_hook.values.device_kernels import replace_kernels
from autoshard.exec.torch_xla_hook.values.lazy_tensors import on_xla, xlac


_standing: set[str] = set()
"""Ops that are replaced already, and ops that cannot be."""

_ran: set[str] = set()
"""Replaced ops that have run since `keep_out_of_regions` last cleared the set."""


def keep_out_of_regions() -> None:
    """Make `torch.compile` exclude the replaced ops from its regions, as it excludes PyTorch/XLA's own host ops.

    It runs each op and asks which ops ran on the host. A region would store such an op's first result as a constant.
    """
    bridge: Any = importlib.import_module("torch_xla._dynamo.dynamo_bridge")
    theirs, run_node = bridge.get_fallback_ops, bridge.UnsupportedNodesCollector.run_node

    @functools.wraps(run_node)
    def run(collector: Any, node: Any) -> Any:
        """Run a node, with the set of host ops cleared before it."""
        _ran.clear()
        return run_node(collector, node)

    bridge.UnsupportedNodesCollector.run_node = run
    bridge.get_fallback_ops = lambda: [*theirs(), *sorted(_ran)]


def stand_in_on_host() -> None:
    """Replace the kernels of the ops that ran on the host so far, found by PyTorch/XLA's counters.

    Ops that are replaced already, and ops that `_op` refuses, are skipped.
    """
    import torch_xla.debug.metrics as metrics

    names = {name.removeprefix("aten::") for name in metrics.counter_names() if name.startswith("aten::")}
    new = names - _standing
    _standing.update(new)
    ops = {name: op for name in new if (op := _op(name)) is not None}
    replace_kernels({name: functools.partial(run_on_host, name, op) for name, op in ops.items()})


def _op(name: str) -> Any:
    """Return the `aten` op of a name if it computes tensors from tensors; None for others, and for reads of a
    number.
    """
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    if op is None or packet == "_local_scalar_dense":
        return None
    takes_device = any("Device" in str(argument.type) for argument in op._schema.arguments)  # also an optional one
    gives_tensors = all(result.type.kind() == "TensorType" for result in op._schema.returns)
    return op if gives_tensors and not takes_device else None


def run_on_host(name: str, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an op on the host: copy its tensors there, and copy the results and written arguments back.

    `name` of the op is recorded as run. Returns the results on the XLA device; a result that is an argument is that
    argument's own tensor.
    """
    _ran.add(name)
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor) and on_xla(each)]
    with torch.no_grad(), without_observers():
        here = {id(each): read for each, read in zip(given, xlac()._xla_get_cpu_tensors(given), strict=True)}
        device_tensors = {id(here[id(each)]): each for each in given}
        made = op(*_each(args, here), **_each(kwargs, here))
        named = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
        for argument in op._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = named[argument.name]
                torch.ops.aten._copy_from_and_resize.default(here[id(written)], written)
        return tree_map_only(
            torch.Tensor,
            lambda each: device_tensors[id(each)] if id(each) in device_tensors else _copied(each, given[0].device),
            made,
        )


def _each(values: Any, known: Mapping[int, Any]) -> Any:
    """Replace tensors in nested values by the ones that `known` has for their `id`; others stay."""
    return tree_map_only(torch.Tensor, lambda each: known.get(id(each), each), values)


def _copied(tensor: Any, device: Any) -> Any:
    """Copy a tensor to a device."""
    return torch.ops.aten._to_copy.default(tensor, device=device)
