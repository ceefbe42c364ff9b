"""How much of what has a dim group is split there, by axis."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.plan.model._groups import Groups, tensor_groups
from autoshard.plan.model._model import Model
from autoshard.plan.price._predict import tensor_spec


def shares_of(
    model: Model, groups: Groups, choices: NDArray[np.int64], tensors: Sequence[int]
) -> dict[tuple[int, str], float]:
    """(group, axis) -> share of the bytes of tensors with that group in which the axis splits it."""
    split: dict[tuple[int, str], int] = defaultdict(int)
    total: dict[int, int] = defaultdict(int)
    for tensor in tensors:
        if model.structure.cluster_of[tensor] < 0:
            continue  # generated anew wherever it is needed
        size = model.graph.tensors[tensor].bytes
        spec = tensor_spec(model, choices, tensor)
        for group, axes in zip(tensor_groups(model.structure, groups.of_factor, tensor), spec.dims, strict=True):
            if group is None:
                continue
            total[group] += size
            for axis in axes:
                split[(group, axis)] += size
    return {(g, a): size / total[g] for (g, a), size in split.items()}
