"""Mixtures of experts of transformers on shards: each device runs the experts and the tokens that the plan gives it.

What such a module does inside (rows sorted by expert, matrices multiplied in groups of rows) no DTensor can split, and
would be run whole on every device.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from autoshard.exec.apply._split_shards import local_part
from autoshard.exec.apply._split_trial import settle


def is_experts(module: Any) -> bool:
    """Whether a module is a block of experts as transformers has them, all of whose parameters are by expert."""
    count = getattr(module, "num_experts", None)
    if not isinstance(count, int) or not hasattr(module, "_is_expert_parallel"):
        return False
    own = list(module.parameters(recurse=False))
    return bool(own) and not list(module.children())[1:] and all(p.ndim > 1 and len(p) == count for p in own)


class ExpertHooks:
    """Hooks of a block of experts: it takes this device's tokens and holds its experts while it runs.

    A token that another device's expert is to have counts nothing here; what all devices make is summed.
    """

    def __init__(self, mesh: Any, taken: Mapping[str, Sequence[Any]]) -> None:
        self._mesh = mesh
        self._taken = dict(taken)
        """Parameter -> the placements in which the plan's ops take it, where it says that."""
        self._calls: list[tuple[Any, ...] | None] = []

    def before(self, module: Any, args: tuple[Any, ...]) -> Any:
        held = dict(module.named_parameters(recurse=False))
        fits = len(args) == 3 and all(isinstance(each, DTensor) for each in (*args, *held.values()))
        if not fits or len({len(each) for each in args}) != 1:
            self._calls.append(None)
            return None
        hidden, index, weights = (settle(each) for each in args)
        by_expert = self._axes_of_experts(held)
        rows: list[Any] = []
        for axis, place in enumerate(hidden.placements):
            rows.append(Shard(0) if place == Shard(0) and axis not in by_expert else Replicate())
        summed = [Partial() if axis in by_expert else place for axis, place in enumerate(rows)]
        own_hidden, own_weights = (local_part(each, rows, summed) for each in (hidden, weights))
        own_index = local_part(index, rows, rows)
        for name, parameter in held.items():
            places = [Shard(0) if axis in by_expert else Replicate() for axis in range(self._mesh.ndim)]
            grads = [Partial() if row.is_shard() else place for row, place in zip(rows, places, strict=True)]
            module.__dict__[name] = local_part(parameter, places, grads)
        if by_expert:
            count = len(module.__dict__[next(iter(held))])
            number = 0
            for axis in by_expert:
                number = number * self._mesh.size(axis) + self._mesh.get_local_rank(axis)
            elsewhere = own_index // count != number
            own_index = torch.where(elsewhere, count, own_index % count)
            own_weights = own_weights.masked_fill(elsewhere, 0)
            module.num_experts, module._is_expert_parallel = count, True
        self._calls.append((list(held), len(next(iter(held.values()))), summed, hidden.placements))
        return own_hidden, own_index, own_weights

    def after(self, module: Any, args: Any, output: Any) -> Any:
        called = self._calls.pop() if self._calls else None
        if called is None:
            return None
        names, count, places, before = called
        for name in names:
            module.__dict__.pop(name, None)
        module.num_experts, module._is_expert_parallel = count, False
        if not isinstance(output, torch.Tensor) or isinstance(output, DTensor):
            return None  # it failed
        made = DTensor.from_local(output, self._mesh, places, run_check=False)
        if any(place.is_partial() and own == Shard(0) for place, own in zip(places, before, strict=True)):
            return made.redistribute(placements=[own if own == Shard(0) else place
                                                 for place, own in zip(places, before, strict=True)])  # fmt: skip
        return made

    def _axes_of_experts(self, held: Mapping[str, Any]) -> list[int]:
        """Axes of the mesh over which parameters are taken split by experts; where that is not known, are held so."""
        places = [list(each) for each in self._taken.values()] or [list(each.placements) for each in held.values()]
        return [axis for axis in range(self._mesh.ndim) if all(each[axis] == Shard(0) for each in places)]
