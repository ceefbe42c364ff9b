"""How a plan splits what a torch module computes: what its layers' own ops take and give, and values between them."""

import re

import numpy as np
from numpy.typing import NDArray

from autoshard.graph import Op, OpClass
from autoshard.planning.price.evaluate import cluster_names, tensor_spec
from autoshard.planning.record.plan_parts import Activation, ParameterUse
from autoshard.planning.record.spec import Spec, is_stacked
from autoshard.planning.space.decision_model import Model
from autoshard.planning.space.dim_groups import factor_states
from autoshard.program import WEIGHTS


def parameter_uses(model: Model, choices: NDArray[np.int64]) -> tuple[ParameterUse, ...]:
    """Of every op that takes a parameter and one value; empty for programs that are of no torch module.

    A layer of a torch module is found again by its parameter, and its call by the shapes of what it takes and gives.
    Of several ops alike, as those of recomputed layers are, the first is told; a forward op comes before its gradients.
    """
    if not model.program.weights:
        return ()
    parameters = {a.name: t for a, t in zip(model.program.arguments, model.graph.arguments, strict=True)
                  if a.role in WEIGHTS}  # fmt: skip
    named = {cluster: name for cluster, name in cluster_names(model).items() if name in parameters}
    found: dict[tuple[object, ...], ParameterUse] = {}
    for op in model.graph.ops:
        if op.op_class is OpClass.HEAVY and op.id in model.op_node and op.rule is not None:
            for operand, tensor in enumerate(op.operands):
                name = named.get(model.structure.cluster_of[tensor])
                if name is not None:
                    use = _use(model, choices, op, operand, name, parameters[name])
                    if use is not None:
                        found.setdefault((name, use.input_shape, use.output_shape), use)
    return tuple(found.values())


def activations(model: Model, choices: NDArray[np.int64]) -> tuple[Activation, ...]:
    """What functions of torch give in the forward pass, where all that one gives in one shape is split alike.

    A module that runs by itself knows its functions and shapes only: where these do not decide, nothing is said.
    """
    if not model.program.weights:
        return ()
    found: dict[tuple[str, tuple[int, ...]], set[Spec]] = {}
    for op in model.graph.ops:
        function = torch_function(op.name)
        if function:
            for result in op.results:
                shape = tuple(model.graph.tensors[result].shape)
                if len(shape) > 1 and model.structure.cluster_of[result] >= 0:
                    found.setdefault((function, shape), set()).add(tensor_spec(model, choices, result))
    return tuple(Activation(*key, next(iter(specs))) for key, specs in found.items() if len(specs) == 1)


def torch_function(name: str) -> str:
    """The function of torch that an op is a part of: `add` of `jit(step)/jvp(aten::add.Tensor)/add`.

    Empty for gradients, and for what is a part of none.
    """
    if "transpose(jvp" in name or "/" not in name:
        return ""
    last = name.split("/")[-2]
    found = re.fullmatch(r"(?:jvp\()?(?:aten::)?_*([a-z]\w*?)_*(?:\.\w+)?\)?", last)
    return "" if found is None or found[1] in _NO_FUNCTIONS else found[1]


_NO_FUNCTIONS = {"body", "cond", "while", "closed_call", "checkpoint", "remat", "jvp"}


def _use(
    model: Model, choices: NDArray[np.int64], op: Op, operand: int, name: str, parameter: int
) -> ParameterUse | None:
    """None where the op takes no single value beside, or the parameter in other dims than its own."""
    tensors, dims_of = model.graph.tensors, model.structure.dims_of
    others = [k for k, tensor in enumerate(op.operands) if k != operand and tensors[tensor].shape]
    own = list(dims_of[parameter])
    axes = _axes(model, choices, op, operand)
    where: dict[int, tuple[str, ...]] = {}
    for factor, split in zip(dims_of[op.operands[operand]], axes, strict=True):
        if split and factor not in own:
            return None
        if split:
            where[own.index(factor)] = split
    if len(others) != 1 or len(op.results) != 1:
        return None
    stacked = is_stacked(name)
    weight = Spec(tuple(where.get(dim, ()) for dim in range(stacked, len(own))))
    taken, given = op.operands[others[0]], op.results[0]
    return ParameterUse(
        name,
        weight,
        tuple(tensors[taken].shape),
        Spec(tuple(_axes(model, choices, op, others[0]))),
        tuple(tensors[given].shape),
        tensor_spec(model, choices, given),
    )


def _axes(model: Model, choices: NDArray[np.int64], op: Op, operand: int) -> list[tuple[str, ...]]:
    """Mesh axes over every dim of what an op takes, as it takes it."""
    assert op.rule is not None
    node = model.op_node[op.id]
    state = factor_states(model.nodes[node].states, op.rule.operands[operand])[int(choices[node])]
    rank = len(model.graph.tensors[op.operands[operand]].shape)
    return [tuple(model.axis_names[a] for a in np.flatnonzero(state == dim)) for dim in range(rank)]
