"""Dims that a plan pads, as their size does not divide by the axes that split them, and the empty work of the pads."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from autoshard.planning.price.evaluate import tensor_spec
from autoshard.planning.price.replicated_work import factor_name
from autoshard.planning.price.step_ledger import Ledger
from autoshard.planning.record.spec import axis_words
from autoshard.planning.space.dim_groups import Groups, tensor_groups
from autoshard.planning.space.op_models import FOLDED_OPS


NOTICEABLE = 0.03
"""Least share of the step's time that the pads of a dim must take for a sentence about it."""


@dataclasses.dataclass(frozen=True, slots=True)
class UnevenSplit:
    """A dim that some axes split unevenly, in all ops together."""

    name: str
    """Name of its dim group; empty for a group without a name."""
    size: int
    padded: int
    """Least multiple of the devices along the axes that holds the dim."""
    axes: tuple[str, ...]
    seconds: float = 0.0
    """Compute seconds of a step that are spent on the pads."""

    @property
    def empty(self) -> float:
        """Share of the dim's work that is spent on the pads."""
        return 1.0 - self.size / self.padded

    @property
    def words(self) -> str:
        """The dim as words: `the batch of 100 is padded to 128 over data and model`."""
        name = f"the {self.name}" if self.name else "a dim"
        return f"{name} of {self.size} is padded to {self.padded} over {' and '.join(axis_words(self.axes))}"


def find_uneven(ledger: Ledger, groups: Groups) -> tuple[list[UnevenSplit], float]:
    """Return the dims that are split unevenly, the most empty seconds first, and the padded over the traced FLOPs."""
    model = ledger.model
    seconds: dict[UnevenSplit, float] = defaultdict(float)
    traced = padded_flops = 0.0
    for row in ledger.rows:
        if row.kind != "compute" or row.op < 0:
            continue
        op, number = model.graph.ops[row.op], model.op_node[row.op]
        if op.rule is None or op.kind in FOLDED_OPS:
            continue
        state = model.nodes[number].states[ledger.choices[number]]
        factors = sorted({factor for factor in state.tolist() if factor >= 0})
        split = {factor: [model.axis_names[a] for a in np.flatnonzero(state == factor)] for factor in factors}
        dims = [(factor_name(model, groups, op, f), op.rule.sizes[f], axes) for f, axes in split.items()]
        uneven = [*_uneven(ledger, dims)]
        for each in uneven:
            seconds[each] += row.step_s * each.empty
        flops = op.flops * model.graph.trips(op.loop)
        traced += flops
        padded_flops += flops * math.prod(each.padded / each.size for each in uneven)
    for moved in ledger.passes:
        spec, shape = tensor_spec(model, ledger.choices, moved.tensor), model.graph.tensors[moved.tensor].shape
        near = tensor_groups(model.structure, groups.of_factor, moved.tensor)
        names = ["" if group is None else groups.names.get(group, "") for group in near]
        pass_s = 0.0 if moved.on_host else float(model.compute.memory_seconds(moved.size)) * moved.times
        for each in _uneven(ledger, [*zip(names, shape, spec.dims, strict=True)]):
            seconds[each] += pass_s * each.empty
    found = [dataclasses.replace(each, seconds=spent) for each, spent in seconds.items()]
    return sorted(found, key=lambda each: (-each.seconds, each.words)), padded_flops / traced if traced else 1.0


def uneven_lines(uneven: Sequence[UnevenSplit], step_time_s: float) -> list[str]:
    """Return a sentence for each dim whose pads take at least `NOTICEABLE` of the predicted step."""
    return [
        f"{each.words}: {each.empty:.0%} of its compute is empty, {each.seconds / step_time_s:.0%} of the step; "
        f"{each.padded} would take the same time."
        for each in uneven
        if step_time_s > 0 and each.seconds >= NOTICEABLE * step_time_s
    ]


def _uneven(ledger: Ledger, dims: Sequence[tuple[str, int, Sequence[str]]]) -> Iterator[UnevenSplit]:
    """Yield the dims, each with its name, size and axes, that their axes do not divide."""
    for name, size, axes in dims:
        parts = math.prod(ledger.model.mesh.axes[axis] for axis in axes)
        padded = -(-size // parts) * parts
        if size and padded != size:
            yield UnevenSplit(name, size, padded, tuple(axes))
