"""A stated sharding of a program in stages: what is stated is the sharding of a stage.

Whatever has a dim of stages splits it over their axis (`_stage_axis`). Everything else is stated without that axis, so
the rules for programs without stages serve, on a model that does not show it.
"""

import dataclasses
import re

import numpy as np

from autoshard.plan.model._model import Model
from autoshard.plan.model._restrict import Baseline
from autoshard.plan.xla._states import WHOLE
from autoshard.program import WEIGHTS, Role


_STAGED_STACK = re.compile(r"(?:^|\.)layers(?:\.\d+)?\.(?:\*|\[\d+:\])\.")


def without_axis(model: Model, axis: int) -> Model:
    """The same alternatives, none of which shows what it does with one axis."""
    nodes = []
    for node in model.nodes:
        states = node.states.copy()
        states[:, axis] = WHOLE
        nodes.append(dataclasses.replace(node, states=states))
    return dataclasses.replace(model, nodes=tuple(nodes))


def with_stages_held(model: Model, stated: Baseline, axis: int, stack_dim: int) -> Baseline | None:
    """The same with the axis of the stages as MaxText has it: stacks of layers in stages, and their optimizer state,
    lie on their stages' devices, and all other parameters are whole along it.

    `stack_dim` is the dim of stacks that counts layers. In rounds the layers of a stage do not follow one another, and
    which dim is split is left open. None if the sharding of a stage then leaves no alternative.
    """
    allowed = dict(stated.allowed)
    in_order = model.program.pipeline is not None and model.program.pipeline["rounds"] == 1
    for tensor, argument in zip(model.graph.arguments, model.program.arguments, strict=True):
        cluster = model.structure.cluster_of[tensor]
        if argument.role not in (*WEIGHTS, Role.OPTIMIZER_STATE) or cluster < 0:
            continue
        node = model.cluster_node[cluster]
        on_axis = model.nodes[node].states[:, axis]
        mask = allowed.get(node, np.ones(len(on_axis), dtype=bool))
        own = mask & (on_axis == WHOLE)
        if _STAGED_STACK.search(argument.name):
            layers = model.structure.dims_of[tensor][stack_dim]
            by_stage = mask & (on_axis == layers if in_order and layers >= 0 else on_axis != WHOLE)
            own = by_stage if by_stage.any() else own
        if not own.any():
            return None
        allowed[node] = own
    return Baseline(stated.name, allowed)
