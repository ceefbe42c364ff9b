"""Specs that a plan gives to a torch module's values: operands and results of its layers' ops, and values between
layers.
"""

import re

import numpy as np
from numpy.typing import NDArray

from autoshard.graph import Op, OpClass
from autoshard.planning.price.evaluate import tensor_spec
from autoshard.planning.price.reshard_times import cluster_names
from autoshard.planning.record.plan_parts import Activation, ParameterUse
from autoshard.planning.record.spec import Spec, is_stacked
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.dim_groups import factor_states
from autoshard.program import WEIGHTS


def parameter_uses(model: Model, choices: NDArray[np.int64]) -> tuple[ParameterUse, ...]:
    """Return the uses of parameters by heavy ops with exactly one other operand; empty for programs of no torch module.

    The runtime finds a layer of a torch module by its parameter, and a call by the shapes of operands and results. Uses
    of one parameter with equal shapes, such as those of recomputed layers, are reported once, in program order. So the
    forward op counts and not its gradients.
    """
    if not model.program.weights:
        return ()
    parameters = {a.name: t for a, t in zip(model.program.arguments, model.graph.arguments, strict=True)
                  if a.role in WEIGHTS}  # fmt: skip
    named = {cluster: name for cluster, name in cluster_names(model).items() if name in parameters}
    uses: dict[tuple[object, ...], ParameterUse] = {}
    for op in model.graph.ops:
        if op.op_class is OpClass.HEAVY and op.id in model.op_node and op.rule is not None:
            for operand, tensor in enumerate(op.operands):
                name = named.get(model.structure.cluster_of[tensor])
                if name is not None:
                    use = _use(model, choices, op, operand, name, parameters[name])
                    if use is not None:
                        uses.setdefault((name, use.input_shape, use.output_shape), use)
    return tuple(uses.values())


def activations(model: Model, choices: NDArray[np.int64]) -> tuple[Activation, ...]:
    """Return the specs of torch functions' results in the forward pass; empty for programs of no torch module.

    A module at run time knows only its functions and shapes. So results of one function and shape are reported only if
    all have the same spec. Results with fewer than two dims are left out.
    """
    if not model.program.weights:
        return ()
    specs_of: dict[tuple[str, tuple[int, ...]], set[Spec]] = {}
    for op in model.graph.ops:
        function = torch_function(op.name)
        if function:
            for result in op.results:
                shape = tuple(model.graph.tensors[result].shape)
                if len(shape) > 1 and model.structure.cluster_of[result] >= 0:
                    specs_of.setdefault((function, shape), set()).add(tensor_spec(model, choices, result))
    return tuple(Activation(*key, next(iter(specs))) for key, specs in specs_of.items() if len(specs) == 1)


def torch_function(name: str) -> str:
    """Return the torch function that an op belongs to: `add` for `jit(step)/jvp(aten::add.Tensor)/add`.

    It is the last but one part of the op's path, without `aten::`, overload and outer underscores. The name is empty
    for gradients, and for ops that belong to no function.
    """
    if "transpose(jvp" in name or "/" not in name:
        return ""
    last = name.split("/")[-2]
    match = re.fullmatch(r"(?:jvp\()?(?:aten::)?_*([a-z]\w*?)_*(?:\.\w+)?\)?", last)
    return "" if match is None or match[1] in _NO_FUNCTIONS else match[1]


_NO_FUNCTIONS = {"body", "cond", "while", "closed_call", "checkpoint", "remat", "jvp"}
"""Parts of paths that JAX adds, which are no torch functions."""


def _use(
    model: Model, choices: NDArray[np.int64], op: Op, operand: int, name: str, parameter: int
) -> ParameterUse | None:
    """Return the use of a parameter by an op.

    - `operand`: number of the operand that is the parameter, or a value with its dims.
    - `name`: name of the parameter.
    - `parameter`: its tensor.

    Return None unless the op has exactly one other operand that is no scalar, and one result. Return None also if the
    op splits a dim of the operand that the parameter does not have. The spec of a stacked parameter is that of one
    layer.
    """
    tensors, dims_of = model.graph.tensors, model.structure.dims_of
    others = [k for k, tensor in enumerate(op.operands) if k != operand and tensors[tensor].shape]
    own = list(dims_of[parameter])
    axes = _axes(model, choices, op, operand)
    axes_of_dim: dict[int, tuple[str, ...]] = {}
    for factor, split in zip(dims_of[op.operands[operand]], axes, strict=True):
        if split and factor not in own:
            return None
        if split:
            axes_of_dim[own.index(factor)] = split
    if len(others) != 1 or len(op.results) != 1:
        return None
    stacked = is_stacked(name)
    weight = Spec(tuple(axes_of_dim.get(dim, ()) for dim in range(stacked, len(own))))
    input_tensor, output_tensor = op.operands[others[0]], op.results[0]
    return ParameterUse(
        name,
        weight,
        tuple(tensors[input_tensor].shape),
        Spec(tuple(_axes(model, choices, op, others[0]))),
        tuple(tensors[output_tensor].shape),
        tensor_spec(model, choices, output_tensor),
    )


def _axes(model: Model, choices: NDArray[np.int64], op: Op, operand: int) -> list[tuple[str, ...]]:
    """Return the mesh axes over each dim of an operand, in mesh order, as the op's chosen strategy consumes it."""
    assert op.rule is not None
    node = model.op_node[op.id]
    state = factor_states(model.nodes[node].states, op.rule.operands[operand])[int(choices[node])]
    rank = len(model.graph.tensors[op.operands[operand]].shape)
    return [tuple(model.axis_names[a] for a in np.flatnonzero(state == dim)) for dim in range(rank)]
